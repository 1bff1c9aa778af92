"""Block sizes of the C++ kernel on Hopper, for each head dim.

A block is 64 query rows for each consumer warpgroup, and `n` keys: any multiple of 16. In shared memory a row takes
whole boxes of 64 elements, so head dims 72 to 128 share rows, and the registers of a consumer hold scores (n / 2),
weights (n / 4) and the output (head_dim / 2). Every row compiles without spills (the cross-compile test walks the table).

`speed` is the throughput on full blocks relative to the first row; what a run leaves over a multiple of `n` is computed
in masked blocks of 16-key groups.
"""

from __future__ import annotations

from ..ir.kernel_spec import Blocks
from .blocks import Choice

QUERY_UNIT = 64
GROUP = 16
BOX = 64
WARPS_OF_A_GROUP = 4
# Alignment of the buffers to 1 KiB, and barriers and masks of the tail blocks.
SHARED_EXTRA = 1024 + 1024
# Throughput of tail blocks: nothing overlaps their products.
TAIL_SPEED = 0.6


def _row(n: int, speed: float = 1.0, groups: int = 2, stages: int = 2) -> Choice:
    return Choice(Blocks(QUERY_UNIT * groups, n, WARPS_OF_A_GROUP * (groups + 1), stages), speed)


_ONE_BOX = (_row(192), _row(176, 0.99), _row(144, 0.97), _row(128, 0.96))
_TWO_BOXES = (_row(192), _row(176, 0.99), _row(144, 0.97), _row(128, 0.96))
_THREE_BOXES = (_row(112), _row(96, 0.97), _row(80, 0.93))
_FOUR_BOXES = (_row(80), _row(64, 0.94))
CHOICES: dict[int, tuple[Choice, ...]] = {
    64: _ONE_BOX,
    **dict.fromkeys((72, 80, 96, 112, 120, 128), _TWO_BOXES),
    **dict.fromkeys((160, 192), _THREE_BOXES),
    256: _FOUR_BOXES,
}


def shared_bytes(head_dim: int, blocks: Blocks) -> int:
    """Dynamic shared memory of a block: query rows, and stages of keys and of values."""
    row = -(-head_dim // BOX) * BOX * 2
    return (blocks.m + 2 * blocks.stages * blocks.n) * row + SHARED_EXTRA


def fastest(table: tuple[Choice, ...], key_runs: tuple[tuple[tuple[int, ...], int], ...]) -> Blocks:
    """The blocks that need least time for the runs of all tiles."""

    def cost(choice: Choice) -> float:
        n = choice.blocks.n
        blocks = 0.0
        for lengths, count in key_runs:
            groups = sum(-(-(length % n) // GROUP) for length in lengths)
            tails = -(-groups // (n // GROUP))
            blocks += count * (sum(length // n for length in lengths) + tails / TAIL_SPEED)
        return blocks * n / choice.speed

    return min(table, key=cost).blocks
