"""Which kernels can run a problem? In order of preference, with the reason for each that can't."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..ir.kernel_spec import KernelSpec, parse_choice
from .blocks import blocks_to_try
from .cutlass_forward import CutlassForward
from .cutlass_fp8 import CutlassFp8Forward, CutlassTieredForward
from .emitter import Emitter, Problem
from .preference import order
from .triton_forward import TritonForward
from .triton_nvfp4 import TritonNvfp4

EMITTERS: tuple[Emitter, ...] = (
    CutlassFp8Forward(),
    CutlassTieredForward(),
    TritonNvfp4(),
    CutlassForward(),
    TritonForward("tma"),
    TritonForward("pointer"),
)


@lru_cache(maxsize=4096)
def select(
    problem: Problem, kernel: str, choice: str = ""
) -> tuple[tuple[KernelSpec, ...], tuple[str, ...]]:
    """Kernels, preferred first, and why others refused. kernel: "auto" or an emitter's name.

    choice: of a measurement (KernelSpec.choice); it comes first if its emitter accepts the problem. Kernels of another
    precision than "native" are not measured against it, and come before it.
    """
    able, reasons = _able(problem, kernel)
    specs = [emitter.specify(problem) for emitter in able]
    if choice:
        name, loads, blocks = parse_choice(choice)
        native = [spec for spec in specs if spec.precision == "native"]
        of_emitter = (spec for spec in native if (spec.emitter, spec.loads) == (name, loads))
        chosen = [replace(spec, blocks=blocks) for spec in of_emitter]
        specs = [*(spec for spec in specs if spec not in native), *chosen, *native]
    return tuple(dict.fromkeys(specs)), reasons


def candidates(problem: Problem, kernel: str) -> tuple[tuple[KernelSpec, ...], ...]:
    """As `select`, for lengths that are not known yet: of each emitter, all that it may choose."""
    return tuple(emitter.candidates(problem) for emitter in _able(problem, kernel)[0])


def variants(problem: Problem, kernel: str) -> tuple[KernelSpec, ...]:
    """Every kernel that a measurement may choose from, all of one precision; first what `select` puts first."""
    found: dict[KernelSpec, None] = {}
    able = _able(problem, kernel)[0]
    for emitter in (emitter for emitter in able if emitter.precision == able[0].precision):
        spec = emitter.specify(problem)
        others = emitter.candidates(problem)
        if emitter.name == "triton" and emitter.precision == "native":
            memory = problem.target.shared_memory
            tried = blocks_to_try(memory, problem.dtype, problem.head_dim)
            others = (*others, *(replace(spec, blocks=blocks) for blocks in tried))
        found.update(dict.fromkeys((spec, *others)))
    return tuple(found)


def _able(problem: Problem, kernel: str) -> tuple[tuple[Emitter, ...], tuple[str, ...]]:
    able: list[Emitter] = []
    reasons: list[str] = []
    for emitter in order(EMITTERS, problem):
        if kernel not in ("auto", emitter.name) or emitter.precision not in (
            "native",
            problem.precision,
        ):
            continue
        reason = emitter.refuse(problem)
        if reason:
            reasons.append(reason)
        else:
            able.append(emitter)
    # The last emitter takes the most, so what it refuses is what a user should hear of first.
    return tuple(able), tuple(dict.fromkeys(reversed(reasons)))
