"""Device code: which key runs does a block of queries read? Arithmetic on scalars, no tables.

The twin of `sta_compile.ir.runs` and `ir.window`. A window is a box of tiles: lo .. lo + width - 1
on each axis. Its keys are one run for each pair of a frame tile and a row tile, where runs that
touch are one: a window over all cols has one run per frame tile, a full window has one run.
Sizes never grow along an axis, so runs never get longer along `a` or `b`.
"""

import triton
import triton.language as tl


@triton.jit
def axis_start(index, length, tiles):
    """First position of a tile: sizes differ by at most one, the larger ones first."""
    small = length // tiles
    return index * small + tl.minimum(index, length - small * tiles)


@triton.jit
def window_start(index, half, width, tiles):
    return tl.minimum(tl.maximum(index - half, 0), tiles - width)


@triton.jit
def key_run(a, b, box, sizes):
    """(start, length) of run (a, b), in tokens from the start of the video.

    box: tiles in a run (t, h), first tile (t, h), first column and number of columns.
    sizes: rows and cols of the grid; for frames and for rows, the size of a smaller tile and how
    many tiles are one token larger.
    """
    step_t, step_h, lo_t, lo_h, col, cols = box
    H, W, small_t, large_t, small_h, large_h = sizes
    t, h = lo_t + a, lo_h + b
    t0 = t * small_t + tl.minimum(t, large_t)
    t1 = (t + step_t) * small_t + tl.minimum(t + step_t, large_t)
    h0 = h * small_h + tl.minimum(h, large_h)
    h1 = (h + step_h) * small_h + tl.minimum(h + step_h, large_h)
    start = t0 * H * W + (t1 - t0) * (h0 * W + (h1 - h0) * col)
    return start, (t1 - t0) * (h1 - h0) * cols


@triton.jit
def tail_keys(i, video, runs_t, runs_h, box, sizes, unit, BLOCK_N: tl.constexpr):
    """Tokens number `i` [BLOCK_N] of all runs' tails, packed, -1 past the last; and their number.

    A tail is what is left of a run after as many units as it has.
    """
    key = tl.full([BLOCK_N], -1, tl.int32)
    before = 0
    for a in range(runs_t):
        for b in range(runs_h):
            start, length = key_run(a, b, box, sizes)
            tail = length % unit
            inside = (i >= before) & (i < before + tail)
            key = tl.where(inside, video + start + length - tail + i - before, key)
            before += tail
    return key, before
