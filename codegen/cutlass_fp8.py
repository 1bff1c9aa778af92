"""Emitters of the C++ forward kernels for Hopper (sm_90a) that multiply in e4m3: all of it, or in tiers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

from ..ir.kernel_spec import KernelSpec
from .cutlass_blocks import FP8_BLOCKS, TIER_BLOCKS
from .cutlass_forward import CAPABILITY, DTYPES, CutlassForward
from .emitter import Problem


@dataclass(frozen=True)
class CutlassFp8Forward:
    name: str = "cutlass"
    loads: str = "tma"
    precision: str = "fp8"

    def refuse(self, problem: Problem) -> str:
        p = problem
        if p.target.kind != "cuda" or p.target.capability != CAPABILITY:
            return f"the fp8 kernel is for Hopper GPUs (sm_{CAPABILITY}) only"
        if p.dtype not in DTYPES:
            return f"{p.dtype} is not one of {', '.join(DTYPES)}, which the fp8 kernel is for"
        if p.head_dim not in FP8_BLOCKS:
            known = ", ".join(map(str, FP8_BLOCKS))
            return f"head dim {p.head_dim} has no fp8 kernel, but {known} have"
        if find_spec("triton") is None:
            return "the package triton, whose kernels quantize q, k and v, is not installed"
        # Rows are copied as they are quantized, so it doesn't matter whether TMA can read them where they are.
        return CutlassForward().refuse(replace(p, boxed=True))

    def specify(self, problem: Problem) -> KernelSpec:
        """One binary for all segments, flags and masks, which are run-time parameters."""
        native = CutlassForward().specify(problem)
        return replace(native, blocks=FP8_BLOCKS[problem.head_dim], precision=self.precision)

    def candidates(self, problem: Problem) -> tuple[KernelSpec, ...]:
        return (self.specify(problem),)


@dataclass(frozen=True)
class CutlassTieredForward:
    name: str = "cutlass"
    loads: str = "tma"
    precision: str = "tiered"

    def refuse(self, problem: Problem) -> str:
        if problem.head_windows:
            return "the kernel with tiers takes one window for all heads"
        refused = CutlassFp8Forward().refuse(problem).replace("fp8 kernel", "kernel with tiers")
        return refused or ("" if problem.boxed else CutlassForward().refuse(problem))

    def specify(self, problem: Problem) -> KernelSpec:
        fp8 = CutlassFp8Forward().specify(problem)
        return replace(fp8, blocks=TIER_BLOCKS[problem.head_dim], precision=self.precision)

    def candidates(self, problem: Problem) -> tuple[KernelSpec, ...]:
        return (self.specify(problem),)
