"""Which kernels can run a problem? In order of preference, with the reason for each that can't."""

from __future__ import annotations

from functools import lru_cache

from ..ir.kernel_spec import KernelSpec
from .cutlass_forward import CutlassForward
from .emitter import Emitter, Problem
from .preference import order
from .triton_forward import TritonForward

EMITTERS: tuple[Emitter, ...] = (CutlassForward(), TritonForward("tma"), TritonForward("pointer"))


@lru_cache(maxsize=4096)
def select(problem: Problem, kernel: str) -> tuple[tuple[KernelSpec, ...], tuple[str, ...]]:
    """Kernels, preferred first, and why others refused. kernel: "auto" or an emitter's name."""
    able, reasons = _able(problem, kernel)
    return tuple(emitter.specify(problem) for emitter in able), reasons


def candidates(problem: Problem, kernel: str) -> tuple[tuple[KernelSpec, ...], ...]:
    """As `select`, for lengths that are not known yet: of each emitter, all that it may choose."""
    return tuple(emitter.candidates(problem) for emitter in _able(problem, kernel)[0])


def _able(problem: Problem, kernel: str) -> tuple[tuple[Emitter, ...], tuple[str, ...]]:
    able: list[Emitter] = []
    reasons: list[str] = []
    for emitter in order(EMITTERS, problem):
        if kernel not in ("auto", emitter.name):
            continue
        reason = emitter.refuse(problem)
        if reason:
            reasons.append(reason)
        else:
            able.append(emitter)
    # The last emitter takes the most, so what it refuses is what a user should hear of first.
    return tuple(able), tuple(dict.fromkeys(reversed(reasons)))
