"""Blocks of queries and of keys that a tier is chosen for: pieces of at most so many tokens of one tile or one segment.

A block begins at the start of its tile, so a tile of 300 tokens has blocks of 128, 128 and 44; no block crosses a tile.
A 3x4x4 video in 1x2x2 tiles of 12 tokens behind 5 text tokens has, in blocks of 8, the key blocks

    ((0, 5), (5, 8), (13, 4), (17, 8), (25, 4), (29, 8), (37, 4), (41, 8), (49, 4))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from .attention_spec import Triple
from .geometry import Geometry
from .runs import Run

SIZE = 128  # query rows and keys of the tensor core instructions that tiers are made for


@dataclass(frozen=True)
class TokenBlocks:
    """queries, keys: (start, length) of each block, ascending. visible[i][j]: does query block i see key block j?

    query_tiles, key_tiles: the tile of each block; None for context.
    """

    queries: tuple[Run, ...]
    keys: tuple[Run, ...]
    query_tiles: tuple[Triple | None, ...]
    key_tiles: tuple[Triple | None, ...]
    visible: tuple[tuple[bool, ...], ...]


@lru_cache(maxsize=64)
def token_blocks(geometry: Geometry, rows: int = SIZE, keys: int = SIZE) -> TokenBlocks:
    """Blocks of at most `rows` queries and `keys` keys of a sequence whose heads have one window."""
    queries = tuple(_cut(geometry, geometry.video_query, geometry.context_queries, rows))
    columns = tuple(_cut(geometry, geometry.video_key, geometry.contexts, keys))
    seen = tuple(
        tuple(_sees(geometry, of_query, of_key) for _, of_key in columns) for _, of_query in queries
    )
    return TokenBlocks(
        queries=tuple(run for run, _ in queries),
        keys=tuple(run for run, _ in columns),
        query_tiles=tuple(tile for _, tile in queries),
        key_tiles=tuple(tile for _, tile in columns),
        visible=seen,
    )


def _cut(
    geometry: Geometry, video: int, contexts: tuple[Run, ...], size: int
) -> Iterator[tuple[Run, Triple | None]]:
    tiling = geometry.tiling
    pieces: list[tuple[Run, Triple | None]] = [(run, None) for run in contexts]
    for a, b, c in product(*map(range, tiling.tiles)):
        pieces.append(((video + tiling.start(a, b, c), tiling.count(a, b, c)), (a, b, c)))
    for (start, length), tile in sorted(pieces, key=_start):
        for at in range(0, length, size):
            yield (start + at, min(size, length - at)), tile


def _start(piece: tuple[Run, Triple | None]) -> int:
    return piece[0][0]


def _sees(geometry: Geometry, query: Triple | None, key: Triple | None) -> bool:
    if query is None or key is None:
        return True
    tiling, window = geometry.tiling, geometry.window
    first, count = window.first(tiling, query), window.effective(tiling)
    return all(a <= at < a + n for a, at, n in zip(first, key, count, strict=True))
