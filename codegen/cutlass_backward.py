"""The C++ kernels of the backward pass on Hopper (sm_90a): which ones, in which order, or why there are none.

Two ways to dQ. Thread blocks that own keys add what they find to a float32 sum in global memory, in the order in which
they get there: five matrix products for a pair of tokens. Or a kernel whose blocks own queries computes scores and dP again:
seven products, and the same bits in every run. Head dims over 128 take the second way, and keys and values in two
kernels: registers do not hold both gradients (eight products).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..ir.kernel_spec import Blocks, KernelSpec
from .cutlass_blocks import QUERY_UNIT, WARPS_OF_A_GROUP
from .cutlass_forward import CutlassForward
from .cutlass_programs import KEY_ROWS
from .emitter import Problem

QUERIES = 64  # of a step of a thread block that owns keys
ROW_WARPS = 8
KERNELS = ("auto", "cutlass")  # values of the option `kernel` that ask for them
LARGEST_PAIR = 128  # head dim to which a thread's registers hold a row of dK and of dV


class Step(NamedTuple):
    """entry: a kernel of the spec's program."""

    spec: KernelSpec
    entry: str


def refuse(problem: Problem) -> str:
    """Why there are no C++ kernels for this backward pass, or ""."""
    return CutlassForward().refuse(replace(problem, direction="forward"))


def kernels(problem: Problem, kernel: str, deterministic: bool) -> tuple[KernelSpec, ...]:
    """What has to be built for the backward pass of a problem. kernel: the option; none where PyTorch computes it."""
    if kernel not in KERNELS or refuse(problem):
        return ()
    return tuple(dict.fromkeys(step.spec for step in plan(problem, deterministic)))


def plan(problem: Problem, deterministic: bool) -> tuple[Step, ...]:
    """The launches for a problem that was not refused, in order. deterministic: the same bits in every run."""
    if problem.head_dim > LARGEST_PAIR:
        directions: tuple[str, ...] = ("backward_k", "backward_v", "backward_q")
    else:
        directions = ("backward_kv", "backward_q") if deterministic else ("backward",)
    rows = _spec(problem, "backward_rows")
    steps = [Step(rows, "sta_row_statistics")]
    for direction in directions:
        entry = "sta_query_gradients" if direction == "backward_q" else "sta_key_gradients"
        steps.append(Step(_spec(problem, direction), entry))
    if adds(tuple(steps)):
        steps.append(Step(rows, "sta_convert_sum"))
    return tuple(steps)


def adds(steps: tuple[Step, ...]) -> bool:
    """Do the launches add to a sum of dQ in global memory, which starts as zeros?"""
    return any(step.spec.direction == "backward" for step in steps)


def _spec(problem: Problem, direction: str) -> KernelSpec:
    """Segments, flags and masks are run-time parameters."""
    return KernelSpec(
        emitter="cutlass",
        direction=direction,
        arch=problem.target.capability,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        blocks=blocks_of(direction, problem.head_dim),
        loads="tma",
        contexts=0,
        lengths="",
        dense=False,
        head_windows=problem.head_windows and direction != "backward_rows",
    )


def blocks_of(direction: str, head_dim: int) -> Blocks:
    """m: query rows. n: keys."""
    stages = 2 if head_dim <= 192 else 1  # of shared memory
    if direction == "backward_rows":
        lanes = 8 if head_dim <= 64 else 16 if head_dim <= 128 else 32  # that share a row
        return Blocks(32 * ROW_WARPS // lanes, 0, ROW_WARPS, 0)
    if direction == "backward_q":
        warpgroups = 3 if head_dim <= LARGEST_PAIR else 2
        return Blocks(QUERY_UNIT * warpgroups, 64, WARPS_OF_A_GROUP * (warpgroups + 1), stages)
    warpgroups = 3 if direction == "backward" else 2
    return Blocks(QUERIES, KEY_ROWS, WARPS_OF_A_GROUP * (warpgroups + 1), stages)
