"""Grids that only values show, in calls of as many tokens: each gets a graph of its own, if reading the values pays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sta_compile
from sta_compile import read_positions
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import Triple
from tests.end_to_end.resolutions import OPTIONS, expected
from tests.end_to_end.tiny import CHANNELS, Block, TinyVideo

LANDSCAPE, PORTRAIT = (5, 9, 11), (5, 11, 9)


class Placed(TinyVideo):
    """Tokens that were packed outside, and the places of each."""

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
        x = F.linear(tokens, self.patchify.weight.flatten(1)) + F.pad(places, (0, 13)).sin()
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class At(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + table)


class InParts(TinyVideo):
    """The same, each of its blocks in a graph of its own, which is given tables that are made in each call."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        for block in self.blocks:
            block.__class__ = At

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
        x = F.linear(tokens, self.patchify.weight.flatten(1))
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x, F.pad(places, (0, 13)).sin())
        return self.out(x)


def places(grid: Triple) -> Tensor:
    return torch.cartesian_prod(*(torch.arange(n) for n in grid)).float()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Compiled by the backend, but for inductor, and eager."""
    monkeypatch.setattr(
        "sta_compile._torch.compile_with_inductor", lambda gm, *args, **more: gm.forward
    )
    torch._dynamo.reset()
    sta_compile.reset_reports()
    kind = getattr(request, "param", Placed)
    compiled = kind()
    compiled.compile(backend="sta", fullgraph=kind is Placed, options=dict(OPTIONS))
    return compiled, kind()


def check(model: Any, where: Tensor, grid: Triple | None) -> None:
    compiled, eager = model
    inputs = {"tokens": torch.randn(1, len(where), CHANNELS), "places": where}
    found = compiled(**inputs)
    wanted = eager(**inputs) if grid is None else expected(eager, eager.sites, grid, **inputs)
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("model", [Placed, InParts], indirect=True)
@torch.no_grad()
def test_a_first_call_without_a_grid(model: Any) -> None:
    """As one that warms up has: it is exact, and a later one with a grid has a graph of its own."""
    where = places(LANDSCAPE)
    nowhere = torch.zeros_like(where)
    check(model, nowhere, None)
    check(model, where, LANDSCAPE)
    with torch._dynamo.config.patch(error_on_recompile=True):
        check(model, where, LANDSCAPE)
        check(model, nowhere, None)
        for _ in range(5):  # reading ids that are new in each call does not pay
            check(model, torch.zeros_like(where), None)


@torch.no_grad()
def test_a_graph_for_each_grid(model: Any) -> None:
    """Pipelines make positions once for a video, and pass the same tensor in each step."""
    for grid in (LANDSCAPE, PORTRAIT, LANDSCAPE):
        where = places(grid)
        for _ in range(3):
            check(model, where, grid)
    assert len(sta_compile.reports()) == 2


@torch.no_grad()
def test_positions_written_to_are_read_again(model: Any) -> None:
    where = places(LANDSCAPE)
    check(model, where, LANDSCAPE)
    where.copy_(places(PORTRAIT))
    check(model, where, PORTRAIT)


@torch.no_grad()
def test_places_in_no_order_leave_the_graph_of_a_grid_to_it(model: Any) -> None:
    check(model, places(LANDSCAPE), LANDSCAPE)
    check(model, places(LANDSCAPE)[torch.randperm(495)], None)
    check(model, places(LANDSCAPE), LANDSCAPE)
    assert len(sta_compile.reports()) == 2


@torch.no_grad()
def test_new_tensors_in_each_step_are_read_a_few_times(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading waits for the device. The check there stays, and makes another grid dense."""
    reads: list[Tensor] = []
    matches = read_positions.matches_grid

    def counted(values: Tensor, positions: Any) -> Any:
        reads.append(values)
        return matches(values, positions)

    monkeypatch.setattr(read_positions, "matches_grid", counted)
    for _ in range(8):
        check(model, places(LANDSCAPE), LANDSCAPE)
    check(model, places(PORTRAIT), None)
    assert 0 < len(reads) < 6
    assert len(sta_compile.reports()) == 1
