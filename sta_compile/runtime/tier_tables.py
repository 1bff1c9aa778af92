"""The rows of queries and the key blocks that kernels with tiers know, in the order in which they count them."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from ..codegen.cutlass_blocks import GROUP
from ..ir.runs import Run
from ..ir.tiling import Tiling
from ..ir.window import Window
from ..ir.window_groups import group_blocks


@lru_cache(maxsize=64)
def tier_rows(tiling: Tiling, size: int, count: int) -> tuple[Run, ...]:
    """(start, length) of the rows of `count` thread blocks of `size` queries, in tokens of the video; lengths may be 0.

    Tiles of a place (first, middle or last of each axis) have as many blocks as the largest of them.
    """
    grouped = group_blocks(tiling, Window((1, 1, 1)), GROUP, size // GROUP)

    def place(tile: int, tiles: int) -> int:
        return 0 if tile == 0 else 2 if tile == tiles - 1 else 1

    rows: list[Run] = []
    for tile in product(*map(range, tiling.tiles)):
        t, h, w = map(place, tile, tiling.tiles)
        start, tokens = tiling.start(*tile), tiling.count(*tile)
        for at in range(0, grouped.group[t][h][w] * size, size):
            rows.append((start + at, max(0, min(size, tokens - at))))
    return (*rows, *((0, 0),) * (count - len(rows)))


@lru_cache(maxsize=64)
def key_blocks(tiling: Tiling, size: int) -> tuple[Run, ...]:
    """(start, length) of each tile's keys in blocks of at most `size`, in tokens of the video."""
    blocks: list[Run] = []
    for tile in product(*map(range, tiling.tiles)):
        start, tokens = tiling.start(*tile), tiling.count(*tile)
        blocks += [(start + at, min(size, tokens - at)) for at in range(0, tokens, size)]
    return tuple(blocks)
