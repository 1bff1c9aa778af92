"""How many tiles wide is the window on each axis?

A request in tokens becomes ceil(tokens / nominal tile size) tiles, and an even number one more; a
request that covers an axis is the whole axis. On 30x48x80 in 6x8x8 tiles, (18, 24, 24) tokens are
(3, 3, 3) tiles.

"auto" keeps at most 42 % of the pairs, the paper's training-free setting of 58 % sparsity. It
starts from the narrowest windows and widens the axis with the smallest share, while the budget
allows: so the smallest share is as large as it can be, and the other axes use what is left. On
30x48x80 in 6x8x8 tiles that is (3, 6, 7) tiles: shares of 0.6, 1 and 0.7, so 42 %. An axis with
several tiles never has a window of one tile.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from ..ir.attention_spec import Triple
from ..ir.window import effective, kept_on_axis

AUTO_PERCENT = 42  # of all pairs


class AxisWindows(NamedTuple):
    """Windows wider than one tile on an axis, narrow to wide; the last is the whole axis."""

    tiles: tuple[int, ...]
    pairs: tuple[int, ...]  # of positions on the axis that are kept
    shares: tuple[float, ...]


@lru_cache(maxsize=16384)
def requested_tiles(length: int, n: int, tokens: int) -> int:
    """Window in tiles, already odd or the whole axis, for a request in tokens on one axis."""
    if tokens >= length:
        return n
    extent = -(-length // n)
    return effective(n, -(-tokens // extent))


def auto_tiles(grid: Triple, tiles: Triple) -> Triple:
    """Window in tiles per axis (T, H, W); over budget only if the narrowest already is."""
    axes = [_axis_windows(length, n) for length, n in zip(grid, tiles, strict=True)]
    picks = [0, 0, 0]  # index into the windows of each axis
    budget = AUTO_PERCENT * prod(grid) ** 2 // 100
    pairs = prod(axis.pairs[0] for axis in axes)
    growing = [i for i in range(3) if len(axes[i].tiles) > 1]
    while growing:
        i = min(growing, key=lambda i: axes[i].shares[picks[i]])  # of equals, the first axis
        pick = picks[i] + 1
        wider = pairs // axes[i].pairs[pick - 1] * axes[i].pairs[pick]
        fits = wider <= budget
        if fits:
            picks[i], pairs = pick, wider
        if not fits or pick + 1 == len(axes[i].tiles):
            growing.remove(i)
    t, h, w = (axis.tiles[pick] for axis, pick in zip(axes, picks, strict=True))
    return (t, h, w)


@lru_cache(maxsize=16384)
def _axis_windows(length: int, n: int) -> AxisWindows:
    tiles = (*range(3, n, 2), n)
    pairs = tuple(kept_on_axis(length, n, w) for w in tiles)
    return AxisWindows(tiles, pairs, tuple(count / length**2 for count in pairs))
