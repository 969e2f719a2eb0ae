"""Will a model run on this machine, how fast at best, and what would change that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.adapters.registry import adapter_for
from tieredmoe.adapters.tokenizer import Tokenizer
from tieredmoe.budget import available_host_nbytes, format_size
from tieredmoe.cli.findings import Finding, note, ok, problem
from tieredmoe.errors import TieredMoEError
from tieredmoe.tier_plan import plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tieredmoe.cli.read_rate import ReadRate
    from tieredmoe.config import HierarchyConfig
    from tieredmoe.pack import Checkpoint
    from tieredmoe.spec import MoESpec

_HIT_RATES = (0.0, 0.25, 0.5, 0.75, 0.9)


def model_findings(
    model: Checkpoint, config: HierarchyConfig, rate: ReadRate | None
) -> Iterator[Finding]:
    """Everything about ``model`` here; ``rate`` is what its files were read at, if measured."""
    spec = model.spec
    yield ok(
        "model",
        f"{spec.architecture}: {len(spec.layers)} routed layers of {spec.n_experts} experts, "
        f"top-{spec.top_k}; {format_size(_payload_nbytes(spec))} of experts",
    )
    yield _supported(model)
    yield _tokenizer(model)
    yield _dense(model)
    yield from _cache(model, config, rate)


def _supported(model: Checkpoint) -> Finding:
    try:
        adapter_for(model.metadata).check(model)
    except TieredMoEError as error:
        return problem("support", str(error))
    return ok("support", "architecture, metadata and every tensor are as its adapter needs them")


def _tokenizer(model: Checkpoint) -> Finding:
    try:
        tokenizer = Tokenizer.from_metadata(model.metadata)
    except TieredMoEError as error:
        return problem("tokenizer", str(error))
    if tokenizer is None:
        return note("tokenizer", "the file has none: prompts are token ids")
    return ok("tokenizer", "found")


def _dense(model: Checkpoint) -> Finding:
    dense_nbytes = sum(info.nbytes for info in model.tensors.values()) - _payload_nbytes(model.spec)
    free_nbytes = available_host_nbytes()
    fact = f"{format_size(dense_nbytes)} stay in memory, {format_size(free_nbytes)} can be taken"
    if dense_nbytes > free_nbytes:
        return problem("dense weights", fact, f"free {format_size(dense_nbytes - free_nbytes)}")
    return ok("dense weights", fact)


def _cache(model: Checkpoint, config: HierarchyConfig, rate: ReadRate | None) -> Iterator[Finding]:
    spec = model.spec
    try:
        planned = plan(spec, config, read_nbytes=model.slot_nbytes)
    except TieredMoEError as error:
        yield problem("expert cache", str(error))
        return
    cycle = len(spec.layers) * spec.top_k
    share = planned.n_slots / spec.n_records
    fact = (
        f"{planned.n_slots} slots of {format_size(planned.slot_nbytes)} hold {share:.1%} of the "
        f"experts; a token uses {cycle}"
    )
    if planned.n_slots >= spec.n_records:
        yield ok("expert cache", f"{fact}; after the first use nothing is read again")
    elif planned.n_slots < cycle:
        missing_nbytes = (cycle - planned.n_slots) * planned.slot_nbytes
        yield note(
            "expert cache",
            f"{fact}, so no more than {planned.n_slots / cycle:.0%} of them can be hits",
            f"another {format_size(missing_nbytes)} would hold one token's experts (--vram)",
        )
    else:
        yield ok("expert cache", fact)
    if rate is not None:
        yield _best_speed(spec, planned.n_slots, cycle, rate)


def _best_speed(spec: MoESpec, n_slots: int, cycle: int, rate: ReadRate) -> Finding:
    """What the disk alone allows; compute comes on top, or hides behind it."""
    token_nbytes = spec.top_k * sum(layout.payload_nbytes for layout in spec.layouts.values())
    highest = min(1.0, n_slots / cycle)
    shown = [hit for hit in _HIT_RATES if hit < highest] + ([highest] if highest < 1 else [])
    speeds = ", ".join(
        f"{_digits(rate.gb_per_s * 1e9 / (token_nbytes * (1 - hit)))} tok/s at {hit:.0%} hits"
        for hit in shown
    )
    return ok(
        "best speed",
        f"the files were read at {rate.gb_per_s:.2f} GB/s and a token needs "
        f"{format_size(token_nbytes)}: at most {speeds}",
    )


def _digits(number: float) -> str:
    """Three digits, or all that are before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _payload_nbytes(spec: MoESpec) -> int:
    return spec.n_experts * sum(layout.payload_nbytes for layout in spec.layouts.values())
