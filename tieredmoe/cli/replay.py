"""``tieredmoe replay``: what a trace says of budgets, without the model and without a GPU."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003  # typer reads the annotation when it runs
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from tieredmoe.budget import format_size, parse_size
from tieredmoe.cli.columns import in_columns
from tieredmoe.errors import BudgetError, ConfigError
from tieredmoe.policies import choose_policy
from tieredmoe.sim.bounds import belady_with_bypass, ceiling, compulsory_misses
from tieredmoe.sim.curves import slots_between
from tieredmoe.sim.foreign_trace import load_trace
from tieredmoe.sim.laboratory import BELADY, REPLAYABLE
from tieredmoe.sim.machine import Machine, Rates, rates
from tieredmoe.sim.routing_trace import DECODE
from tieredmoe.sim.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tieredmoe.sim.routing_trace import RoutingTrace
    from tieredmoe.sim.simulation import CacheRun


@attrs.frozen
class _Budget:
    """One row: what ``n_slots`` bring with the policy, and what no policy can exceed there."""

    run: CacheRun
    belady: float
    ceiling: float
    rates: Rates


def replay(
    trace: Annotated[
        Path, typer.Argument(help="A trace: tieredmoe's own, JSON lines, CSV or npz.")
    ],
    *,
    vram: Annotated[str, typer.Option(help="Budget of the expert cache.")] = "21GiB",
    ram: Annotated[str | None, typer.Option(help="Budget of a RAM tier (default: none).")] = None,
    ssd_gbps: Annotated[float, typer.Option(help="GB/s of the drive (`bench io` tells).")] = 12.0,
    link_gbps: Annotated[float, typer.Option(help="GB/s from host to device.")] = 50.0,
    layer_ms: Annotated[
        float, typer.Option(help="Computation of a layer with everything resident, in ms.")
    ] = 0.0,
    policy: Annotated[str, typer.Option(help=f"auto, {', '.join(REPLAYABLE)}.")] = "auto",
    expert_mib: Annotated[
        float | None, typer.Option(help="MiB of an expert, where the trace does not say.")
    ] = None,
    n_experts: Annotated[
        int | None,
        typer.Option("--experts", min=1, help="Experts of a layer, where the trace does not say."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what hit rate and speed a trace's model would have with these budgets, and with others.

    The trace runs from a cold start through the very cache that serves models. Figures are of
    decoded tokens; prompts only warm the cache.
    """
    if expert_mib is not None and not 0 < expert_mib < 1 << 20:
        raise ConfigError(f"--expert-mib {expert_mib:g} is no size of an expert")
    loaded = load_trace(
        trace,
        n_experts=n_experts,
        expert_nbytes=None if expert_mib is None else round(expert_mib * (1 << 20)),
    )
    facts = loaded.facts
    if facts.expert_nbytes is None:
        raise ConfigError(f"{trace} does not say how large an expert is: give --expert-mib")
    if not loaded.n_decoded:
        raise ConfigError(f"{trace} has no decoded token, and the figures are of those")
    machine = Machine(
        expert_nbytes=facts.expert_nbytes,
        drive_gb_per_s=ssd_gbps,
        link_gb_per_s=link_gbps,
        layer_s=layer_ms / 1e3,
    )
    n_slots = min(facts.n_records, parse_size(vram) // facts.expert_nbytes)
    if n_slots < facts.top_k:
        raise BudgetError(
            f"--vram {vram} holds {n_slots} experts of {format_size(facts.expert_nbytes)}, and one "
            f"layer of one token needs {facts.top_k}: raise it to at least "
            f"{format_size(facts.top_k * facts.expert_nbytes)}"
        )
    n_ram_slots = 0 if ram is None else min(facts.n_records, parse_size(ram) // facts.expert_nbytes)
    sizes = sorted({*slots_between(facts, 7), n_slots})
    budgets = [_budget(loaded, n, n_ram_slots, policy, machine) for n in sizes]
    chosen = budgets[sizes.index(n_slots)]
    if as_json:
        typer.echo(json.dumps(_plain(loaded, chosen, budgets), indent=2))
        return
    for line in _told(loaded, chosen, machine):
        typer.echo(line)
    typer.echo()
    for line in in_columns(_rows(budgets, chosen), left=(0,)):
        typer.echo(line)


def _budget(
    trace: RoutingTrace, n_slots: int, n_ram_slots: int, policy: str, machine: Machine
) -> _Budget:
    facts = trace.facts
    name = policy
    if policy not in REPLAYABLE:
        name = choose_policy(
            policy,
            n_slots=n_slots,
            layers=facts.layers,
            top_k=facts.top_k,
            n_experts=facts.n_experts,
        ).name
    run = simulate(trace, n_slots=n_slots, policy=name, n_ram_slots=n_ram_slots)
    bound = run if name == BELADY else simulate(trace, n_slots=n_slots, policy=BELADY)
    return _Budget(run, bound.hit_rate(), ceiling(trace, n_slots), rates(run, machine))


def _told(trace: RoutingTrace, chosen: _Budget, machine: Machine) -> Iterator[str]:
    """What there is to say of the budget that was asked for, a line at a time."""
    facts, run, speed = trace.facts, chosen.run, chosen.rates
    yield (
        f"{facts.name}: {trace.n_decoded} decoded tokens of {trace.n_tokens}, {len(facts.layers)} "
        f"layers × top-{facts.top_k} of {facts.n_experts}, an expert is "
        f"{format_size(machine.expert_nbytes)}"
    )
    first_uses = compulsory_misses(trace) / max(1, int(run.lookups.sum()))
    yield (
        f"W = {facts.cycle} lookups a token, {format_size(facts.cycle * machine.expert_nbytes)}; "
        f"{first_uses:.1%} of all lookups are first uses, which miss in any cache"
    )
    ram = f" and {run.n_ram_slots} in RAM" if run.n_ram_slots else ""
    yield (
        f"{run.n_slots} slots{ram}: {run.n_slots / facts.cycle:.2f} × W, "
        f"{run.n_slots / facts.n_records:.0%} of the model's experts; policy {run.policy}"
    )
    yield ""
    bypass = _bypass_rate(trace, run.n_slots)
    yield (
        f"hits         {run.hit_rate():.1%} of lookups; Belady {chosen.belady:.1%}, with bypass "
        f"{bypass:.1%}, the ceiling slots / W {chosen.ceiling:.1%}"
    )
    if run.n_ram_slots:
        yield f"from RAM     {run.kept_rate() - run.hit_rate():.1%}"
    yield _lane("drive", speed.drive_s, machine.drive_gb_per_s)
    yield _lane("link", speed.link_s, machine.link_gb_per_s)
    yield f"device       {speed.device_s * 1e3:.1f} ms a token"
    yield (
        f"ceiling      {_tok_s(speed.floor_s)} tok/s, bound by the {speed.bound_by}, if everything "
        f"overlapped; {_tok_s(speed.token_s)} layer by layer, without prefetch"
    )


def _rows(budgets: Sequence[_Budget], chosen: _Budget) -> list[list[str]]:
    """The curve over budgets, a row for each, that which was asked for marked."""
    rows = [["VRAM", "slots", "× W", "hits", "Belady", "ceiling", "read a token", "tok/s", "", ""]]
    for budget in budgets:
        run, speed = budget.run, budget.rates
        nbytes = run.facts.expert_nbytes
        assert nbytes is not None, "a trace without it was refused"
        read = int(run.reads[run.phase == DECODE].sum()) * nbytes
        n_tokens = int((run.phase == DECODE).sum())
        rows.append(
            [
                format_size(run.n_slots * nbytes),
                str(run.n_slots),
                f"{run.n_slots / run.facts.cycle:.2f}",
                f"{run.hit_rate():.1%}",
                f"{budget.belady:.1%}",
                f"{budget.ceiling:.1%}",
                _gb(read / n_tokens / 1e9),
                _tok_s(speed.floor_s),
                speed.bound_by if speed.floor_s else "",
                "◀" if budget is chosen else "",
            ]
        )
    return rows


def _plain(trace: RoutingTrace, chosen: _Budget, budgets: Sequence[_Budget]) -> dict[str, object]:
    facts = trace.facts
    return {
        "model": attrs.asdict(facts),
        "tokens": trace.n_tokens,
        "decoded_tokens": trace.n_decoded,
        "token_cycle": facts.cycle,
        "compulsory_misses": compulsory_misses(trace),
        "asked": _plain_budget(chosen)
        | {"belady_with_bypass_hit_rate": _bypass_rate(trace, chosen.run.n_slots)},
        "curve": [_plain_budget(budget) for budget in budgets],
    }


def _plain_budget(budget: _Budget) -> dict[str, object]:
    run, speed = budget.run, budget.rates
    return {
        "slots": run.n_slots,
        "ram_slots": run.n_ram_slots,
        "policy": run.policy,
        "hit_rate": run.hit_rate(),
        "hit_rate_with_ram": run.kept_rate(),
        "belady_hit_rate": budget.belady,
        "ceiling_hit_rate": budget.ceiling,
        "drive_s_per_token": speed.drive_s,
        "link_s_per_token": speed.link_s,
        "device_s_per_token": speed.device_s,
        "serial_s_per_token": speed.token_s,
        "floor_s_per_token": speed.floor_s,
        "bound_by": speed.bound_by,
    }


def _bypass_rate(trace: RoutingTrace, n_slots: int) -> float:
    """The hit rate of decoded tokens with foresight and bypassing."""
    steps = list(trace.steps())
    misses = belady_with_bypass(steps, n_slots)
    decoded = [
        trace.phase[start] == DECODE for start, _ in trace.spans() for _ in trace.facts.layers
    ]
    n_missed = sum(n for n, of_decode in zip(misses, decoded, strict=True) if of_decode)
    n_all = sum(len(step.experts) for step, d in zip(steps, decoded, strict=True) if d)
    return (n_all - n_missed) / n_all


def _lane(name: str, seconds: float, gb_per_s: float) -> str:
    moved = _gb(seconds * gb_per_s)
    return f"{name:<13}{seconds * 1e3:.1f} ms a token: {moved} at {gb_per_s:g} GB/s"


def _tok_s(seconds: float) -> str:
    return "unlimited" if seconds == 0 else f"{1 / seconds:.2f}"


def _gb(gb: float) -> str:
    return f"{gb:.2f} GB" if gb >= 0.1 else f"{gb * 1e3:.1f} MB"
