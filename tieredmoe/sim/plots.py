"""Figures of what a trace is like and what caches make of it: axes in, axes out.

Colours of text and of reference lines are the axes' own, so figures read in light and in dark
notebooks. Needs matplotlib only by being given its axes (``pip install 'tieredmoe[plots]'``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tieredmoe.sim.locality import (
    lag_overlap,
    reuse_in_slots,
    reuse_in_tokens,
    use_counts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from tieredmoe.sim.curves import Curves
    from tieredmoe.sim.routing_trace import RoutingTrace
    from tieredmoe.sim.simulation import CacheRun

COLOURS = ("#2a7fd4", "#e8743b", "#19a979", "#c2569c", "#b58900", "#6c8893", "#945ecf", "#d64550")
"""Of series, in order; each is legible on white and on near-black."""
_BINS_PER_DECADE = 12
_REUSE_LABELS = {"tokens": "tokens since the last use", "slots": "slots that LRU needs for a hit"}


def plot_curves(curves: Curves, axes: Axes) -> Axes:
    """Miss ratio over slots, per policy, with W, the ceiling and Belady; log scale of slots."""
    ink = _prepared(axes)
    slots = curves.n_slots
    # Straight in the number of slots, so curved on this axis.
    between = np.geomspace(slots[0], slots[-1], 300)
    floor = 100 * (1 - np.interp(between, slots, curves.ceiling))
    axes.fill_between(between, 0, floor, color=ink, alpha=0.08, linewidth=0)
    axes.plot(between, floor, color=ink, alpha=0.45, linewidth=1, label="ceiling (slots / W)")
    axes.plot(
        slots, 100 * (1 - curves.belady), color=ink, linestyle="--", linewidth=1.6, label="Belady"
    )
    for (policy, rates), colour in zip(curves.hit_rates.items(), COLOURS, strict=False):
        axes.plot(
            slots,
            100 * (1 - rates),
            color=colour,
            marker="o",
            markersize=3.5,
            linewidth=1.8,
            label=policy,
        )
    axes.set_xscale("log")
    axes.set_xlim(slots[0], slots[-1])
    axes.set_ylim(0, 101)
    _thousands(axes, slots)
    _mark(axes, curves.facts.cycle, f"W = {curves.facts.cycle:,}", ink)
    axes.set_xlabel("expert slots")
    axes.set_ylabel("misses, % of lookups")
    axes.set_title(f"{curves.facts.name}: misses over cache size", loc="left")
    axes.legend(frameon=False, fontsize="small", loc="lower left")
    return axes


def plot_reuse_in_tokens(trace: RoutingTrace, axes: Axes) -> Axes:
    """How many tokens pass between two uses of an expert: share of reuses, and their sum."""
    return _plot_reuse(reuse_in_tokens(trace), axes, trace, "tokens", None)


def plot_reuse_in_slots(trace: RoutingTrace, axes: Axes) -> Axes:
    """How many slots LRU needs to hit each reuse; what lies left of a size are its hits."""
    return _plot_reuse(reuse_in_slots(trace), axes, trace, "slots", trace.facts.cycle)


def plot_use(trace: RoutingTrace, axes: Axes) -> Axes:
    """Layer × expert heat map of use, each layer's experts from most to least used.

    The colour is how often an expert is used, in percent of tokens.
    """
    _prepared(axes, grid=False)
    counts = np.sort(use_counts(trace), axis=1)[:, ::-1]
    percent = 100 * counts / max(1, trace.n_decoded)
    image = axes.imshow(
        np.where(percent > 0, percent, np.nan),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        norm="log",
        extent=(0, counts.shape[1], len(counts) - 0.5, -0.5),
    )
    rows = np.unique(np.linspace(0, len(counts) - 1, min(len(counts), 8)).round().astype(int))
    axes.set_yticks(rows, [str(trace.facts.layers[row]) for row in rows])
    axes.set_xlabel("experts of the layer, most used first (blank: never used)")
    axes.set_ylabel("layer")
    axes.set_title(f"{trace.facts.name}: use of experts", loc="left")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, format="%g")
    bar.set_label("used by % of tokens")
    bar.outline.set_visible(False)
    return axes


def plot_hit_rate_by_layer(runs: Mapping[str, CacheRun], axes: Axes) -> Axes:
    """The hit rate of decoded tokens in each layer, a line per run, with each run's mean."""
    _prepared(axes)
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        by_layer = 100 * run.hit_rate_by_layer()
        mean = 100 * run.hit_rate()
        axes.plot(
            run.facts.layers,
            by_layer,
            color=colour,
            marker="o",
            markersize=3.5,
            linewidth=1.6,
            label=f"{name} (mean {mean:.1f} %)",
        )
        axes.axhline(mean, color=colour, linewidth=0.8, linestyle=":")
        axes.set_title(f"{run.facts.name}: hits by layer, {run.n_slots:,} slots", loc="left")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("layer")
    axes.set_ylabel("hits, % of lookups")
    axes.legend(frameon=False, fontsize="small", loc="lower right")
    return axes


