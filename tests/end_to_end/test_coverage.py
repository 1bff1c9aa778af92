"""Every row of the coverage table: no row is worse than docs/coverage.json, and its graphs compute what they should.

A row runs at one of its two grids; rows take turns. If this fails since a row got better or changed on purpose, run
`python -m sta_compile coverage --json docs/coverage.json --markdown docs/coverage.md`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sta_compile.coverage.baseline import better, load, worse
from sta_compile.coverage.examine import compare
from sta_compile.coverage.row import Built, Row, Size
from sta_compile.coverage.run import CASES
from sta_compile.coverage.zoo import ROWS
from sta_compile.errors import StaError
from sta_compile.explanation import Explanation
from tests.end_to_end.compiled import RewritingBackend, relative_error
from tests.end_to_end.masked import masked, tensors

STORED = load(Path(__file__).parents[2] / "docs" / "coverage.json")
WINDOW = {"tile": (1, 2, 2), "window": (3, 5, 5)}
TOLERANCE = 1e-4
# Attention in bf16 within an fp32 model: two kernels round differently.
HALF = {"SanaWMTransformer3DModel": 1e-2}
TURNS = [(row, CASES[number % 2]) for number, row in enumerate(ROWS)]


class Graphs:
    """A row through Dynamo and our stages under several options, graph by graph, without inductor.

    capture: whether sizes that depend on data are captured. `sparse` is the output of the first run.
    """

    def __init__(self, row: Row, built: Built, capture: bool) -> None:
        self.inputs, self.capture = built.inputs, capture
        self.backend = RewritingBackend({"sparse": WINDOW, "full": {"window": "full"}})
        torch._dynamo.reset()
        self.compiled = torch.compile(built.model, backend=self.backend, fullgraph=not row.breaks)
        self.sparse = self.run("sparse")

    def run(self, name: str) -> list[Tensor]:
        self.backend.chosen = name
        with capturing(self.capture):
            return tensors(self.compiled(**self.inputs))


def through_stages(row: Row, built: Built) -> Graphs:
    """Captures sizes that depend on data, unless that fails where the graph may break instead."""
    try:
        return Graphs(row, built, capture=True)
    except Exception:
        if not row.breaks:
            raise
        return Graphs(row, built, capture=False)


@contextmanager
def capturing(capture: bool) -> Iterator[None]:
    settings = {"capture_dynamic_output_shape_ops": capture, "capture_scalar_outputs": capture}
    with torch._dynamo.config.patch(settings):
        yield


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    assert len(found) == len(expected)
    return max(map(relative_error, found, expected))


@pytest.mark.parametrize(("row", "case"), TURNS, ids=[row.name for row in ROWS])
def test_row(row: Row, case: tuple[int, int]) -> None:
    batch, which = case
    size = Size(batch, row.grids[which], row.layers)
    try:
        built = row.at(size)
    except StaError as problem:
        pytest.skip(str(problem))  # an older diffusers has not every class
    with torch.no_grad():
        graphs = through_stages(row, built)
        found = Explanation(tuple(graphs.backend.reports["sparse"]))
        result = compare(row, size, built, found.merged(), len(found))
        exact = tensors(built.model(**built.inputs))
        assert error(graphs.run("full"), exact) < HALF.get(row.model, TOLERANCE)
        if found.replaced:
            expected = masked(built, size, found.replaced)
            assert error(graphs.sparse, expected) < HALF.get(row.model, TOLERANCE)
            assert error(expected, exact) > 10 * TOLERANCE
    torch._dynamo.reset()
    stored = STORED[row.name, batch]
    assert not worse(stored, result)
    if progress := better(stored, result):
        warnings.warn(f"docs/coverage.json is out of date for {row.name}: {progress}", stacklevel=1)


def test_the_table_holds_every_row() -> None:
    assert set(STORED) == {(row.name, batch) for row in ROWS for batch, _ in CASES}
