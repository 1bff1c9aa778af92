"""`sta::tile` and `sta::untile`: video tokens from raster order to tile order and back.

Two size classes per axis (design: larger tiles first) make at most eight boxes of equal tiles; in
each box both orders are affine in (tile_t, tile_h, tile_w, t, h, w), so each is one strided copy and
no index tensor exists. Tokens outside `offset .. offset + T*H*W` are copied as they are.

On a 3x4x4 grid in 1x2x2 tiles there is one box: raster strides (48, 8, 2, 16, 4, 1) and tile order
strides (48, 24, 12, 4, 2, 1), in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..errors import StaError
from ..ir.tiling import Tiling
from .arguments import tiling_of
from .library import LIBRARY, define

_ARGUMENTS = "(Tensor x, int dim, SymInt offset, SymInt[] grid, str spec) -> Tensor"


def _classes(tiling: Tiling, axis: int) -> list[tuple[int, int, int]]:
    """(first token, tiles, tile size) of each class of equal tiles on an axis."""
    small, larger = divmod(tiling.grid[axis], tiling.tiles[axis])
    classes = [(0, larger, small + 1)] if larger else []
    classes.append((larger * (small + 1), tiling.tiles[axis] - larger, small))
    return classes


Order = tuple[int, tuple[int, ...]]  # first token, strides in tokens


def _boxes(tiling: Tiling) -> Iterator[tuple[tuple[int, ...], tuple[Order, Order]]]:
    """Sizes (tile_t, tile_h, tile_w, t, h, w), (raster, tile) order of each box of equal tiles."""
    _, rows, cols = tiling.grid
    for (t0, kt, st), (h0, kh, sh), (w0, kw, sw) in product(
        *(_classes(tiling, i) for i in range(3))
    ):
        sizes = (kt, kh, kw, st, sh, sw)
        plane = rows * cols
        raster = (st * plane, sh * cols, sw, plane, cols, 1)
        tiled = (st * plane, st * sh * cols, st * sh * sw, sh * sw, sw, 1)
        starts = (t0 * plane + h0 * cols + w0, t0 * plane + st * (h0 * cols + sh * w0))
        yield sizes, ((starts[0], raster), (starts[1], tiled))


def _view(x: Tensor, dim: int, sizes: Sequence[int], start: int, strides: Sequence[int]) -> Tensor:
    """View of the tokens `start + strides . index` of axis `dim`, which becomes six axes."""
    step = x.stride(dim)
    return x.as_strided(
        (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]),
        (*x.stride()[:dim], *(step * s for s in strides), *x.stride()[dim + 1 :]),
        x.storage_offset() + step * start,
    )


def _convert(x: Tensor, dim: int, offset: int, grid: Sequence[int], spec: str, to: int) -> Tensor:
    """to: 1 converts to tile order, 0 to raster order."""
    tiling = tiling_of(grid, spec)
    dim %= x.dim()
    end = offset + tiling.tokens
    if offset < 0 or end > x.shape[dim]:
        raise StaError(
            f"tokens {offset}..{end} of the grid {tiling.grid} don't fit axis {dim} of "
            f"{tuple(x.shape)}; pass the offset of the video segment"
        )
    out = torch.empty_like(x)
    for start, stop in ((0, offset), (end, x.shape[dim])):
        if stop > start:
            out.narrow(dim, start, stop - start).copy_(x.narrow(dim, start, stop - start))
    for sizes, orders in _boxes(tiling):
        start, strides = orders[to]
        target = _view(out, dim, sizes, offset + start, strides)
        start, strides = orders[1 - to]
        target.copy_(_view(x, dim, sizes, offset + start, strides))
    return out


def _register(name: str, to: int, inverse: str) -> None:
    qualified = f"sta::{name}"
    define(name + _ARGUMENTS)

    def real(x: Tensor, dim: int, offset: int, grid: Sequence[int], spec: str) -> Tensor:
        return _convert(x, dim, offset, grid, spec, to)

    def fake(x: Tensor, dim: int, offset: int, grid: Sequence[int], spec: str) -> Tensor:
        return torch.empty_like(x)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.arguments = inputs[1:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return getattr(torch.ops.sta, inverse)(grad, *ctx.arguments), None, None, None, None

    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        x: Tensor,
        dim: int,
        offset: int,
        grid: Sequence[int],
        spec: str,
    ) -> tuple[Tensor, int]:
        dim = dim % (x.dim() - 1) + 1
        op = getattr(torch.ops.sta, name)
        return op(x.movedim(in_dims[0], 0), dim, offset, grid, spec), 0

    LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=LIBRARY)
    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=LIBRARY)
    torch.library.register_vmap(qualified, vmap, lib=LIBRARY)


_register("tile", 1, "untile")
_register("untile", 0, "tile")
