"""How a row of a benchmark reads on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .measure import Row

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("", "ms", "TFLOP/s", "of matrix", "speedup", "MHz", "Mcycles", "error")


def as_table(row: Row) -> RenderableType:
    """The fastest contestant first, and what was not measured."""
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
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left")
    for name in sorted(row.ms, key=lambda name: row.ms[name]):
        table.add_row(name, *_cells(row, name))
    left = (escape(f"  {name} is not measured: {reason}") for name, reason in row.missing.items())
    kernels = sorted(row.kernels.items(), key=lambda item: item[1])
    return Group(table, *left, *(f"  {ms:8.3f} ms of few heads: {name}" for name, ms in kernels))


def _cells(row: Row, name: str) -> list[str]:
    def cell(values: dict[str, float], form: str, unit: str = "") -> str:
        return format(values[name], form) + unit if name in values else "-"

    return [
        cell(row.ms, ".2f"),
        cell(row.tflops, ".3g" if row.tflops[name] < 10 else ".0f"),
        cell(row.share, ".0%"),
        cell(row.speedup, ".2f", "x"),
        cell(row.megahertz, ".0f"),
        cell(row.mcycles, ".1f"),
        cell(row.errors, ".1e"),
    ]
