"""One plan of all memory that a model will take, made before anything is allocated.

What is fixed comes first: dense weights, the state of a sequence, scratch. The expert cache gets
what its budget and the device leave. Where the dense weights leave less than a useful cache, some
decoder layers wait in host memory and stream through two buffers: slower, and exact.

Rejected: allocating in some order and seeing what is left (the error comes after minutes of
loading, and the cache is as large as luck has it), and a user's choice of what streams (the numbers
decide it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from tieredmoe.adapters.routed_scratch import linear_nbytes, routed_nbytes
from tieredmoe.adapters.streamed_layers import layer_nbytes
from tieredmoe.budget import format_size, parse_size
from tieredmoe.errors import BudgetError
from tieredmoe.pack import DrivesPack
from tieredmoe.pack.tensors import N_PIECES, PIECE_NBYTES
from tieredmoe.tier_plan import Plan, plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tieredmoe.adapters.machine import Machine
    from tieredmoe.adapters.model_needs import ModelNeeds
    from tieredmoe.config import HierarchyConfig
    from tieredmoe.pack import Checkpoint

LEAST_CACHE_SHARE = 4
"""One in so many of the experts that a token uses should find a slot, before layers stream: no
policy hits more than slots / experts per token, and below a quarter caches hit next to nothing."""

DEVICE_OVERHEAD_NBYTES = 512 << 20
"""What is taken of a device beside our tensors, at most. Measured on an H200 with a Kimi-K3 of the
published width: 140 MiB of libraries' code, handles and recorded graphs, and 440 MiB in which
torch's allocator keeps what steps of other sizes have freed, of which the bounds on scratch cover a
part. Also in it are two workspaces of cuBLAS, 64 MiB. A small model uses next to nothing of it."""

_FLOAT_NBYTES = 4


@attrs.frozen
class Share:
    """What one thing takes."""

    name: str
    nbytes: int
    note: str = ""


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """What a model will take and where; made by ``plan_memory``. ``str`` of it is a table.

    ``shares`` are those of the memory where the model computes, the expert cache last;
    ``host_shares`` those of host memory if that is another.
    """

    machine: Machine
    needs: ModelNeeds
    shares: tuple[Share, ...]
    host_shares: tuple[Share, ...]
    reserve_nbytes: int
    tiers: Plan
    streamed: tuple[int, ...]
    """decoder layers whose matrices stream"""

    @property
    def nbytes(self) -> int:
        """Bytes of all ``shares``."""
        return _sum(self.shares)

    @property
    def host_nbytes(self) -> int:
        """Bytes of all ``host_shares``."""
        return _sum(self.host_shares)

    def hierarchy_config(self, config: HierarchyConfig) -> HierarchyConfig:
        """``config`` with the expert cache as planned; all else has been taken off already."""
        ram = self.tiers.stage_nbytes if self.tiers.keeps else None
        return attrs.evolve(config, vram=self.tiers.top_nbytes, reserve=0, ram=ram, ram_reserve=0)

    def __str__(self) -> str:
        machine = self.machine
        left_nbytes = machine.free_nbytes - self.nbytes
        lines = [
            f"memory of {machine.name}: {format_size(machine.free_nbytes)} free",
            *_rows([*self.shares, Share("left", left_nbytes, _reserve(self.reserve_nbytes))]),
        ]
        if self.host_shares:
            left_nbytes = machine.host_free_nbytes - self.host_nbytes
            lines += [
                f"memory of the host: {format_size(machine.host_free_nbytes)} free",
                *_rows([*self.host_shares, Share("left", left_nbytes)]),
            ]
        return "\n".join(lines)


def plan_memory(
    source: Checkpoint, needs: ModelNeeds, config: HierarchyConfig, *, machine: Machine
) -> MemoryPlan:
    """What ``source`` will take on ``machine``, of which nothing is allocated here.

    Raises ``BudgetError`` with every number and the way out where one layer's top-k of experts does
    not fit beside all else, on the device or on the host.
    """
    spec = source.spec
    reserve_nbytes = config.reserve_nbytes(machine.free_nbytes)
    requested_nbytes = parse_size(config.vram, whole_nbytes=machine.free_nbytes)
    fixed = tuple(_fixed(source, needs, machine=machine))
    streamed: tuple[int, ...] = ()
    if machine.is_device:
        n_least = -(-len(spec.layers) * spec.top_k // LEAST_CACHE_SHARE)
        least_nbytes = min(requested_nbytes, n_least * spec.slot_nbytes)
        least_nbytes = max(least_nbytes, spec.top_k * spec.slot_nbytes)
        nbytes_max = machine.free_nbytes - _sum(fixed) - reserve_nbytes - least_nbytes
        streamed = _layers_to_stream(needs, spec.layers, nbytes_max=nbytes_max)
    taken = (*_dense(needs, streamed, machine=machine), *fixed)
    host = tuple(_host(needs, streamed, machine=machine))
    try:
        tiers = plan(
            spec,
            attrs.evolve(config, vram=requested_nbytes, reserve=reserve_nbytes),
            read_nbytes=source.slot_nbytes,
            free_nbytes=machine.free_nbytes - _sum(taken),
            host_free_nbytes=machine.host_free_nbytes - _sum(host),
            n_drives=len(source.drives) if isinstance(source, DrivesPack) else 1,
        )
    except BudgetError as error:
        raise BudgetError(f"{error}. {_explained(taken, needs, machine=machine)}") from error
    cache = Share(
        "expert cache",
        tiers.top_nbytes,
        f"{tiers.n_slots} slots of {format_size(tiers.slot_nbytes)}, "
        f"{tiers.n_slots / spec.n_records:.1%} of all experts",
    )
    name, note = "staging", ""
    if tiers.keeps:
        name = "RAM tier"
        note = f"{tiers.stage_slots} slots, {tiers.stage_slots / spec.n_records:.1%} of all experts"
    staging = Share(name, tiers.stage_nbytes, note)
    if not machine.is_device and staging.nbytes:
        taken = (*taken, staging)
    made = MemoryPlan(
        machine=machine,
        needs=needs,
        shares=(*taken, cache),
        host_shares=(*host, staging) if machine.is_device else (),
        reserve_nbytes=reserve_nbytes,
        tiers=tiers,
        streamed=streamed,
    )
    if made.host_nbytes > machine.host_free_nbytes:
        raise BudgetError(_host_refusal(made))
    return made


def _fixed(source: Checkpoint, needs: ModelNeeds, *, machine: Machine) -> Iterator[Share]:
    """What depends on neither the cache nor where dense layers are."""
    n_tokens, spec, dense = needs.chunk_length, source.spec, needs.dense
    state_nbytes = needs.state_nbytes + (needs.step_nbytes if machine.is_device else 0)
    yield Share("sequence", state_nbytes, f"{needs.n_context} tokens")
    scratch_nbytes = needs.activation_nbytes + needs.logits_nbytes
    scratch_nbytes += routed_nbytes(spec, n_tokens=n_tokens, on_device=machine.is_device)
    if machine.is_device:
        scratch_nbytes += linear_nbytes(dense.n_columns)
    yield Share("scratch", scratch_nbytes, f"prompts in chunks of {n_tokens} tokens")
    if machine.is_device:
        yield Share("graphs, libraries", DEVICE_OVERHEAD_NBYTES, "an allowance")


def _dense(needs: ModelNeeds, streamed: tuple[int, ...], *, machine: Machine) -> Iterator[Share]:
    dense = needs.dense
    if not machine.is_device:
        yield Share("dense weights", dense.file_nbytes)
        return
    yield Share("dense weights", dense.resident_nbytes(streamed) + dense.values_nbytes)
    if streamed:
        yield Share(
            "streaming",
            2 * max(layer_nbytes(dense.layers[layer]) for layer in streamed),
            f"{len(streamed)} of {len(dense.layers)} layers through two buffers",
        )


def _host(needs: ModelNeeds, streamed: tuple[int, ...], *, machine: Machine) -> Iterator[Share]:
    """What the host holds for a GPU beside staging or the RAM tier."""
    if not machine.is_device:
        return
    yield Share("embedding", needs.dense.embedding_nbytes)
    yield Share("loading", N_PIECES * PIECE_NBYTES, "given back")
    if streamed:
        nbytes = sum(layer_nbytes(needs.dense.layers[layer]) for layer in streamed)
        rate = machine.link_bytes_per_s()
        yield Share(
            "streamed layers",
            nbytes,
            f"{1e3 * nbytes / rate:.0f} ms per token at {rate / 1e9:.1f} GB/s",
        )


def _layers_to_stream(
    needs: ModelNeeds, routed: Sequence[int], *, nbytes_max: int
) -> tuple[int, ...]:
    """The fewest layers, spread evenly, without which the dense weights take ``nbytes_max``.

    Only layers with experts: while those are awaited, the next layer comes. An even number, so that
    the two buffers take turns from one token to the next, too. As many as there are if even that is
    not enough.
    """
    dense = needs.dense
    streamed: tuple[int, ...] = ()
    for n in range(2, len(routed) + 2, 2):
        nbytes = dense.resident_nbytes(streamed) + dense.values_nbytes
        nbytes += 2 * max((layer_nbytes(dense.layers[layer]) for layer in streamed), default=0)
        if nbytes <= nbytes_max or n + 2 > len(routed):
            break
        # Two layers would fill the two buffers: four are the least that save anything.
        streamed = tuple(routed[(2 * i + 1) * len(routed) // (2 * (n + 2))] for i in range(n + 2))
    return streamed


def _explained(taken: Sequence[Share], needs: ModelNeeds, *, machine: Machine) -> str:
    shares = ", ".join(f"{share.name} {format_size(share.nbytes)}" for share in taken)
    return (
        f"Free is what is left of {format_size(machine.free_nbytes)} of {machine.name} beside "
        f"{shares}; a smaller n_context (now {needs.n_context}) or chunk_length (now "
        f"{needs.chunk_length}) makes room"
    )


def _host_refusal(made: MemoryPlan) -> str:
    shares = ", ".join(f"{share.name} {format_size(share.nbytes)}" for share in made.host_shares)
    missing_nbytes = made.host_nbytes - made.machine.host_free_nbytes
    way_out = f"free another {format_size(missing_nbytes)}"
    if made.streamed:
        way_out += ", or make room for more layers on the GPU with a smaller vram or reserve"
    return (
        f"host memory: {shares} are {format_size(made.host_nbytes)}, and "
        f"{format_size(made.machine.host_free_nbytes)} can be taken; {way_out}"
    )


def _sum(shares: Sequence[Share]) -> int:
    return sum(share.nbytes for share in shares)


def _rows(shares: Sequence[Share]) -> Iterator[str]:
    for share in shares:
        yield f"  {share.name:<18}{format_size(share.nbytes):>12}  {share.note}".rstrip()


def _reserve(nbytes: int) -> str:
    return f"{format_size(nbytes)} of it in reserve" if nbytes else ""
