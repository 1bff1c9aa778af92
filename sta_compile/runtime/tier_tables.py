"""The rows of queries and the key blocks that kernels with tiers know, in the order in which they count them."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

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


class ByteLayout(NamedTuple):
    """Keys in e4m3, of the video alone, each tile from a multiple of 16 on: loads of 8-bit keys begin at such.

    sources: keys (first, how many) of each sixteen. blocks: (start, length) of key blocks in this layout.
    """

    sources: tuple[Run, ...]
    blocks: tuple[Run, ...]


@lru_cache(maxsize=64)
def byte_layout(tiling: Tiling, first: int, size: int) -> ByteLayout:
    """first: key of the video's first token. size: of a key block, a multiple of 16."""
    sources: list[Run] = []
    blocks: list[Run] = []
    for start, length in key_blocks(tiling, size):
        blocks.append((len(sources) * GROUP, length))
        sources += [(first + start + at, min(GROUP, length - at)) for at in range(0, length, GROUP)]
    return ByteLayout(tuple(sources), tuple(blocks))