def plot_lag_overlap(
    traces: Sequence[RoutingTrace], axes: Axes, *, lags: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
) -> Axes:
    """The share of a token's experts that an earlier token used too, over how much earlier.

    The dotted line is what independent, uniform routing would have.
    """
    _prepared(axes)
    for trace, colour in zip(traces, COLOURS, strict=False):
        overlap = 100 * lag_overlap(trace, lags)
        axes.plot(
            lags,
            overlap,
            color=colour,
            marker="o",
            markersize=4,
            linewidth=1.8,
            label=trace.facts.name,
        )
        chance = 100 * trace.facts.top_k / trace.facts.n_experts
        axes.axhline(chance, color=colour, linewidth=0.9, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lags, [str(lag) for lag in lags])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens earlier")
    axes.set_ylabel("experts in common, %")
    axes.set_title("Overlap of tokens (dotted: by chance)", loc="left")
    axes.legend(frameon=False, fontsize="small", loc="upper right")
    return axes


def _plot_reuse(
    distances: NDArray[np.int64],
    axes: Axes,
    trace: RoutingTrace,
    unit: str,
    cycle: int | None,
) -> Axes:
    ink = _prepared(axes)
    least = max(1, int(distances.min(initial=distances.max(initial=2))) // 2)
    largest = max(2, int(distances.max(initial=2)))
    n_bins = int(_BINS_PER_DECADE * np.log10(largest / least)) + 2
    edges = np.unique(np.geomspace(least, largest + 1, n_bins).astype(int))
    counts, _ = np.histogram(distances, bins=edges)
    n_reuses = max(1, len(distances))
    axes.stairs(100 * counts / n_reuses, edges, fill=True, color=COLOURS[0], alpha=0.75)
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1])
    _thousands(axes, (int(edges[0]), int(edges[-1])))
    axes.set_xlabel(_REUSE_LABELS[unit])
    axes.set_ylabel("reuses, %", color=COLOURS[0])
    summed = axes.twinx()
    _prepared(summed, grid=False)
    summed.plot(edges[1:], 100 * np.cumsum(counts) / n_reuses, color=COLOURS[1], linewidth=1.8)
    summed.set_ylim(0, 101)
    summed.set_ylabel("of all reuses up to here, %", color=COLOURS[1])
    if cycle is not None:
        _mark(axes, cycle, f"W = {cycle:,}", ink)
    axes.set_title(f"{trace.facts.name}: reuse of experts, in {unit}", loc="left")
    return axes


def _prepared(axes: Axes, *, grid: bool = True) -> Any:
    """Quiet frame and grid; the colour that text has here."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    ink = axes.xaxis.label.get_color()
    if grid:
        axes.grid(visible=True, color=ink, alpha=0.15, linewidth=0.6)
        axes.set_axisbelow(True)
    return ink


def _mark(axes: Axes, x: float, text: str, ink: Any) -> None:
    axes.axvline(x, color=ink, linewidth=1, linestyle=":")
    axes.annotate(
        text,
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        fontsize="small",
        color=ink,
    )


def _thousands(axes: Axes, span: Sequence[int]) -> None:
    """Ticks at 1, 2 and 5 of each decade, as whole numbers: log axes show powers only."""
    ticks = [
        digit * 10**power
        for power in range(len(str(span[-1])))
        for digit in (1, 2, 5)
        if span[0] <= digit * 10**power <= span[-1]
    ]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
