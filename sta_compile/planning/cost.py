"""How much work does a tiling waste on blocks that are not full?

Kernels compute whole blocks: the queries of a tile rounded up to 64 rows, and the keys of its
window in blocks of 128, first the full blocks of every run, then the tails of all runs packed
together. These reference blocks belong to the meaning of a plan, so they are the same for every GPU
and kernel. In 6x8x8 tiles every run of a (3, 3, 3) window has 6*8*24 = 1152 = 9 * 128 keys and 384
= 6 * 64 queries: nothing is wasted, 1000 thousandths. A 6x9x8 tile has 432 queries, rounded up to
448.

Query tiles whose sizes and windows are alike cost the same, so this counts kinds of tiles, not
tiles.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import product

from ..ir.tiling import Tiling, balanced
from ..ir.window import Window, effective, kept_pairs, lo

QUERY_BLOCK = 64
KEY_BLOCK = 128

# On one axis: ((size of the query tile, larger key tiles, smaller key tiles), query tiles) of each.
Kinds = tuple[tuple[tuple[int, int, int], int], ...]


def waste(tiling: Tiling, window: Window) -> int:
    """Computed over real (query, key) pairs in thousandths; 1000 wastes nothing."""
    real = kept_pairs(tiling, window)
    return (2000 * computed_pairs(tiling, window) + real) // (2 * real)


def computed_pairs(tiling: Tiling, window: Window) -> int:
    """(query, key) pairs of all blocks that the video queries compute over video keys."""
    axes = zip(tiling.grid, tiling.tiles, window.tiles, strict=True)
    frame_kinds, row_kinds, col_kinds = (_kinds(length, n, w) for length, n, w in axes)
    small_t, small_h, small_w = (
        length // n for length, n in zip(tiling.grid, tiling.tiles, strict=True)
    )
    _, all_rows, all_cols = tiling.grid
    total = 0
    for (frames, larger_t, smaller_t), frame_tiles in frame_kinds:
        frame_sizes = ((small_t + 1, larger_t), (small_t, smaller_t))
        for ((rows, larger_h, smaller_h), row_tiles), (
            (cols, larger_w, smaller_w),
            col_tiles,
        ) in product(row_kinds, col_kinds):
            key_rows = small_h * (larger_h + smaller_h) + larger_h
            key_cols = small_w * (larger_w + smaller_w) + larger_w
            row_sizes = ((small_h + 1, larger_h), (small_h, smaller_h))
            if key_cols == all_cols:  # the runs of all row tiles touch
                row_sizes = ((key_rows, 1), (0, 0))
            if key_cols == all_cols and key_rows == all_rows:  # and those of all frame tiles
                key_frames = small_t * (larger_t + smaller_t) + larger_t
                run_lengths = [(key_frames * all_rows * all_cols, 1)]
            else:
                run_lengths = [
                    (t * h * key_cols, t_count * h_count)
                    for t, t_count in frame_sizes
                    for h, h_count in row_sizes
                    if t_count and h_count
                ]
            blocks = sum(length // KEY_BLOCK * count for length, count in run_lengths)
            tails = sum(length % KEY_BLOCK * count for length, count in run_lengths)
            keys = (blocks + -(-tails // KEY_BLOCK)) * KEY_BLOCK
            queries = -(-frames * rows * cols // QUERY_BLOCK) * QUERY_BLOCK
            total += frame_tiles * row_tiles * col_tiles * queries * keys
    return total


@lru_cache(maxsize=16384)
def _kinds(length: int, n: int, w: int) -> Kinds:
    sizes, _ = balanced(length, n)
    larger, width = length % n, effective(n, w)
    kinds: Counter[tuple[int, int, int]] = Counter()
    for q, size in enumerate(sizes):
        larger_keys = min(max(larger - lo(q, w, n), 0), width)
        kinds[size, larger_keys, width - larger_keys] += 1
    return tuple(kinds.items())
