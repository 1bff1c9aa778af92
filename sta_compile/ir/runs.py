"""Which keys does a query tile read, as contiguous runs of tile order?

Tiles that are neighbours along cols are contiguous in tile order, so a window is one run for each
(a', b') tile pair of frames and rows. Runs that touch are one run: a window over all cols has one
run for each frame tile, and a full window has a single run. On a 3x4x4 grid in 3x2x4 tiles, tile
(1, 0, 0) with a window of (3, 1, 3) tiles reads three runs: `((0, 6), (16, 6), (32, 6))`.

Positions are relative to the start of the video segment.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from .attention_spec import Triple
from .tiling import Tiling
from .window import Window

Run = tuple[int, int]  # (start, length) in tokens


@lru_cache(maxsize=65536)
def key_runs(tiling: Tiling, window: Window, tile: Triple) -> tuple[Run, ...]:
    """Runs that the queries of `tile` (a, b, c) read: ascending, none touching the next."""
    return box_runs(tiling, window.first(tiling, tile), window.effective(tiling))


def box_runs(tiling: Tiling, first: Triple, count: Triple) -> tuple[Run, ...]:
    """Runs of a box of tiles, from tile `first` on, `count` of them per axis."""
    (a0, b0, c0), (frames, rows, cols) = first, count
    last = c0 + cols - 1
    runs: list[Run] = []
    for a, b in product(range(a0, a0 + frames), range(b0, b0 + rows)):
        start = tiling.start(a, b, c0)
        length = tiling.start(a, b, last) + tiling.count(a, b, last) - start
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((start, length))
    return tuple(runs)
