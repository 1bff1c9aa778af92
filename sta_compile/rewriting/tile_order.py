"""How does a graph put the tokens of one axis into tile order, and back?

While tiles divide the grid, the order is a reshape, a permute and a reshape, which inductor fuses
into its neighbours. A 3x4x4 grid in 1x2x2 tiles, tokens on axis 1 of x [2, 48, 8]:

    x.unflatten(1, (1, 3, 2, 2, 2, 2)).permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(1, 6).contiguous()

A ragged grid axis has tiles of two sizes: it is cut in two at the level where each part is one
range of tokens, the parts are reordered by themselves, and a `cat` joins them. Other tokens on the
axis (text after video) need a `cat` too. What would need two levels of `cat`, and all lengths that
are known only at run time, is the operator `sta::tile` or `sta::untile`: inductor gives every level
a buffer of its own, and two levels took 3 times as long as one gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.attention_spec import AttentionSpec
from ..ir.tiling import Tiling
from .fake_values import VALUE, add_call

Size = int | Node  # a Node is a SymInt of the graph
Call = Callable[..., Node]  # (name of the method, tensor, *arguments)


def emit_tile(
    graph: Graph,
    x: Node,
    dim: int,
    offset: Size,
    grid: Sequence[Size],
    spec: str,
    to_tile: bool,
    *,
    like: Node | None = None,
) -> Node:
    """Reorder rows offset .. offset + T*H*W of axis `dim` of x, at the graph's insertion point.

    grid is (T, H, W) and spec the text of the AttentionSpec that holds the tiles; to_tile False
    goes back to raster order. The result is contiguous, whatever the strides of x, and shares
    memory with x only where both orders are the same. Provenance is copied from `like`.
    """

    def method(target: str, *args: Any) -> Node:
        return add_call(graph, "call_method", target, args, like=like)

    def function(target: Any, *args: Any) -> Node:
        return add_call(graph, "call_function", target, args, like=like)

    shape = x.meta[VALUE].shape
    dim %= len(shape)
    length = shape[dim]
    tiling = _static_tiling(grid, spec)
    if (
        tiling is None
        or not isinstance(offset, int)
        or not isinstance(length, int)
        or len(tiling.ragged_axes) + (length != tiling.tokens) > 1
    ):
        target = torch.ops.sta.tile.default if to_tile else torch.ops.sta.untile.default
        return function(target, x, dim, offset, list(grid), spec)
    if tiling.ragged_axes:
        parts, level = _ragged(method, x, dim, tiling, to_tile)
        joined = function(torch.cat, parts, level)
        whole = method("flatten", joined, dim, level) if level > dim else joined
        return method("contiguous", whole)
    end = offset + tiling.tokens
    video = method("narrow", x, dim, offset, tiling.tokens) if length != tiling.tokens else x
    pieces = [_permuted(method, video, dim, 0, tiling.tiles, tiling.extents, to_tile)]
    if offset:
        pieces.insert(0, method("narrow", x, dim, 0, offset))
    if end < length:
        pieces.append(method("narrow", x, dim, end, length - end))
    whole = function(torch.cat, pieces, dim) if len(pieces) > 1 else pieces[0]
    return method("contiguous", whole)


def _static_tiling(grid: Sequence[Size], spec: str) -> Tiling | None:
    tiles = AttentionSpec.parse(spec).tiles
    t, h, w = grid
    if tiles is None or isinstance(t, Node) or isinstance(h, Node) or isinstance(w, Node):
        return None
    return Tiling((t, h, w), tiles)


def _ragged(
    method: Call, x: Node, dim: int, tiling: Tiling, to_tile: bool
) -> tuple[list[Node], int]:
    """The two parts of a grid with one ragged axis, and the axis on which to join them.

    Above the ragged axis r, the axes of the grid are split off first: in raster order as
    (n, s) pairs of a number and a size of tiles, in tile order as the numbers alone, while the
    sizes are below. Then each part is one range.
    """
    (r,) = tiling.ragged_axes
    numbers, sizes = list(tiling.tiles), list(tiling.extents)
    row = prod(tiling.grid[r + 1 :])  # tokens for one step along the ragged axis
    pairs = [size for axis in range(r) for size in (numbers[axis], sizes[axis])]
    if not to_tile:
        row *= prod(sizes[:r])
    above = pairs if to_tile else numbers[:r]
    at = dim + len(above)
    split = method("unflatten", x, dim, (*above, tiling.grid[r] * row)) if r else x
    parts = []
    small, larger = divmod(tiling.grid[r], tiling.tiles[r])
    start = 0
    for number, size in ((larger, small + 1), (tiling.tiles[r] - larger, small)):
        numbers[r], sizes[r] = number, size
        part = method("narrow", split, at, start * row, number * size * row)
        parts.append(_permuted(method, part, dim, r, tuple(numbers), tuple(sizes), to_tile))
        start += number * size
    return parts, dim + (r if to_tile else 2 * r)


def _permuted(
    method: Call,
    x: Node,
    dim: int,
    r: int,
    numbers: tuple[int, ...],
    sizes: tuple[int, ...],
    to_tile: bool,
) -> Node:
    """Reorder a grid of equal tiles, whose axes above the r-th are split off already.

    Raster order is (n0, s0, n1, s1, n2, s2) and tile order (n0, n1, n2, s0, s1, s2), from axis
    `dim` on. The axes above the r-th stay split off in the result.
    """
    pairs = [size for pair in zip(numbers[r:], sizes[r:], strict=True) for size in pair]
    below, order, kept = (
        (pairs, (0, 2, 4, 1, 3, 5), r)
        if to_tile
        else ([*numbers[r:], *sizes], (0, 3, 1, 4, 2, 5), 2 * r)
    )
    split = method("unflatten", x, dim + 6 - len(below), tuple(below))
    rest = range(dim + 6, split.meta[VALUE].dim())
    axes = (*range(dim), *(dim + axis for axis in order), *rest)
    permuted = method("permute", split, *axes)
    return method("flatten", permuted, dim + kept, dim + 5)
