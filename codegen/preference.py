"""Which emitter does kernel="auto" try first? A table, so that a choice does not depend on the machine or the day.

Rows: (capability, head dim) -> the least number of keys of an average run from which the C++ kernel is ahead. Its blocks
are larger than Triton's, so short runs leave more of them half empty. Where there is no row the order is that of
`select.EMITTERS`, of which those that refuse drop out.
"""

from __future__ import annotations

from .cutlass_blocks import BLOCKS
from .cutlass_forward import CAPABILITY
from .emitter import Emitter, Problem

CUTLASS_FROM: dict[tuple[int, int], int] = dict.fromkeys(
    ((CAPABILITY, head_dim) for head_dim in BLOCKS), 64
)


def order(emitters: tuple[Emitter, ...], problem: Problem) -> tuple[Emitter, ...]:
    """The emitters as "auto" tries them; those of a precision that was asked for come first."""
    least = CUTLASS_FROM.get((problem.target.capability, problem.head_dim))
    if least is None or average_run(problem) >= least:
        return emitters
    return tuple(sorted(emitters, key=_is_native_cutlass))


def _is_native_cutlass(emitter: Emitter) -> bool:
    return emitter.name == "cutlass" and emitter.precision == "native"


def average_run(problem: Problem) -> float:
    """Keys of a run, on average; infinite where runs are not known yet."""
    keys = sum(sum(lengths) * count for lengths, count in problem.key_runs)
    runs = sum(len(lengths) * count for lengths, count in problem.key_runs)
    return keys / runs if runs else float("inf")
