"""How many tiles wide is the window on each axis?

A request in tokens becomes ceil(tokens / nominal tile size) tiles, and an even number one more; a
request that covers an axis is the whole axis. On 30x48x80 in 6x8x8 tiles, (18, 24, 24) tokens are
(3, 3, 3) tiles.

"auto" keeps at most 42 % of the pairs, the paper's training-free setting of 58 % sparsity, and like
the paper's window it is as near to a cube of tokens as the tiles allow. It starts from the
narrowest windows and widens the axis on which it reaches over the fewest tokens, while the budget
allows: so the smallest reach is as large as it can be, where an axis that is covered wholly has no
limit, and the other axes use what is left. On 30x48x80 in 6x8x8 tiles that is the paper's (5, 5, 5)
tiles: all 30 frames, 40 rows and 40 cols, 41.7 % of the pairs. An axis with several tiles never has
a window of one tile.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf, prod
from typing import NamedTuple

from ..ir.attention_spec import Triple
from ..ir.window import effective, kept_on_axis

AUTO_PERCENT = 42  # of all pairs


class AxisWindows(NamedTuple):
    """Windows wider than one tile on an axis, narrow to wide; the last is the whole axis."""

    tiles: tuple[int, ...]
    pairs: tuple[int, ...]  # of positions on the axis that are kept
    reach: tuple[float, ...]  # tokens of the axis that a query sees; inf for the whole axis


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
        i = min(growing, key=lambda i: axes[i].reach[picks[i]])  # of equals, the first axis
        pick = picks[i] + 1
        wider = pairs // axes[i].pairs[pick - 1] * axes[i].pairs[pick]
        fits = wider <= budget
        if fits:
            picks[i], pairs = pick, wider
        if not fits or pick + 1 == len(axes[i].tiles):
            growing.remove(i)
    t, h, w = (axis.tiles[pick] for axis, pick in zip(axes, picks, strict=True))
    return (t, h, w)


def reach(length: int, n: int, w: int) -> float:
    """Tokens that a window of w tiles covers on an axis, on average; inf for the whole axis."""
    return effective(n, w) * length / n if effective(n, w) < n else inf


@lru_cache(maxsize=16384)
def _axis_windows(length: int, n: int) -> AxisWindows:
    tiles = (*range(3, n, 2), n)
    pairs = tuple(kept_on_axis(length, n, w) for w in tiles)
    return AxisWindows(tiles, pairs, tuple(reach(length, n, w) for w in tiles))
