"""What an emitter is: it accepts a problem and names the kernel for it, or says why not.

An emitter never touches tensors: the same answers are given when a model is compiled, when
`explain()` is asked about a GPU that is not there, and when the operator runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..ir.kernel_spec import Blocks, KernelSpec
from ..ir.target import Target


@dataclass(frozen=True)
class Problem:
    """One attention call as an emitter sees it.

    query_rows: (rows, how many) of the units that blocks of queries can't cross: tiles, contexts.
    contexts: segments beside the video. masked: with a key_mask. video_masked: with a video_mask.
    head_windows: heads have windows of their own.
    lengths: integer type of key_lengths ("i32", "i64"), "" without.
    key_runs: (lengths of the runs that a tile reads, how many such tiles).
    mapped: q, k, v are each one 2-D matrix. boxed: TMA can read them as they are, in 4-D (tensor_map).
    precision: "native", or "fp8", "nvfp4" or "tiered" where an emitter has it.
    """

    target: Target
    dtype: str  # "fp16", "bf16", "fp32", or torch's name of any other
    head_dim: int
    contexts: int
    lengths: str
    dense: bool
    scale: float
    query_rows: tuple[tuple[int, int], ...]
    key_runs: tuple[tuple[tuple[int, ...], int], ...] = ()
    mapped: bool = True
    boxed: bool = True
    direction: str = "forward"
    masked: bool = False
    video_masked: bool = False
    head_windows: bool = False
    precision: str = "native"

    def spec(self, emitter: Emitter, blocks: Blocks) -> KernelSpec:
        return KernelSpec(
            emitter=emitter.name,
            direction=self.direction,
            arch=self.target.capability,
            dtype=self.dtype,
            head_dim=self.head_dim,
            blocks=blocks,
            loads=emitter.loads,
            contexts=self.contexts,
            lengths=self.lengths,
            dense=self.dense,
            masked=self.masked,
            video_masked=self.video_masked,
            head_windows=self.head_windows,
        )


class Emitter(Protocol):
    """One way to make a kernel."""

    @property
    def name(self) -> str:
        """The `kernel` option that selects it; KernelSpec.emitter."""

    @property
    def loads(self) -> str:
        """KernelSpec.loads: tells emitters of one name apart."""

    @property
    def precision(self) -> str:
        """KernelSpec.precision: "native" emitters take every problem, others those that ask for theirs."""

    def refuse(self, problem: Problem) -> str:
        """Why this emitter can't run `problem`, or ""."""

    def specify(self, problem: Problem) -> KernelSpec:
        """The kernel for a problem that was not refused."""

    def candidates(self, problem: Problem) -> tuple[KernelSpec, ...]:
        """Every kernel that `specify` may choose for problems that differ from this one in their lengths."""
