"""The identity of a binary: everything that the source of one kernel depends on, and no length.

Grids, tile counts, windows, segment lengths, heads and strides are run-time integers, so that one
binary serves all videos and prompts:

    "triton forward sm90 bf16 d128 128x128 warps=8 stages=3 tma contexts=1 lengths=i32 dense"
"""

from __future__ import annotations

from dataclasses import dataclass

# Kernels count strides in units of so many elements, which tells their compiler that every row of
# q, k, v and out is aligned. Tensors of which that is not true are copied first.
STRIDE_UNIT = 8


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a kernel: `m` query rows by `n` keys, warps, pipeline stages."""

    m: int
    n: int
    warps: int
    stages: int


def pad_head_dim(head_dim: int, precision: str = "native") -> int:
    """Head dim in the kernel: the next power of two, at least 32, or 64 of which FP4 makes one product."""
    return max(64 if precision == "nvfp4" else 32, 1 << (head_dim - 1).bit_length())


@dataclass(frozen=True)
class KernelSpec:
    """emitter: "cutlass" or "triton". direction: "forward". dtype: "fp16", "bf16" or "fp32".

    loads: "tma" or "pointer". What follows is for Triton, C++ kernels take it at run time. contexts: segments beside the
    video. lengths: integer type of key_lengths, "" without. masked: with a key_mask. video_masked: with a video_mask.
    head_windows: heads have windows of their own, for every emitter. precision: "native", "fp8" for
    e4m3 products, "nvfp4" for scores in NVFP4 and outputs in e4m3, or "tiered" for native and e4m3.
    """

    emitter: str
    direction: str
    arch: int  # 10 * major + minor
    dtype: str
    head_dim: int
    blocks: Blocks
    loads: str
    contexts: int
    lengths: str
    dense: bool
    masked: bool = False
    video_masked: bool = False
    head_windows: bool = False
    precision: str = "native"

    @property
    def padded_head_dim(self) -> int:
        return pad_head_dim(self.head_dim, self.precision)

    @property
    def boxes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns, as they lie in memory, of the blocks of q, k, v that TMA loads at a time for Triton's kernels.

        Transposed 8-bit values have none: TMA reads from multiples of 16 bytes on only, and runs begin at any token.
        """
        m, n, d = self.blocks.m, self.blocks.n, self.padded_head_dim
        if self.precision == "nvfp4":
            return (m, d // 2), (n, d // 2)
        return (m, d), (n, d), (n, d)

    @property
    def choice(self) -> str:
        """What a measurement chooses of all this, as text without spaces: `parse_choice` is the inverse."""
        b = self.blocks
        return f"{self.emitter},{self.loads},{b.m},{b.n},{b.warps},{b.stages}"

    def text(self) -> str:
        m, n = self.blocks.m, self.blocks.n
        parts = [
            f"{self.emitter} {self.direction} sm{self.arch} {self.dtype} d{self.head_dim} {m}x{n}",
            f"warps={self.blocks.warps} stages={self.blocks.stages}",
            self.loads,
            f"contexts={self.contexts}" if self.emitter == "triton" else "",
            f"lengths={self.lengths}" if self.lengths else "",
            "dense" if self.dense else "",
            "masked" if self.masked else "",
            "video_masked" if self.video_masked else "",
            "head_windows" if self.head_windows else "",
            self.precision if self.precision != "native" else "",
        ]
        return " ".join(part for part in parts if part)


def parse_choice(text: str) -> tuple[str, str, Blocks]:
    """(emitter, loads, blocks). Raises ValueError for text that `KernelSpec.choice` did not write."""
    emitter, loads, *sizes = text.split(",")
    m, n, warps, stages = map(int, sizes)
    return emitter, loads, Blocks(m, n, warps, stages)
