"""Where is each token of a (T, H, W) grid in tile order?

Tiles are balanced, never padded: an axis of length L in n tiles gets sizes that differ by at most
one, the larger ones first. Tile order is lexicographic in (tile_t, tile_h, tile_w), then in (t, h,
w) inside the tile, and a tile's first token is plain arithmetic. A 3x4x4 grid in 1x2x2 tiles has
tiles of 3x2x2 tokens, and tile (0, 1, 0) begins at token `0 + 3 * (2 * 4 + 2 * 0)` = 24 of tile
order, which is token (0, 2, 0), number 8 in raster order.

Axis order is (frames, rows, cols) = (T, H, W) everywhere; columns are contiguous in raster order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from ..errors import StaError
from .attention_spec import Triple


@lru_cache(maxsize=4096)
def balanced(length: int, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and starts of n tiles along an axis; 45 in 6 gives sizes 8 8 8 7 7 7."""
    small, larger = divmod(length, n)
    sizes = (small + 1,) * larger + (small,) * (n - larger)
    starts = tuple(small * i + min(i, larger) for i in range(n))
    return sizes, starts


@dataclass(frozen=True)
class Tiling:
    """grid: tokens per axis (T, H, W). tiles: tiles per axis (T, H, W)."""

    grid: Triple
    tiles: Triple

    def __post_init__(self) -> None:
        fits = all(1 <= n <= length for n, length in zip(self.tiles, self.grid, strict=True))
        if not fits:
            raise StaError(
                f"a token grid of {self.grid} can't be cut into {self.tiles} tiles per axis; "
                "pass between 1 and the axis length for each axis (frames, rows, cols)"
            )

    @property
    def extents(self) -> Triple:
        """Nominal tile size in tokens (T, H, W): the size of the largest tile."""
        t, h, w = (-(-length // n) for length, n in zip(self.grid, self.tiles, strict=True))
        return (t, h, w)

    @property
    def tokens(self) -> int:
        return prod(self.grid)

    @property
    def count_tiles(self) -> int:
        return prod(self.tiles)

    @property
    def ragged_axes(self) -> tuple[int, ...]:
        """Axes whose tiles are not all of one size."""
        axes = enumerate(zip(self.grid, self.tiles, strict=True))
        return tuple(axis for axis, (length, n) in axes if length % n)

    def sizes(self, axis: int) -> tuple[int, ...]:
        return balanced(self.grid[axis], self.tiles[axis])[0]

    def starts(self, axis: int) -> tuple[int, ...]:
        return balanced(self.grid[axis], self.tiles[axis])[1]

    def start(self, a: int, b: int, c: int) -> int:
        """Position in tile order of the first token of tile (a, b, c)."""
        _, rows, cols = self.grid
        rows_before = self.starts(1)[b] * cols
        cols_before = self.sizes(1)[b] * self.starts(2)[c]
        return self.starts(0)[a] * rows * cols + self.sizes(0)[a] * (rows_before + cols_before)

    def count(self, a: int, b: int, c: int) -> int:
        """Tokens in tile (a, b, c)."""
        return self.sizes(0)[a] * self.sizes(1)[b] * self.sizes(2)[c]

    def tile_of(self, t: int, h: int, w: int) -> Triple:
        """The tile that holds token (t, h, w)."""
        a, b, c = (
            _tile_on_axis(length, n, i)
            for length, n, i in zip(self.grid, self.tiles, (t, h, w), strict=True)
        )
        return (a, b, c)

    def order(self) -> list[int]:
        """Raster index of each token in tile order: `x_tile = x_raster[order]`."""
        _, rows, cols = self.grid
        return [
            (t * rows + h) * cols + w
            for a, b, c in product(*map(range, self.tiles))
            for t, h, w in product(self._span(0, a), self._span(1, b), self._span(2, c))
        ]

    def _span(self, axis: int, i: int) -> range:
        return range(self.starts(axis)[i], self.starts(axis)[i] + self.sizes(axis)[i])


def _tile_on_axis(length: int, n: int, i: int) -> int:
    small, larger = divmod(length, n)
    in_larger = larger * (small + 1)
    return i // (small + 1) if i < in_larger else larger + (i - in_larger) // small
