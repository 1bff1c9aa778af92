"""Compact groups of the tokens of a block: neighbours in the video, whose mean stands for them where tiers are chosen.

A block is a run of a tile's tokens, so two neighbours of the run may be a whole row of the tile apart. Halving the longer
side again and again gives groups of nearly one size that are about as long as they are wide. Of the first 12 tokens of a
tile of 2x3x4, which are its first frame, four groups are

    0 0 2 2
    0 1 2 3
    1 1 3 3
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, product

from .attention_spec import Triple
from .runs import Run
from .tiling import Tiling


@lru_cache(maxsize=4096)
def compact_groups(extents: Triple, first: int, length: int, count: int) -> bytes:
    """The group of each of the tokens first .. first + length - 1 of a tile; some are empty where tokens are fewer."""
    _, rows, cols = extents
    groups = bytearray(length)

    def position(token: int) -> Triple:
        at = first + token
        return at // (rows * cols), at // cols % rows, at % cols

    def split(tokens: list[int], group: int, count: int) -> None:
        if count == 1 or not tokens:
            for token in tokens:
                groups[token] = group
            return
        places = {token: position(token) for token in tokens}
        spans = [max(axis) - min(axis) for axis in zip(*places.values(), strict=True)]
        longest = max((1, 2, 0), key=lambda axis: spans[axis])
        tokens = sorted(tokens, key=lambda token: (places[token][longest], token))
        half = count // 2
        cut = len(tokens) * half // count
        split(tokens[:cut], group, half)
        split(tokens[cut:], group + half, count - half)

    split(list(range(length)), 0, count)
    return bytes(groups)


@lru_cache(maxsize=64)
def groups_of_runs(tiling: Tiling, runs: tuple[Run, ...], count: int) -> bytes:
    """The group of each token of the video, in tile order. runs: of tokens of the video, each within a tile; 0 elsewhere."""
    tiles = tuple(product(*map(range, tiling.tiles)))
    starts = list(accumulate((tiling.count(*tile) for tile in tiles), initial=0))
    groups = bytearray(tiling.tokens)
    index = 0
    for start, length in sorted(run for run in runs if run[1]):
        while starts[index + 1] <= start:
            index += 1
        a, b, c = tiles[index]
        extents = tiling.sizes(0)[a], tiling.sizes(1)[b], tiling.sizes(2)[c]
        groups[start : start + length] = compact_groups(
            extents, start - starts[index], length, count
        )
    return bytes(groups)
