"""Emitters of the Triton forward kernel: with TMA loads (sm_90 and later), and with pointers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from ..ir.kernel_spec import Blocks, KernelSpec
from .blocks import Choice, choices
from .emitter import Problem

DTYPES = ("fp16", "bf16", "fp32")
MAX_CONTEXTS = 4


@dataclass(frozen=True)
class TritonForward:
    """loads: "tma" or "pointer"."""

    loads: str
    name: str = "triton"
    precision: str = "native"

    def refuse(self, problem: Problem) -> str:
        p, target = problem, problem.target
        if target.kind != "cuda":
            return f"{target.kind} devices have no Triton kernel yet"
        if target.unsupported:
            return target.unsupported
        if find_spec("triton") is None:
            return "the package triton is not installed"
        if p.direction != "forward":
            return f"the Triton kernel has no {p.direction} direction"
        if p.dtype not in DTYPES:
            return f"{p.dtype} is not one of {', '.join(DTYPES)}"
        if not 8 <= p.head_dim <= 256 or p.head_dim % 8:
            return f"head dim {p.head_dim} is not a multiple of 8 up to 256"
        if p.contexts > MAX_CONTEXTS:
            return f"{p.contexts} segments beside the video are more than {MAX_CONTEXTS}"
        if p.scale <= 0:
            return f"scale {p.scale} is not positive"
        return self._refuse_tma(p) if self.loads == "tma" else ""

    def _refuse_tma(self, p: Problem) -> str:
        if "tma" not in p.target.features:
            return f"sm_{p.target.capability} has no TMA unit"
        if p.dtype == "fp32":
            return "fp32 blocks are too small for TMA to pay"
        if p.head_dim < 32 or p.head_dim & (p.head_dim - 1):
            return f"head dim {p.head_dim} is not a power of two from 32 on"
        if not self._choices(p):
            return f"sm_{p.target.capability} has no blocks for TMA at head dim {p.head_dim}"
        if not p.mapped:
            return "q, k or v is not one matrix with 16-byte rows"
        return ""

    def specify(self, problem: Problem) -> KernelSpec:
        return problem.spec(self, fastest(self._choices(problem), problem.query_rows))

    def candidates(self, problem: Problem) -> tuple[KernelSpec, ...]:
        return tuple(problem.spec(self, choice.blocks) for choice in self._choices(problem))

    def _choices(self, p: Problem) -> tuple[Choice, ...]:
        return choices(p.target.capability, p.dtype, p.head_dim, self.loads, p.contexts)


def fastest(table: tuple[Choice, ...], query_rows: tuple[tuple[int, int], ...]) -> Blocks:
    """The blocks that need least time for all query rows, rows that pad a block included."""

    def cost(choice: Choice) -> float:
        m = choice.blocks.m
        return sum(-(-rows // m) * m * count for rows, count in query_rows) / choice.speed

    return min(table, key=cost).blocks
