"""Emitted conversions against the brute-force order, alone, differentiated and compiled."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import sta_compile.ops  # noqa: F401  registers sta::tile and sta::untile
from sta_compile.ir.attention_spec import AttentionSpec, Triple
from sta_compile.ir.tiling import Tiling
from sta_compile.rewriting.fake_values import VALUE
from sta_compile.rewriting.tile_order import emit_tile


def spec_of(tiles: Triple) -> str:
    return AttentionSpec(("video",), tiles=tiles, window="full").text()


def converter(x: torch.Tensor, dim: int, offset: int, tiling: Tiling, to_tile: bool) -> GraphModule:
    """A graph that takes x and returns it converted."""
    graph = Graph()
    source = graph.placeholder("x")
    source.meta[VALUE] = FakeTensorMode().from_tensor(x)
    spec = spec_of(tiling.tiles)
    graph.output(emit_tile(graph, source, dim, offset, tiling.grid, spec, to_tile))
    graph.lint()
    return GraphModule({}, graph)


def targets(module: GraphModule) -> list[str]:
    return [
        getattr(n.target, "__name__", str(n.target)) for n in module.graph.nodes if "call" in n.op
    ]


def expected(x: torch.Tensor, dim: int, offset: int, tiling: Tiling) -> torch.Tensor:
    index = torch.arange(x.shape[dim])
    index[offset : offset + tiling.tokens] = torch.tensor(tiling.order()) + offset
    return x.index_select(dim, index)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, Tiling]:
    grid, tiles = [], []
    ragged = draw(st.sampled_from([None, 0, 1, 2]))
    for axis in range(3):
        number, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        more = draw(st.integers(0, number - 1)) if axis == ragged else 0
        grid.append(number * size + more)
        tiles.append(number)
    tiling = Tiling((grid[0], grid[1], grid[2]), (tiles[0], tiles[1], tiles[2]))
    before, after = (
        (0, 0) if tiling.ragged_axes else draw(st.sampled_from([(0, 0), (2, 0), (3, 1)]))
    )
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, before + tiling.tokens + after)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    x = torch.arange(prod(shape)).reshape(shape).to(dtype)
    if draw(st.booleans()):  # a tensor with unusual strides
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    return x, dim - draw(st.sampled_from([0, len(shape)])), before, tiling


@settings(max_examples=150, deadline=None)
@given(cases())
def test_order_inverse_and_metadata(case: tuple[torch.Tensor, int, int, Tiling]) -> None:
    x, dim, offset, tiling = case
    to_tile = converter(x, dim, offset, tiling, True)
    back = converter(x, dim, offset, tiling, False)
    y = to_tile(x)
    assert torch.equal(y, expected(x, dim, offset, tiling))
    assert torch.equal(back(y), x)
    (output,) = to_tile.graph.output_node().all_input_nodes
    for result in (y, output.meta[VALUE], back(y)):
        assert (result.shape, result.dtype) == (x.shape, x.dtype)
        assert result.is_contiguous()
    strides = [  # a dimension of one element has no place where the next one is
        [stride for stride, size in zip(z.stride(), z.shape, strict=True) if size > 1]
        for z in (y, output.meta[VALUE])
    ]
    assert strides[0] == strides[1]
    assert targets(to_tile).count("cat") <= 1


def test_gradient_is_the_inverse() -> None:
    tiling = Tiling((4, 5, 6), (2, 3, 2))
    x = torch.randn(2, tiling.tokens, 3, requires_grad=True)
    weight = torch.randn_like(x)
    (converter(x, 1, 0, tiling, True)(x) * weight).sum().backward()
    assert torch.equal(x.grad, converter(x, 1, 0, tiling, False)(weight))


def test_provenance_is_copied() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta[VALUE] = FakeTensorMode().from_tensor(torch.empty(1, 48, 2))
    consumer = graph.call_function(torch.sin, (x,))
    consumer.meta.update(stack_trace="model.py, line 3", nn_module_stack={"a": ("blocks.0", "B")})
    graph.output(consumer)
    with graph.inserting_before(consumer):
        y = emit_tile(graph, x, 1, 0, (3, 4, 4), spec_of((1, 2, 2)), True, like=consumer)
    assert y.meta["stack_trace"] == "model.py, line 3"
    assert y.meta["nn_module_stack"] == {"a": ("blocks.0", "B")}
    assert list(graph.nodes).index(y) == list(graph.nodes).index(consumer) - 1


def test_batch_may_be_symbolic() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = Graph()
    x = graph.placeholder("x")
    tiling = Tiling((3, 4, 6), (1, 2, 3))
    example = torch.randn(5, tiling.tokens, 2)
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC])
    x.meta[VALUE] = mode.from_tensor(example, symbolic_context=context)
    assert isinstance(x.meta[VALUE].shape[0], torch.SymInt)
    graph.output(emit_tile(graph, x, 1, 0, tiling.grid, spec_of(tiling.tiles), True))
    module = GraphModule({}, graph)
    assert torch.equal(module(example), expected(example, 1, 0, tiling))
    other = torch.randn(2, tiling.tokens, 2)
    assert torch.equal(module(other), expected(other, 1, 0, tiling))


@pytest.mark.parametrize(
    ("grid", "tiles", "before", "after"),
    [((4, 5, 7), (2, 2, 3), 0, 0), ((5, 4, 6), (2, 2, 3), 2, 0), ((3, 5, 7), (2, 3, 3), 1, 4)],
)
def test_two_levels_of_cat_become_an_operator(
    grid: Triple, tiles: Triple, before: int, after: int
) -> None:
    tiling = Tiling(grid, tiles)
    x = torch.randn(2, before + tiling.tokens + after, 3)
    to_tile = converter(x, 1, before, tiling, True)
    back = converter(x, 1, before, tiling, False)
    assert (targets(to_tile), targets(back)) == (["tile.default"], ["untile.default"])
    y = to_tile(x)
    assert torch.equal(y, expected(x, 1, before, tiling))
    assert torch.equal(back(y), x)


def test_symbolic_grid_becomes_an_operator() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    example = torch.randn(3, 6, 4)
    fake = mode.from_tensor(example)
    graph = Graph()
    x, *sizes = (graph.placeholder(name) for name in ("x", "rows", "cols"))
    for size, value in zip(sizes, fake.shape[:2], strict=True):
        size.meta[VALUE] = value
    with mode:
        x.meta[VALUE] = fake.reshape(1, -1, 2)
    grid = (2, *sizes)
    graph.output(emit_tile(graph, x, 1, 0, grid, spec_of((1, 2, 2)), True))
    module = GraphModule({}, graph)
    assert targets(module) == ["tile.default"]
    value = torch.randn(1, 2 * 4 * 4, 2)
    assert torch.equal(module(value, 4, 4), expected(value, 1, 0, Tiling((2, 4, 4), (1, 2, 2))))


def test_inductor_fuses_a_divisible_grid() -> None:
    from torch._inductor.utils import run_and_get_code

    tiling = Tiling((4, 8, 12), (2, 2, 3))
    x = torch.randn(2, tiling.tokens, 16)
    tile = converter(x, 1, 0, tiling, True)
    untile = converter(x, 1, 0, tiling, False)

    def pointwise(x: torch.Tensor) -> torch.Tensor:
        return untile(torch.sin(tile(x * 2)) + 1).cos()

    result, (code,) = run_and_get_code(torch.compile(pointwise, fullgraph=True), x)
    assert torch.allclose(result, (torch.sin(x * 2) + 1).cos(), atol=1e-6)
    assert code.count("= empty_strided") == 1  # the output alone
    assert code.count("async_compile.cpp_pybinding") <= 1


def test_random_grids_of_real_size() -> None:
    draw = random.Random(0)
    for grid, tiles in [((21, 45, 80), (3, 5, 11)), ((30, 48, 80), (5, 6, 10))]:
        tiling = Tiling(grid, tiles)
        x = torch.tensor([draw.random() for _ in range(tiling.tokens)])
        y = converter(x, 0, 0, tiling, True)(x)
        assert torch.equal(y, expected(x, 0, 0, tiling))
