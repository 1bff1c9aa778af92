"""Every row of the coverage table: no row is worse than docs/coverage.json, and its graphs compute what they should.

A row runs at one of its two grids with all of its layers; rows take turns. At the other it runs with one layer. If this
fails since a row got better or changed on purpose, run
`python -m sta_compile coverage --json docs/coverage.json --markdown docs/coverage.md`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sta_compile import pipeline
from sta_compile.coverage.baseline import better, load, worse
from sta_compile.coverage.examine import Result, compare, examine
from sta_compile.coverage.row import Built, Row, Size
from sta_compile.coverage.run import CASES
from sta_compile.coverage.zoo import ROWS
from sta_compile.errors import StaError
from sta_compile.explanation import Explanation
from sta_compile.size_tables import call_of, small_constants
from tests.end_to_end.compiled import RewritingBackend, relative_error
from tests.end_to_end.masked import masked, tensors

STORED = load(Path(__file__).parents[2] / "docs" / "coverage.json")
WINDOW = {"tile": (1, 2, 2), "window": (3, 5, 5)}
TOLERANCE = 1e-5
# Attention in bf16 within an fp32 model: two kernels round differently.
HALF = {"SanaWMTransformer3DModel": 1e-2}
TURNS = [(row, CASES[number % 2]) for number, row in enumerate(ROWS)]
OTHERS = [(row, CASES[1 - number % 2]) for number, row in enumerate(ROWS)]
OPTIONS = {"sparse": WINDOW, "full": {"window": "full"}}


class Graphs:
    """A row through Dynamo and our stages under several options, graph by graph, without inductor.

    capture: whether sizes that depend on data are captured. variants: names of OPTIONS. `sparse` is the output of the
    first run.
    """

    def __init__(self, row: Row, built: Built, variants: Sequence[str], capture: bool) -> None:
        self.capture = capture
        function, self.args, self.inputs = call_of(built.model, built.inputs)
        self.backend = RewritingBackend({name: OPTIONS[name] for name in variants})
        torch._dynamo.reset()
        self.compiled = torch.compile(function, backend=self.backend, fullgraph=not row.breaks)
        self.sparse = self.run("sparse")

    def run(self, name: str) -> list[Tensor]:
        self.backend.chosen = name
        with capturing(self.capture):
            return tensors(self.compiled(*self.args, **self.inputs))


def through_stages(row: Row, built: Built, variants: Sequence[str]) -> Graphs:
    """Captures sizes that depend on data, unless that fails where the graph may break instead."""
    try:
        return Graphs(row, built, variants, capture=True)
    except Exception:
        if not row.breaks:
            raise
        return Graphs(row, built, variants, capture=False)


@contextmanager
def capturing(capture: bool) -> Iterator[None]:
    settings = {"capture_dynamic_output_shape_ops": capture, "capture_scalar_outputs": capture}
    with torch._dynamo.config.patch(settings), small_constants():
        yield


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    assert len(found) == len(expected)
    return max(map(relative_error, found, expected))


def build(row: Row, size: Size) -> Built:
    try:
        return row.at(size)
    except StaError as problem:
        pytest.skip(str(problem))  # an older diffusers has not every class


def checked(row: Row, size: Size, built: Built, graphs: Graphs) -> Result:
    """The output of the sparse run is that of the masked model; what the stages found."""
    found = Explanation(tuple(graphs.backend.reports["sparse"]))
    exact = tensors(built.model(**built.inputs))
    if "full" in graphs.backend.settings:
        assert error(graphs.run("full"), exact) < HALF.get(row.model, TOLERANCE)
    if not found.replaced:
        assert error(graphs.sparse, exact) < HALF.get(row.model, TOLERANCE)
    if found.replaced:
        expected = masked(built, size, found.replaced)
        assert error(graphs.sparse, expected) < HALF.get(row.model, TOLERANCE)
        assert error(expected, exact) > 10 * TOLERANCE
    return compare(row, size, built, found.merged(), len(found))


@pytest.mark.parametrize(("row", "case"), TURNS, ids=[row.name for row in ROWS])
@torch.no_grad()
def test_row(row: Row, case: tuple[int, int]) -> None:
    batch, which = case
    size = Size(batch, row.grids[which], row.layers)
    built = build(row, size)
    graphs = through_stages(row, built, ("sparse", "full"))
    result = checked(row, size, built, graphs)
    stored = STORED[row.name, batch]
    assert not worse(stored, result)
    if progress := better(stored, result):
        warnings.warn(f"docs/coverage.json is out of date for {row.name}: {progress}", stacklevel=1)


@pytest.mark.parametrize(("row", "case"), OTHERS, ids=[row.name for row in ROWS])
@torch.no_grad()
def test_other_grid_and_batch(row: Row, case: tuple[int, int]) -> None:
    """The case that is not the row's turn, with one layer where that has all kinds of sites."""
    batch, which = case
    shallow = row.layers == 2 and all("{}" in path or ".0." in path for path in row.sites)
    size = Size(batch, row.grids[which], layers=1 if shallow else row.layers)
    built = build(row, size)
    result = checked(row, size, built, through_stages(row, built, ("sparse",)))
    assert result.complete or not STORED[row.name, batch].complete


def test_a_row_that_gets_worse_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by an attention that is found no more."""
    row = next(row for row in ROWS if row.model == "CogVideoXTransformer3DModel")
    stored = STORED[row.name, 1]
    assert not worse(stored, stored)
    find = pipeline.find_attention
    monkeypatch.setattr(pipeline, "find_attention", lambda view: find(view)[1:])
    (text,) = worse(stored, examine(row))
    assert text.startswith("transformer_blocks.0.attn1 replaced no more")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"error": "raises"}, "it fails: raises"),
        ({"surplus": ("text.0",)}, "text.0 is replaced, and is no self-attention over the grid"),
        ({"wrong_grid": (("blocks.0", "1x2x3"),)}, "blocks.0 was given the grid 1x2x3"),
        (
            {"evidence": ("hinted by values of input ids",)},
            "its grid was proved, and now is hinted",
        ),
    ],
)
def test_what_is_worse(change: dict[str, Any], text: str) -> None:
    stored = STORED["CogVideoXTransformer3DModel (2b)", 1]
    (found,) = worse(stored, dataclasses.replace(stored, **change))
    assert found.startswith(text)
    assert not worse(dataclasses.replace(stored, **change), stored)


def test_the_table_holds_every_row() -> None:
    assert set(STORED) == {(row.name, batch) for row in ROWS for batch, _ in CASES}
