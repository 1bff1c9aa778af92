"""Block sizes of the C++ kernel on Hopper, for each head dim.

A block is 64 query rows for each consumer warpgroup, and `n` keys: any multiple of 16. In shared memory a row takes
whole boxes of 64 elements, so head dims 72 to 128 share rows, and the registers of a consumer hold scores (n / 2) or
weights (n / 4) and the output (head_dim / 2). Three consumers keep the tensor cores busy where 160 registers a thread do.

Measured on an H200 with 24 heads of 30x48x80 tokens in 6x8x8 tiles, 3x3x3 of them kept, in TFLOP/s, rows x keys:

    d64   192x192 551   192x160 533   192x128 533        d160  192x80 666   128x96 597
    d128  192x128 698   128x192 668   128x144 685        d192  192x64 703   128x112 649
"""

from __future__ import annotations

from ..ir.kernel_spec import Blocks

QUERY_UNIT = 64
GROUP = 16
BOX = 64
WARPS_OF_A_GROUP = 4


def _blocks(n: int, groups: int = 3, stages: int = 2) -> Blocks:
    return Blocks(QUERY_UNIT * groups, n, WARPS_OF_A_GROUP * (groups + 1), stages)


BLOCKS: dict[int, Blocks] = {
    64: _blocks(192),
    **dict.fromkeys((72, 80, 112, 120, 128), _blocks(128)),
    96: _blocks(144),
    160: _blocks(80),
    192: _blocks(64),
    256: _blocks(80, groups=2),
}

# In e4m3: a row of up to 128 columns is one box, and so are 128 keys of a column of transposed values.
FP8_KEYS = 128
FP8_BLOCKS: dict[int, Blocks] = dict.fromkeys((64, 80, 96, 112, 128), _blocks(FP8_KEYS, stages=6))

# Keys in 16 bits, two blocks in flight, and then keys in e4m3 in their place, as many as fit in for every head dim.
TIER_ROWS = 3 * QUERY_UNIT
TIER_BLOCKS: dict[int, Blocks] = dict.fromkeys(FP8_BLOCKS, _blocks(FP8_KEYS))
BYTE_STAGES = 3


def row_bytes(head_dim: int) -> int:
    """A row of q, k, v or their gradients in shared memory."""
    return -(-head_dim // BOX) * BOX * 2
