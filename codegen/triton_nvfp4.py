"""Emitter of the Triton forward kernel for Blackwell that multiplies q and k in NVFP4, and weights and v in e4m3."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.kernel_spec import KernelSpec
from .blocks import nvfp4_choices
from .emitter import Problem
from .triton_forward import DTYPES, TritonForward, fastest

LARGEST = 128  # head dim


@dataclass(frozen=True)
class TritonNvfp4:
    name: str = "triton"
    loads: str = "tma"
    precision: str = "nvfp4"

    def refuse(self, problem: Problem) -> str:
        p, target = problem, problem.target
        if target.kind == "cuda" and not target.unsupported and "fp4" not in target.features:
            has_fp8 = target.capability == 90
            hint = (
                "pass precision='fp8'" if has_fp8 else "it needs a Blackwell GPU (sm_100 or later)"
            )
            return f"sm_{target.capability} has no FP4 products; {hint}"
        if p.dtype == "fp32":
            return f"fp32 is not one of {', '.join(DTYPES[:2])}, which the nvfp4 kernel is for"
        if p.head_dim > LARGEST:
            return f"head dim {p.head_dim} is over {LARGEST}, the largest of the nvfp4 kernel"
        return TritonForward("pointer").refuse(p)

    def specify(self, problem: Problem) -> KernelSpec:
        blocks = fastest(
            nvfp4_choices(problem.target.capability, problem.head_dim), problem.query_rows
        )
        return replace(problem.spec(self, blocks), precision=self.precision)

    def candidates(self, problem: Problem) -> tuple[KernelSpec, ...]:
        rows = nvfp4_choices(problem.target.capability, problem.head_dim)
        return tuple(
            replace(problem.spec(self, row.blocks), precision=self.precision) for row in rows
        )
