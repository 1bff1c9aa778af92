"""How a row of a benchmark reads on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .measure import Row

if TYPE_CHECKING:
    from rich.console import RenderableType


def as_table(row: Row) -> RenderableType:
    """The fastest contestant first, and what was not measured. Columns are those of which something is known."""
    from rich import box
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    facts = ", ".join(filter(None, (row.kernel, f"{row.kept:.1%} of pairs")))
    if row.failed:
        return escape(f"{row.workload}: {facts}\n  failed: {row.failed}\n")
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=f"{row.workload}: {facts}", title_justify="left"
    )
    columns = _columns(row)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name in sorted(row.ms, key=lambda name: row.ms[name]):
        table.add_row(name, *(cells.get(name, "-") for cells in columns.values()))
    left = (escape(f"  {name} is not measured: {reason}") for name, reason in row.missing.items())
    kernels = sorted(row.kernels.items(), key=lambda item: item[1])
    return Group(table, *left, *(f"  {ms:8.3f} ms of few heads: {name}" for name, ms in kernels))


def _columns(row: Row) -> dict[str, dict[str, str]]:
    """title -> contestant -> cell"""
    unit, factor = unit_of_rates(row.tflops.values())
    columns = {
        "ms": {name: f"{ms:.2f}" for name, ms in row.ms.items()},
        unit: {name: _rate(factor * rate) for name, rate in row.tflops.items()},
        "of matrix": {
            name: f"{share:.0%}" if share >= 0.01 else f"{share:.2%}"
            for name, share in row.share.items()
        },
        "speedup": {name: f"{speedup:.2f}x" for name, speedup in row.speedup.items()},
        "MHz": {name: f"{megahertz:.0f}" for name, megahertz in row.megahertz.items()},
        "Mcycles": {name: f"{mcycles:.1f}" for name, mcycles in row.mcycles.items()},
        "error": {name: f"{error:.1e}" for name, error in row.errors.items()},
    }
    return {title: cells for title, cells in columns.items() if cells}


def unit_of_rates(tflops: Iterable[float]) -> tuple[str, float]:
    """The unit in which the largest is at least one, and how many of it are a TFLOP/s: a GPU's TFLOP/s, a CPU's GFLOP/s."""
    largest = max(tflops, default=1.0)
    if largest >= 1:
        return "TFLOP/s", 1.0
    return ("GFLOP/s", 1e3) if largest >= 1e-3 else ("MFLOP/s", 1e6)


def _rate(rate: float) -> str:
    return format(rate, ".3g" if rate < 10 else ".0f")
