"""``tieredmoe pack plan``: what a machine would make of a model, before either is bought."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from tieredmoe.budget import format_size, parse_size
from tieredmoe.cli.columns import in_columns
from tieredmoe.cli.pack_inspect import plain
from tieredmoe.pack.token_costs import Rates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tieredmoe.adapters.memory_plan import MemoryPlan
    from tieredmoe.adapters.run_plan import RunPlan
    from tieredmoe.pack.token_costs import TokenCost

_WAYS = {"disk": "SSD", "link": "link", "memory": "memory"}

SourcePath = Annotated[
    Path,
    typer.Argument(help="A GGUF (a file, a shard, their folder) or a pack.", metavar="SOURCE"),
]


def plan(
    path: SourcePath,
    *,
    disk_gbps: Annotated[
        float,
        typer.Option(
            help="What the drives read, in GB/s; `tieredmoe bench io` measures it.", min=0.001
        ),
    ],
    ram: Annotated[str, typer.Option(help="Host memory to use, like 64GiB.")],
    vram: Annotated[
        str | None,
        typer.Option(help="Free memory of the GPU, like 24GiB; without it the host computes."),
    ] = None,
    reserve: Annotated[str, typer.Option(help="Memory to leave alone where it computes.")] = "3GiB",
    link_gbps: Annotated[
        float, typer.Option(help="Host to GPU, in GB/s: 25 is PCIe 4.0 x16.", min=0.001)
    ] = 25.0,
    memory_gbps: Annotated[
        float | None,
        typer.Option(
            help="Bandwidth where it computes, in GB/s; by default 1000 on a GPU, 60 on a host.",
            min=0.001,
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of context to set memory aside for.", min=2)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how fast a model could run on a machine, and what would limit it, without having it.

    Shows the memory that everything takes, the experts that find a slot, the hit rate that no
    policy can pass, and for some hit rates the bytes of a token, the time that each way needs for
    them, and tokens per second. These are upper bounds: all ways are taken to overlap perfectly.

    Example: tieredmoe pack plan /models/K3 --vram 24GiB --ram 64GiB --disk-gbps 12
    """
    rates = Rates(
        disk=disk_gbps * 1e9,
        link=None if vram is None else link_gbps * 1e9,
        memory=1e9 * (memory_gbps or (60.0 if vram is None else 1000.0)),
    )
    # Torch takes seconds to import, and commands that copy bytes do without.
    from tieredmoe.adapters.run_plan import plan_run  # noqa: PLC0415

    made = plan_run(
        path,
        rates,
        ram_nbytes=parse_size(ram),
        vram_nbytes=None if vram is None else parse_size(vram),
        reserve=reserve,
        n_context=context,
    )
    if as_json:
        typer.echo(json.dumps(_plain(made), indent=2))
    else:
        _show(made)


def _plain(made: RunPlan) -> dict[str, object]:
    fields = {field.name: getattr(made, field.name) for field in attrs.fields(type(made))}
    for name in ("costs", "costs_with_host"):
        fields[name] = [_plain_cost(cost) for cost in fields[name]]
    fields |= {"best": _plain_cost(made.best), "memory": _memory(made.memory)}
    return {name: plain(value) for name, value in fields.items()}


def _plain_cost(cost: TokenCost) -> dict[str, object]:
    return attrs.asdict(cost) | {"tokens_per_s": cost.tokens_per_s, "bound": cost.bound}


def _memory(memory: MemoryPlan) -> dict[str, object]:
    return {
        "shares": {share.name: share.nbytes for share in memory.shares},
        "host_shares": {share.name: share.nbytes for share in memory.host_shares},
        "reserve_nbytes": memory.reserve_nbytes,
        "streamed_layers": list(memory.streamed),
    }


def _show(made: RunPlan) -> None:
    typer.echo(str(made.memory))
    for lines in (_cache(made), _table(made), _best(made)):
        typer.echo()
        for line in lines:
            typer.echo(line)


def _cache(made: RunPlan) -> Iterator[str]:
    where = "on the host" if made.rates.link is None else "in VRAM"
    yield (
        f"a token uses {made.token_experts:,} of {made.n_experts:,} experts (W), "
        f"{format_size(made.token_bytes.experts)}, and {format_size(made.token_bytes.dense)} of "
        "dense weights"
    )
    cycles = made.top_slots / made.token_experts
    yield (
        f"{made.top_slots:,} slots {where} are {made.top_slots / made.n_experts:.1%} of all "
        f"experts and {cycles:.2f} W"
        + (f": no policy hits more than {made.top_ceiling:.1%}" if cycles < 1 else "")
    )
    if made.host_slots:
        together = (made.top_slots + made.host_slots) / made.token_experts
        yield (
            f"{made.host_slots:,} more would fit in the RAM that is left, {together:.2f} W together"
        )


def _table(made: RunPlan) -> Iterator[str]:
    """A row per hit rate: bytes from disk, the time of each way, the speed that the slowest allows.

    Figures under the name of a way say how fast it is taken to be.
    """
    rates = made.rates
    ways = [("SSD", rates.disk), ("link", rates.link), ("memory", rates.memory)]
    used = [(name, rate) for name, rate in ways if rate is not None]
    heading = ["hits", "from disk", *(name for name, _ in used), "at most", "bound by"]
    units = ["", "", *(f"{rate / 1e9:g} GB/s" for _, rate in used), "tok/s", ""]
    if made.costs_with_host:
        heading += ["with RAM", "bound by"]
        units += ["tok/s", ""]
    rows = [heading, units]
    for index, cost in enumerate(made.costs):
        times = {"SSD": cost.disk_s, "link": cost.link_s, "memory": cost.memory_s}
        most = "max " if index + 1 == len(made.costs) else ""
        row = [f"{most}{cost.top_hits:.1%}", format_size(cost.disk_nbytes)]
        row += [f"{_digits(1e3 * times[name])} ms" for name, _ in used]
        row += [_digits(cost.tokens_per_s), _WAYS[cost.bound]]
        if made.costs_with_host:
            other = made.costs_with_host[index]
            row += [_digits(other.tokens_per_s), _WAYS[other.bound]]
        rows.append(row)
    words = [i for i, name in enumerate(heading) if name == "bound by"]
    return in_columns(rows, left=words)


def _best(made: RunPlan) -> Iterator[str]:
    best = made.best
    yield f"best possible: {_digits(best.tokens_per_s)} tok/s, bound by the {_WAYS[best.bound]}:"
    if best.bound == "disk":
        missing = made.token_experts - made.top_slots - made.host_slots
        yield (
            f"  {format_size(best.disk_nbytes)} of a token's experts find no slot whatever the "
            f"policy; {format_size(missing * made.slot_nbytes)} more of memory would hold them, "
            "a second drive would halve their time (`pack split`)"
        )
    elif best.bound == "link":
        streamed = made.token_bytes.streamed
        dense = (
            f", {format_size(streamed)} of it dense layers that found no room" if streamed else ""
        )
        yield (
            f"  {format_size(best.link_nbytes)} cross to the GPU for every token{dense}; a larger "
            "expert cache or a faster link helps"
        )
    else:
        yield (
            f"  every token reads {format_size(best.memory_nbytes)} of weights where it is "
            "computed; only faster memory or smaller types help"
        )
    yield "real runs stay below: a cache rarely reaches its ceiling, and ways overlap imperfectly"


def _digits(number: float) -> str:
    """Three digits, or all that are before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
