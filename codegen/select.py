"""Which kernels can run a problem? In order of preference, with the reason for each that can't."""

from __future__ import annotations

from functools import lru_cache

from ..ir.kernel_spec import KernelSpec
from .emitter import Emitter, Problem
from .triton_forward import TritonForward

EMITTERS: tuple[Emitter, ...] = (TritonForward("tma"), TritonForward("pointer"))


@lru_cache(maxsize=4096)
def select(problem: Problem, kernel: str) -> tuple[tuple[KernelSpec, ...], tuple[str, ...]]:
    """Kernels, preferred first, and why others refused. kernel: "auto" or an emitter's name."""
    specs: list[KernelSpec] = []
    reasons: list[str] = []
    for emitter in EMITTERS:
        if kernel not in ("auto", emitter.name):
            continue
        reason = emitter.refuse(problem)
        if reason:
            reasons.append(reason)
        else:
            specs.append(emitter.specify(problem))
    return tuple(specs), tuple(dict.fromkeys(reasons))
