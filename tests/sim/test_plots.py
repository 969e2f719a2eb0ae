"""Figures are drawn on the axes given, readable in light and dark, and with what they are of."""

from pathlib import Path

import pytest

from tieredmoe.sim.curves import hit_rate_curves
from tieredmoe.sim.foreign_trace import load_trace
from tieredmoe.sim.plots import (
    plot_curves,
    plot_hit_rate_by_layer,
    plot_lag_overlap,
    plot_reuse_in_slots,
    plot_reuse_in_tokens,
    plot_use,
)
from tieredmoe.sim.simulation import simulate

pytest.importorskip("matplotlib")

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

TRACES = Path(__file__).parent.parent / "data" / "traces"
OLMOE = load_trace(TRACES / "olmoe-1b-7b_80_tokens.npz").tokens(slice(0, 30))

FIGURES = {
    "curves": lambda axes: plot_curves(hit_rate_curves(OLMOE, ["lru"], (40, 128, 500)), axes),
    "layers": lambda axes: plot_hit_rate_by_layer({"a": simulate(OLMOE, n_slots=200)}, axes),
    "overlap": lambda axes: plot_lag_overlap([OLMOE], axes, lags=(1, 2, 4)),
    "slots": lambda axes: plot_reuse_in_slots(OLMOE, axes),
    "tokens": lambda axes: plot_reuse_in_tokens(OLMOE, axes),
    "use": lambda axes: plot_use(OLMOE, axes),
}


@pytest.mark.parametrize("look", ["default", "dark_background"])
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_says_what_it_shows(name, look):
    with style.context(look):
        figure = Figure()
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots()
        assert FIGURES[name](axes) is axes
        canvas.draw()
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    assert axes.get_title(loc="left")
    assert axes.has_data()


def test_curves_show_the_cycle_belady_and_the_ceiling():
    axes = FIGURES["curves"](Figure().subplots())
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["W = 128"]
    assert axes.get_legend_handles_labels()[1] == ["ceiling (slots / W)", "Belady", "lru"]
