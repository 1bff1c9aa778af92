"""A picture of a benchmark: the rate of each contestant on the pairs that it keeps, and its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import StaError, needs
from .measure import Row
from .table import unit_of_rates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, PEER, LIMIT = "#d1495b", "#7fb3d5", "#555555"


def draw(rows: Sequence[Row], device: str) -> Figure:
    """A panel for each workload that has times; bars are rates, labels milliseconds. StaError without matplotlib."""
    needs("matplotlib")
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.ms]
    if not shown:
        raise StaError("nothing was measured, so there is nothing to draw")
    unit, factor = unit_of_rates(rate for row in shown for rate in row.tflops.values())
    heights = [len(row.ms) + 1.2 for row in shown]
    figure = Figure(figsize=(8, 0.3 * sum(heights) + 0.8), layout="constrained")
    panels = figure.subplots(
        len(shown), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )
    for axis, row in zip(panels[:, 0], shown, strict=True):
        names = sorted(row.ms, key=lambda name: -row.ms[name])
        rates = [factor * row.tflops[name] for name in names]
        colours = [OURS if name == "sta" else PEER for name in names]
        bars = axis.barh(names, rates, color=colours)
        axis.bar_label(bars, [f"{row.ms[name]:.4g} ms" for name in names], padding=3, fontsize=7)
        axis.axvline(factor * row.matrix_tflops, color=LIMIT, linestyle="--", linewidth=0.8)
        axis.set_title(f"{row.workload}, {row.kept:.0%} of pairs kept", fontsize=8, loc="left")
        axis.tick_params(labelsize=7)
        axis.margins(x=0.18)
    panels[-1, 0].set_xlabel(f"{unit} on kept pairs; dashed: a large matrix product", fontsize=8)
    figure.suptitle(device, fontsize=9)
    return figure
