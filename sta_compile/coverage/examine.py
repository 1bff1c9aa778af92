"""What the compiler makes of a row of the coverage table, and how that compares with what has to happen.

result = examine(row)
result.missing       sites that should have been replaced, each with the reason
result.surplus       replaced, although nothing in the model's source makes it self-attention over the grid
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..explanation import Explanation, explain
from ..ir.attention_spec import Triple
from ..report import Report
from ..report_text import shape
from ..size_tables import call_of, small_constants
from .row import Built, Row, Size, name_of

OPTIONS: Mapping[str, Any] = {"min_tokens": 0}
NOT_FOUND = "no attention was found in its module"


@dataclass(frozen=True)
class Result:
    """One row at one grid. Names are those of modules."""

    model: str
    mode: str
    grid: Triple
    batch: int
    expected: int  # sites that have to be replaced
    replaced: int  # of these
    missing: tuple[tuple[str, str], ...]  # (site, reason)
    surplus: tuple[str, ...]
    wrong_grid: tuple[tuple[str, str], ...]  # (site, grid that was taken)
    refused: tuple[tuple[str, str], ...]  # (site, reason), which nothing expects to be replaced
    evidence: tuple[str, ...]
    noise: str
    conversions: int
    graphs: int
    allowed: str = ""  # why attention over the grid may stay as it is
    error: str = ""

    @property
    def name(self) -> str:
        return name_of(self.model, self.mode)

    @property
    def complete(self) -> bool:
        return not (self.error or self.missing or self.surplus or self.wrong_grid)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Result:
        """The inverse, for values that came from JSON."""
        return cls(**{key: _tuples(value) for key, value in values.items()})


def examine(row: Row, batch: int = 1, which: int = 0) -> Result:
    """Traces the row at one of its two grids in a fresh Dynamo state; nothing is compiled."""
    size = Size(batch, row.grids[which], row.layers)
    built = row.at(size)
    try:
        found, error = explained(row, built, options=OPTIONS), ""
    except Exception as problem:
        found, error = Explanation(()), f"{type(problem).__name__}: {_first_line(problem)}"
    return compare(row, size, built, found.merged(), len(found), error)


def explained(row: Row, built: Built, **asked: Any) -> Explanation:
    """What `explain` finds, asked with `options`, `timesteps` and `device`.

    Sizes that depend on data are captured, unless that fails where the graph may break instead.
    """
    try:
        return _traced(built, fullgraph=not row.breaks, capture=True, **asked)
    except Exception:
        if not row.breaks:
            raise
        return _traced(built, fullgraph=False, capture=False, **asked)


def _traced(built: Built, *, fullgraph: bool, capture: bool, **asked: Any) -> Explanation:
    """What the stages make of Dynamo's graphs, in a Dynamo that knows nothing yet."""
    function, args, inputs = call_of(built.model, built.inputs)
    traced: Any = explain(function, fullgraph=fullgraph, **asked)
    settings = {"capture_dynamic_output_shape_ops": capture, "capture_scalar_outputs": capture}
    torch._dynamo.reset()
    try:
        with torch.no_grad(), torch._dynamo.config.patch(settings), small_constants():
            found: Explanation = traced(*args, **inputs)
    finally:
        torch._dynamo.reset()
    return found


def compare(
    row: Row, size: Size, built: Built, report: Report, graphs: int, error: str = ""
) -> Result:
    """The report of a row's graphs beside what has to happen; graphs: how many they were."""
    taken = {site.name: _sites_of(site.name, built.sites) for site in report.replaced}
    named = {site for sites in taken.values() for site in sites}
    reasons = {
        site: refused.reason
        for refused in report.refused
        for site in _sites_of(refused.name, built.sites) or [refused.name]
    }
    default = report.reason or NOT_FOUND
    missing = tuple((s, reasons.get(s, default)) for s in built.sites if s not in named)
    return Result(
        model=row.model,
        mode=row.mode,
        grid=size.grid,
        batch=size.batch,
        expected=len(built.sites),
        replaced=len(built.sites) - len(missing),
        missing=missing,
        surplus=tuple(sorted(name for name, sites in taken.items() if not sites)),
        wrong_grid=tuple(
            (name, shape(site.grid))
            for site in report.replaced
            for name in taken[site.name]
            if site.grid != built.grid_of(name, size)
        ),
        refused=tuple(
            (name, reason) for name, reason in reasons.items() if name not in built.sites
        ),
        evidence=tuple(dict.fromkeys(site.evidence for site in report.replaced)),
        noise=report.noise.convention or "",
        conversions=report.conversions,
        graphs=graphs,
        allowed=row.refused,
        error=error,
    )


def _sites_of(name: str, sites: Sequence[str]) -> list[str]:
    """The sites that a name means: a graph of its own, of a block, names its parts from there, and serves every layer."""
    return [site for site in sites if site == name or site.endswith(f".{name}")]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
