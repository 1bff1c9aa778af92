"""How the coverage table reads: on a terminal, and as docs/coverage.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..report import numbered
from ..report_text import shape
from .examine import Result
from .zoo import VIDEO

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "class",
    "mode",
    "grids",
    "replaced",
    "grid is known by",
    "noise",
    "conv.",
    "left as it is",
)
_INTRO = """# Coverage

Made by `python -m sta_compile coverage` with diffusers {version}; the test `tests/end_to_end/test_coverage.py` compares with
it. Each row is a class of `diffusers.models.transformers` with random weights and two layers, traced at two token grids with
a batch of 1 and of 2. Nothing is tuned for a class.

- **replaced**: self-attentions over the token grid that became Sliding Tile Attention, of those that have to.
- **grid is known by**: what tells frames, rows and columns.
- **noise**: what the first timestep says of the noise level's convention; unknown means that it has to be passed as option
  `noise`, or read from the scheduler by `sta_compile.compile`.
- **conv.**: changes between the model's order of tokens and tile order, in the whole graph.
- **left as it is**: why an attention over the grid was not replaced.

{totals}
"""


def totals(results: Sequence[Result]) -> str:
    """One sentence about the whole table."""
    complete = len({r.name for r in results}) - len({r.name for r in results if not r.complete})
    rows = len({result.name for result in results})
    classes = len({result.model for result in results})
    sites, replaced = sum(r.expected for r in results), sum(r.replaced for r in results)
    return (
        f"{complete} of {rows} rows ({classes} classes) are as they have to be; "
        f"{replaced} of {sites} attentions are replaced."
    )


def cells(results: Sequence[Result]) -> tuple[str, ...]:
    """The results of one row, in the order of COLUMNS."""
    first = results[0]
    return (
        first.model,
        first.mode,
        ", ".join(shape(r.grid) for r in results),
        _same(f"{r.replaced} of {r.expected}" if r.expected else "" for r in results),
        _same(", ".join(r.evidence) for r in results),
        _same(r.noise or ("unknown" if r.replaced else "") for r in results),
        _same(str(r.conversions) if r.replaced else "" for r in results),
        _same(_left(r) for r in results),
    )


def _same(texts: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(texts))


def _left(result: Result) -> str:
    """Short reasons, each with its sites unless it is that of the whole row."""
    if result.error:
        return result.error
    told: dict[str, list[str]] = {}
    for site, reason in result.missing:
        told.setdefault(reason, []).append(site)
    parts = [f"{_sites(sites)}: {reason}" for reason, sites in told.items()]
    parts += [f"{site}: another grid, {grid}" for site, grid in result.wrong_grid]
    parts += [f"{site}: should not be replaced" for site in result.surplus]
    return "; ".join(parts) or result.allowed


def _sites(names: list[str]) -> str:
    return ", ".join(name for name, _ in numbered(names))


def by_row(results: Sequence[Result]) -> list[list[Result]]:
    grouped: dict[str, list[Result]] = {}
    for result in results:
        grouped.setdefault(result.name, []).append(result)
    return list(grouped.values())


def as_table(results: Sequence[Result]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=totals(results))
    for column in COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column in ("grids", "replaced"))
    for row in by_row(results):
        style = "" if all(r.complete for r in row) else "red"
        table.add_row(*cells(row), style=style)
    return table


def as_markdown(results: Sequence[Result], version: str) -> str:
    video = {row.name for row in VIDEO}
    lines = [_INTRO.format(version=version, totals=totals(results))]
    for title, chosen in (("Video", True), ("Images", False)):
        part = [row for row in by_row(results) if (row[0].name in video) == chosen]
        if part:
            lines += [f"## {title}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
            lines += [_line(_escaped(cells(row))) for row in part]
            lines.append("")
    return "\n".join(lines)


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def _escaped(texts: Iterable[str]) -> list[str]:
    return [text.replace("|", "\\|").replace("_", "\\_") for text in texts]
