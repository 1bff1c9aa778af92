"""Block sizes for each architecture, data type and head dim: measured or compiled, never guessed.

Every row compiles without spills within the shared memory of its architecture (the cross-compile
test walks the table). Rows are in order of preference; `speed` is the throughput of a row relative
to the first one on full blocks, so that `select` can weigh it against padded query rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.kernel_spec import Blocks


@dataclass(frozen=True)
class Choice:
    blocks: Blocks
    speed: float = 1.0


def _row(m: int, n: int, warps: int, stages: int, speed: float = 1.0) -> Choice:
    return Choice(Blocks(m, n, warps, stages), speed)


# (class of architectures, padded head dim) -> choices for 16-bit types.
_HALF: dict[tuple[str, int], tuple[Choice, ...]] = {
    ("tma", 32): (_row(128, 128, 8, 3), _row(64, 128, 4, 3, 0.8)),
    ("tma", 64): (_row(128, 128, 8, 3), _row(64, 128, 4, 3, 0.8)),
    ("tma", 128): (_row(128, 128, 8, 3), _row(64, 64, 4, 3, 0.8)),
    ("tma", 256): (_row(128, 32, 8, 3),),
    ("hopper", 32): (_row(64, 64, 4, 3),),
    ("hopper", 64): (_row(128, 64, 8, 3),),
    ("hopper", 128): (_row(128, 64, 8, 3),),
    ("hopper", 256): (_row(64, 64, 8, 2),),
    ("large", 32): (_row(128, 64, 8, 3),),
    ("large", 64): (_row(128, 64, 8, 3),),
    ("large", 128): (_row(128, 32, 8, 3),),
    ("large", 256): (_row(64, 32, 8, 2),),
    ("small", 32): (_row(128, 64, 8, 3),),
    ("small", 64): (_row(128, 64, 8, 2),),
    ("small", 128): (_row(128, 32, 8, 2),),
    ("small", 256): (_row(64, 32, 8, 2),),
}
# padded head dim -> choices for fp32 on every architecture.
_SINGLE: dict[int, tuple[Choice, ...]] = {
    32: (_row(32, 32, 4, 2),),
    64: (_row(32, 32, 4, 2),),
    128: (_row(32, 32, 8, 2),),
    256: (_row(16, 16, 8, 1),),
}


def architecture(arch: int, loads: str) -> str:
    """Architectures that share a row: by instruction set and by shared memory."""
    if 90 <= arch < 120:
        return "tma" if loads == "tma" else "hopper"
    return "large" if arch in (80, 87) else "small"


def choices(arch: int, dtype: str, padded_head_dim: int, loads: str) -> tuple[Choice, ...]:
    """Preferred first."""
    if dtype == "fp32":
        return _SINGLE[padded_head_dim]
    return _HALF[architecture(arch, loads), padded_head_dim]
