from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sta_compile.ops  # noqa: F401  registers the operators
from sta_compile.errors import StaError
from sta_compile.ir.attention_spec import AttentionSpec
from tests import oracle


def spec_of(tiles):
    return AttentionSpec(("video",), tiles=tiles, window=(1, 1, 1)).text()


@st.composite
def cases(draw):
    grid = tuple(draw(st.integers(1, 7)) for _ in range(3))
    tiles = tuple(draw(st.integers(1, length)) for length in grid)
    return grid, tiles, draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.integers(-3, 2))


@settings(max_examples=100, deadline=None)
@given(cases(), st.booleans())
def test_order_of_the_definition_and_inverse(case, transposed):
    grid, tiles, before, after, dim = case
    video = grid[0] * grid[1] * grid[2]
    tokens = before + video + after
    shape = [2, 3, 4]
    shape[dim] = tokens
    x = torch.randn(shape)
    if transposed:
        x = x.transpose(0, 2).contiguous().transpose(0, 2)
    arguments = dim, before, list(grid), spec_of(tiles)
    order = torch.arange(tokens)
    order[before : before + video] = before + torch.tensor(oracle.tile_order(grid, tiles))
    tiled = torch.ops.sta.tile(x, *arguments)
    assert torch.equal(tiled, x.index_select(dim, order))
    assert torch.equal(torch.ops.sta.untile(tiled, *arguments), x)
    assert tiled.stride() == x.stride()


def test_views_and_broadcasts():
    wide = torch.randn(2, 30, 12)
    for x in (wide[..., 3:9], wide[:1].expand(4, 30, 12), wide.flip(1)[:, :, ::2]):
        arguments = 1, 2, [3, 2, 4], spec_of((3, 1, 3))
        order = torch.arange(30)
        order[2:26] = 2 + torch.tensor(oracle.tile_order((3, 2, 4), (3, 1, 3)))
        assert torch.equal(torch.ops.sta.tile(x, *arguments), x[:, order])


@pytest.mark.parametrize("name", ["tile", "untile"])
def test_opcheck_and_gradients(name):
    op = getattr(torch.ops.sta, name)
    arguments = 1, 2, [3, 2, 5], spec_of((3, 2, 2))
    x = torch.randn(2, 37, 3, dtype=torch.float64).transpose(0, 2).requires_grad_()
    torch.library.opcheck(op.default, (x, *arguments))
    assert torch.autograd.gradcheck(lambda x: op(x, *arguments), x)
    assert torch.autograd.gradgradcheck(lambda x: op(x, *arguments), x)


@pytest.mark.parametrize("in_dim", [0, 1, 3])
@pytest.mark.parametrize("dim", [1, -2])
def test_vmap(in_dim, dim):
    arguments = dim, 2, [3, 2, 5], spec_of((3, 2, 2))
    x = torch.randn(2, 37, 3)
    tiled = torch.vmap(lambda x: torch.ops.sta.tile(x, *arguments), in_dim)(
        torch.stack([x, x + 1], in_dim)
    )
    for i in range(2):
        assert torch.equal(tiled[i], torch.ops.sta.tile(x + i, *arguments))


def test_a_grid_that_does_not_fit_is_named():
    with pytest.raises(StaError, match="offset of the video segment"):
        torch.ops.sta.tile(torch.randn(2, 30), 1, 1, [3, 2, 5], spec_of((3, 2, 2)))
