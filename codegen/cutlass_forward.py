"""Emitter of the C++ forward kernel for Hopper (sm_90a), on CUTLASS headers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.kernel_spec import KernelSpec
from .cutlass_blocks import BLOCKS
from .cutlass_layout import CONTEXTS
from .emitter import Problem
from .toolchain import missing

DTYPES = ("bf16", "fp16")
CAPABILITY = 90  # sm_90a is for this one alone: code for it does not run on later GPUs


@dataclass(frozen=True)
class CutlassForward:
    name: str = "cutlass"
    loads: str = "tma"
    precision: str = "native"

    def refuse(self, problem: Problem) -> str:
        p, target = problem, problem.target
        if target.kind != "cuda":
            return f"{target.kind} devices have no CUDA C++ kernel"
        if target.capability != CAPABILITY:
            return f"the CUDA C++ kernel is for sm_{CAPABILITY}a and not for sm_{target.capability}"
        if p.direction != "forward":
            return f"the CUDA C++ kernel has no {p.direction} direction"
        if p.dtype not in DTYPES:
            return f"{p.dtype} is not one of {', '.join(DTYPES)}, which the CUDA C++ kernel is for"
        if p.head_dim not in BLOCKS:
            return f"head dim {p.head_dim} is not in the CUDA C++ kernel's table of blocks"
        if p.scale <= 0:
            return f"scale {p.scale} is not positive"
        if not p.boxed:
            return "TMA can't read q, k or v as they are: strides or addresses are not of 16 bytes"
        if p.contexts > CONTEXTS:
            return f"more than {CONTEXTS} segments beside the video"
        return missing()

    def specify(self, problem: Problem) -> KernelSpec:
        """One binary for all segments, flags and masks, which are run-time parameters."""
        spec = problem.spec(self, BLOCKS[problem.head_dim])
        return replace(spec, contexts=0, lengths="", dense=False, masked=False, video_masked=False)

    def candidates(self, problem: Problem) -> tuple[KernelSpec, ...]:
        return (self.specify(problem),)
