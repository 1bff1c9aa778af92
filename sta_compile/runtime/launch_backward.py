"""Runs the backward pass of an attention call: as launches of C++ kernels, where there are any for it.

Kernels that fail are not tried again, as in `launch`; the PyTorch reference then computes the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..codegen import cutlass_backward
from ..codegen.cutlass_programs import PART
from ..ir.geometry import Geometry
from ..ir.visibility import Visibility
from .cutlass_runner import CutlassRunner
from .launch import MOST_READY, Call, Flags, built, fail, flags_of, key_of, on_device
from .problem import problem_of
from .runner import Start
from .say import say
from .tensors import GradientTensors, Tensors, boxed, is_aligned

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """steps: launches with their kernels. adds: dQ is a sum in global memory first."""

    steps: tuple[tuple[cutlass_backward.Step, Start], ...]
    adds: bool


_ready: dict[tuple[Any, ...], Plan] = {}


def kernels_of(call: Call) -> str:
    """The kernels that computed the gradients of a call like this one, in order; "reference" if none did."""
    key = key_of(call)
    plans = [plan for name, plan in _ready.items() if name[-len(key) :] == key]
    specs = [step.spec.text() for step, _ in plans[-1].steps] if plans else ["reference"]
    return "; ".join(specs)


def attention_backward(
    call: Call, visible: Visibility, kernel: str, out: Tensor, lse: Tensor, dout: Tensor
) -> Gradients | None:
    """(dq, dk, dv) like q, k, v, or None if the PyTorch reference has to compute them. Arguments have been checked.

    out, lse: of the forward pass; dout: of out's shape, any strides. The same bits in every run if torch asks for
    deterministic algorithms, else but for the order in which dQ is summed in float32.
    """
    if kernel == "reference" or call.q.device.type != "cuda" or call.q.numel() == 0:
        return None
    q, k, v, out, dout = (_readable(x) for x in (call.q, call.k, call.v, out, dout))
    call = call._replace(q=q, k=k, v=v)
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = (deterministic, out.stride(), dout.stride(), *key_of(call))
    plan = _ready.get(key)
    geometry = visible.geometry
    of_context = geometry.context_keys > 0
    flags = flags_of(call, of_context)
    if plan is None:
        problem = problem_of(Tensors(q, k, v, out, lse, *flags), geometry, call.scale)
        reason = cutlass_backward.refuse(problem)
        if kernel not in cutlass_backward.KERNELS:
            reason = f"kernel={kernel!r} has no backward pass; pass kernel='auto'"
        if reason:
            say(
                f"the backward pass of attention runs in PyTorch operations, which is slow: {reason}"
            )
            return None
        steps = cutlass_backward.plan(problem, deterministic)
        tensors = _tensors(call, out, lse, dout, flags, cutlass_backward.adds(steps))
        plan = _bind(steps, tensors, geometry, call.scale)
        if plan is None:
            return None
        if len(_ready) >= MOST_READY:
            _ready.clear()
        _ready[key] = plan
    else:
        tensors = _tensors(call, out, lse, dout, flags, plan.adds)
    for step, start in plan.steps:
        try:
            on_device(start, tensors.q.device, tensors)
        except Exception as error:
            fail(step.spec, error)
            del _ready[key]
            return None
    return tensors.dq, tensors.dk, tensors.dv


def _readable(x: Tensor) -> Tensor:
    """x, or a copy that the TMA unit can read."""
    if is_aligned(x) and boxed(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _tensors(
    call: Call, out: Tensor, lse: Tensor, dout: Tensor, flags: Flags, adds: bool
) -> GradientTensors:
    q, k, v, *_ = call
    batch, heads, queries, head_dim = q.shape
    rows, parts = batch * heads * queries, -(-head_dim // PART)
    return GradientTensors(
        q,
        k,
        v,
        out,
        lse,
        dout,
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
        q.new_empty((rows + 1, 2), dtype=torch.float32),
        q.new_zeros((parts, rows, PART), dtype=torch.float32) if adds else None,
        *flags,
    )


def _bind(
    steps: tuple[cutlass_backward.Step, ...],
    tensors: GradientTensors,
    geometry: Geometry,
    scale: float,
) -> Plan | None:
    runner, device = CutlassRunner(), tensors.q.device.index
    bound = []
    for step in steps:
        binary = built(step.spec, device)
        if binary is None:
            return None
        start = runner.bind_gradients(step.spec, binary, step.entry, tensors, geometry, scale)
        bound.append((step, start))
    return Plan(tuple(bound), cutlass_backward.adds(steps))
