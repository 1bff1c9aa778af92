"""A compiled model called with another shape of as many tokens: rows and columns exchanged, other frames, a square.

Dynamo makes the numbers that changed symbols, and knows of them only what their product is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES, Triple, randomize
from tests.end_to_end.resolutions import Rewriting, expected
from tests.end_to_end.tiny import CHANNELS, TinyVideo

LANDSCAPE, PORTRAIT = (5, 9, 11), (5, 11, 9)
WIDTH = 16


def rotated(q: Tensor, angles: Tensor) -> Tensor:
    """q [..., tokens, channels] turned by angles [tokens, channels / 2]."""
    a, b = q.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Packed(nn.Module):
    """Tokens that were packed outside, and how many frames, rows and columns they are, as numbers.

    given: the positions are an input beside the numbers, by which the tokens are unpacked only.
    """

    def __init__(self, *, given: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.given = given
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, CHANNELS)
        self.attn = _Attend()
        randomize(self)
        self.eval()

    def forward(
        self, tokens: Tensor, frames: int, rows: int, cols: int, places: Tensor | None = None
    ) -> Tensor:
        if places is None or not self.given:
            axes = [torch.arange(n) for n in (frames, rows, cols)]
            places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 2)
        angles = F.pad(places.float(), (0, 1))
        x = self.embed(tokens)
        q, k, v = (
            part.unflatten(2, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        out = self.attn(rotated(q, angles), rotated(k, angles), v)
        x = self.out(x + out.transpose(1, 2).flatten(2))
        return x.unflatten(1, (frames, rows, cols)).movedim(-1, 1)


class _Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Controlled(TinyVideo):
    """Another latent, of its own axes as far as Dynamo knows, is added in each block."""

    def __init__(self) -> None:
        super().__init__(layers=2)

    def forward(self, latent: Tensor, control: Tensor) -> Tensor:  # type: ignore[override]
        x, shape = self.patchify(latent).flatten(2).mT, latent.shape[2:]
        for block in self.blocks:
            x = block(x) + self.patchify(control).flatten(2).mT
        return self.out(x).mT.unflatten(2, shape)


def packed(grid: Triple, batch: int = 1) -> dict[str, Any]:
    frames, rows, cols = grid
    places = torch.cartesian_prod(*(torch.arange(n) for n in grid))
    tokens = torch.randn(batch, frames * rows * cols, CHANNELS)
    return {"tokens": tokens, "frames": frames, "rows": rows, "cols": cols, "places": places}


def controlled(grid: Triple, batch: int = 1) -> dict[str, Any]:
    shape = (batch, CHANNELS, *grid)
    return {"latent": torch.randn(shape), "control": torch.randn(shape)}


KINDS = {
    "numbers": (Packed, packed, ["attn"]),
    "numbers beside ids": (lambda: Packed(given=True), packed, ["attn"]),
    "an added latent": (Controlled, controlled, ["blocks.0.attn", "blocks.1.attn"]),
}
SHAPES: dict[str, Sequence[tuple[Triple, int]]] = {
    "portrait": [(LANDSCAPE, 1), (PORTRAIT, 1), (LANDSCAPE, 1)],
    "square first": [((4, 6, 6), 1), ((4, 4, 9), 1), ((4, 9, 4), 1), ((4, 6, 6), 1)],
    "other frames": [(LANDSCAPE, 1), ((9, 5, 11), 1), (LANDSCAPE, 1)],
    "another batch too": [(LANDSCAPE, 1), (PORTRAIT, 2), (LANDSCAPE, 1)],
}


CASES = [
    *[("numbers", "portrait", dynamic) for dynamic in (None, True, False)],
    *[("an added latent", shapes, None) for shapes in ("portrait", "square first")],
    ("numbers", "other frames", None),
    ("numbers beside ids", "portrait", None),
    ("numbers beside ids", "another batch too", None),
]


@pytest.mark.parametrize(("kind", "shapes", "dynamic"), CASES)
@torch.no_grad()
def test_each_shape_is_sparse_over_its_own_grid(
    kind: str, shapes: str, dynamic: bool | None
) -> None:
    build, inputs_of, sites = KINDS[kind]
    backend, model = Rewriting(), build()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for grid, batch in SHAPES[shapes]:
        inputs = inputs_of(grid, batch)
        found = compiled(**inputs)
        assert relative_error(found, expected(model, sites, grid, **inputs)) < 1e-5
    assert all(len(report.replaced) == len(sites) for report in backend.reports)
    assert len(backend.reports) == len(set(SHAPES[shapes])), "a shape that was seen compiles again"


@pytest.mark.parametrize("name", ["ltx", "allegro"])
@torch.no_grad()
def test_models_that_are_told_their_grid_in_numbers(name: str) -> None:
    backend, model = Rewriting(), FAMILIES[name].case(1, LANDSCAPE, 1).model
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for grid in (LANDSCAPE, PORTRAIT, LANDSCAPE):
        case = FAMILIES[name].case(1, grid, 1)
        found = compiled(**case.inputs)[0]
        assert relative_error(found, expected(model, case.sites, grid, **case.inputs)) < 1e-5
    assert len(backend.reports) == 2


@torch.no_grad()
def test_numbers_stay_symbolic_where_no_compile_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, model = Rewriting(), Packed()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(**packed(LANDSCAPE))
    monkeypatch.setattr("sta_compile._torch.last_compile_of_frame", lambda: True)
    for grid in (PORTRAIT, (9, 5, 11), (9, 11, 5)):
        inputs = packed(grid)
        assert torch.equal(compiled(**inputs), model(**inputs))
    (refused,) = backend.reports[-1].refused
    assert "the last graph that the recompile limit allows" in refused.reason
    assert "recompile_limit" in refused.hint
    assert len(backend.reports) <= 3


@torch.no_grad()
def test_sizes_that_are_marked_dynamic_stay_so() -> None:
    backend, model = Rewriting(), Controlled()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for grid in (LANDSCAPE, PORTRAIT):
        inputs = controlled(grid)
        for value in inputs.values():
            torch._dynamo.mark_dynamic(value, (3, 4))
        found = compiled(**inputs)
        assert relative_error(found, expected(model, ["blocks.0.attn"], grid, **inputs)) < 1e-5
    (refused,) = backend.reports[-1].refused
    assert refused.name == "blocks.1.attn"
    assert "marked dynamic" in refused.reason
