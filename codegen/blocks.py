"""Block sizes for each architecture, data type and head dim.

Every row compiles without spills, within the shared memory of every architecture that uses it, with
triton 3.6 and 3.9, up to four context segments (or what the row says) with lengths and dense flags
(the cross-compile test walks the table); but fp32 above head dim 128 spills 168 bytes with four
segments on sm_80, up to 136 with a key mask, and 24 at head dim 128 with a key mask on sm_120.
Rows are in order of preference;
`speed` is the throughput of a row relative to the first one on full blocks, so that `select` can
weigh it against padded query rows.

Measured: 16-bit types at head dims 64 and 128 on sm_90, on an H200 with triton 3.6, 24 heads of
30x48x80 tokens in 6x8x8 tiles, 3x3x3 of them kept, all heads at once. In ms:

    TMA      d128: 128x128/8 26.2, 64x64/4 27.9, 128x64/8 29.7   d64: 64x128/4 15.9, 128x64/4 16.5
    pointer  d128: 128x64/8 29.9, 64x64/4 30.1                   d64: 64x128/4 16.8, 128x128/8 19.5

(rows x keys / warps; `python -m sta_compile bench --only "W1 333" --kernels` times these and more).
Pointer loads with 128x128/8 at d128 (28.4) and 128x64/4 at d64 (16.3) are left out: with four context
segments, a head dim that is padded or on sm_100 they spill. All other rows are compiled, not timed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.kernel_spec import Blocks, pad_head_dim


@dataclass(frozen=True)
class Choice:
    """contexts: segments beside the video at most; more of them need registers that these blocks have not left."""

    blocks: Blocks
    speed: float = 1.0
    contexts: int = 4


def _row(m: int, n: int, warps: int, stages: int, speed: float = 1.0, contexts: int = 4) -> Choice:
    return Choice(Blocks(m, n, warps, stages), speed, contexts)


# (class of architectures, padded head dim) -> choices for 16-bit types.
_HALF: dict[tuple[str, int], tuple[Choice, ...]] = {
    ("tma", 32): (_row(64, 128, 4, 3),),
    ("tma", 64): (_row(64, 128, 4, 3),),
    ("tma", 128): (_row(128, 128, 8, 3), _row(64, 64, 4, 3, 0.94)),
    ("tma", 256): (_row(128, 32, 8, 3),),
    # tcgen05 multiplies 64 rows in the time of 128, so blocks of 64 rows gain nothing.
    ("tma_tcgen05", 32): (_row(128, 128, 8, 3),),
    ("tma_tcgen05", 64): (_row(128, 128, 8, 3),),
    ("tma_tcgen05", 128): (_row(128, 128, 8, 3),),
    ("tma_tcgen05", 256): (_row(128, 32, 8, 3),),
    ("tma_small", 32): (_row(128, 64, 8, 3),),
    ("tma_small", 64): (_row(128, 64, 8, 3),),
    ("tma_small", 128): (_row(128, 32, 8, 3, contexts=2), _row(128, 16, 8, 3, 0.8)),
    ("hopper", 32): (_row(64, 128, 4, 3),),
    ("hopper", 64): (_row(64, 128, 4, 3),),
    ("hopper", 128): (_row(128, 64, 8, 4), _row(64, 64, 4, 3, 0.99)),
    ("hopper", 256): (_row(64, 32, 8, 2),),
    ("large", 32): (_row(128, 64, 8, 3),),
    ("large", 64): (_row(128, 64, 8, 3),),
    ("large", 128): (_row(128, 32, 8, 3),),
    ("large", 256): (_row(64, 32, 8, 2),),
    ("small", 32): (_row(128, 64, 8, 3),),
    ("small", 64): (_row(128, 64, 8, 2),),
    ("small", 128): (_row(128, 32, 8, 2),),
    ("small", 256): (_row(64, 32, 8, 2),),
}
# Where the masks of a padded head dim cost registers that the rows above have not left.
_PADDED: dict[tuple[str, int], tuple[Choice, ...]] = {
    ("hopper", 64): (_row(128, 128, 8, 3),),
    ("large", 64): (_row(128, 32, 8, 3),),
}
# padded head dim -> choices for fp32 on every architecture.
_SINGLE: dict[int, tuple[Choice, ...]] = {
    32: (_row(32, 32, 4, 2),),
    64: (_row(32, 32, 4, 2),),
    128: (_row(32, 32, 8, 2),),
    256: (_row(16, 16, 8, 1),),
}


# padded head dim -> choices for NVFP4. Products lie in a memory of their own on data center Blackwell, and in registers on
# workstations. Compiled, not timed.
_NVFP4: dict[tuple[str, int], tuple[Choice, ...]] = {
    ("tma_tcgen05", 64): (_row(128, 64, 8, 3),),
    ("tma_tcgen05", 128): (_row(128, 128, 8, 3),),
    ("tma_small", 64): (_row(128, 64, 8, 3),),
    ("tma_small", 128): (_row(128, 32, 8, 2),),
}


def nvfp4_choices(arch: int, head_dim: int) -> tuple[Choice, ...]:
    """As `choices`, for kernels that multiply in NVFP4."""
    return _NVFP4.get((architecture(arch, "tma"), pad_head_dim(head_dim, "nvfp4")), ())


def architecture(arch: int, loads: str) -> str:
    """Architectures that share a row: by instruction set and by shared memory."""
    if loads == "tma":
        return "tma" if arch < 100 else "tma_tcgen05" if arch < 120 else "tma_small"
    if 90 <= arch < 120:
        return "hopper"
    return "large" if arch in (80, 87) else "small"


def choices(
    arch: int, dtype: str, head_dim: int, loads: str, contexts: int = 0
) -> tuple[Choice, ...]:
    """Preferred first; empty where such loads have no row. contexts: segments beside the video."""
    padded = pad_head_dim(head_dim)
    if dtype == "fp32":
        return _SINGLE[padded]
    key = architecture(arch, loads), padded
    rows = _HALF.get(key, ()) if head_dim == padded else _PADDED.get(key, _HALF[key])
    return tuple(row for row in rows if contexts <= row.contexts)


# What else mode="max-autotune" times, where it fits the shared memory: (rows, keys, warps, stages).
_TRIED = (
    *((128, 128, 8, stages) for stages in (2, 3)),
    *((128, 64, 8, stages) for stages in (2, 3, 4)),
    (128, 32, 8, 3),
    (128, 64, 4, 3),
    *((64, 128, 4, stages) for stages in (2, 3)),
    *((64, 64, 4, stages) for stages in (2, 3, 4)),
    (64, 32, 4, 3),
)


def blocks_to_try(shared_memory: int, dtype: str, head_dim: int) -> tuple[Blocks, ...]:
    """Blocks of 16-bit types beside those of the table; they may spill, and then they are slow."""
    if dtype == "fp32":
        return ()
    row = 2 * pad_head_dim(head_dim)
    return tuple(
        Blocks(m, n, warps, stages)
        for m, n, warps, stages in _TRIED
        if (m + 2 * stages * n) * row + 1024 <= shared_memory
    )
