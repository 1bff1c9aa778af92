"""Runs an attention call: picks a kernel, builds it once, launches it.

A kernel that fails to build or to launch is never tried again in this process; the next one takes
its place and one warning names the reason. Nothing here waits for the device, and nothing is built
while a CUDA graph is being captured: `prepare` builds ahead of time, and so does any earlier call.

A call that is like an earlier one but for its memory costs a dictionary look-up and a launch, and no
check of its arguments, which would find what it found before: see `key_of` for what "like" means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..codegen.emitter import Problem
from ..codegen.select import EMITTERS, select
from ..errors import StaError
from ..ir.attention_spec import AttentionSpec
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from ..ir.trade import EXACT, Trade
from ..ir.visibility import Visibility
from .driver import current_device
from .problem import problem_of
from .runner import Start, runner_of
from .say import say
from .tensors import Tensors, flat, is_aligned

MOST_READY = 4096


class Call(NamedTuple):
    """The operator's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_lengths: Tensor | None
    dense: Tensor | None
    segments: Sequence[int]
    grid: Sequence[int]
    spec: str
    scale: float
    key_mask: Tensor | None = None
    video_mask: Tensor | None = None


# key_lengths, dense, key_mask, video_mask and shown of Tensors.
Flags = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Copies(NamedTuple):
    """Which of q, k, v and out no kernel can read or write where they are."""

    q: bool
    k: bool
    v: bool
    out: bool


@dataclass(frozen=True)
class Launch:
    """A kernel that ran once, and all that calls of one key share. rows: shape of lse, as a tuple: torch reads its own sizes
    more slowly.
    """

    spec: KernelSpec
    start: Start
    copies: Copies
    of_context: bool
    rows: tuple[int, ...]


Key = tuple[Any, ...]
_failed: dict[KernelSpec, str] = {}
_built: dict[
    tuple[KernelSpec, int], Any
] = {}  # by device index: what the runner's `build` returned
_ready: dict[Key, Launch] = {}


def key_of(call: Call) -> Key:
    """Calls of one key launch one binary with the same numbers; only addresses differ, by multiples of 16."""
    q, k, v, key_lengths, dense, segments, grid, spec, scale, key_mask, video_mask = call
    return (
        spec,
        scale,
        *segments,
        *grid,
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.data_ptr() % 16,
        k.data_ptr() % 16,
        v.data_ptr() % 16,
        None if key_lengths is None else (key_lengths.dtype, key_lengths.shape),
        None if dense is None else (dense.dtype, dense.shape),
        None if key_mask is None else (key_mask.dtype, key_mask.shape),
        None if video_mask is None else (video_mask.dtype, video_mask.shape),
    )


def launch_again(call: Call, key: Key) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a call of which one was launched before; None for others."""
    ready = _ready.get(key)
    if ready is None:
        return None
    tensors, out = _tensors(call, ready.copies, ready.of_context, ready.rows)
    try:
        on_device(ready.start, call.q.device, tensors)
    except Exception as error:
        fail(ready.spec, error)
        return None
    return _result(tensors, out)


def kernel_of(call: Call) -> str:
    """The kernel that a call like this one ran on; "reference" if none did."""
    ready = _ready.get(key_of(call))
    return "reference" if ready is None else ready.spec.text()


def attention_forward(
    call: Call, visible: Visibility, kernel: str, key: Key
) -> tuple[Tensor, Tensor] | None:
    """(out, lse), or None if the PyTorch reference has to compute this call. Its arguments have been checked.

    kernel: "auto", an emitter's name (raises StaError if it can't run) or "reference".
    """
    q = call.q
    if kernel == "reference" or (kernel == "auto" and q.device.type == "cpu") or q.numel() == 0:
        return None
    geometry, scale = visible.geometry, call.scale
    of_context = geometry.context_keys > 0
    copies = Copies(*(not is_aligned(x) for x in (*call[:3], torch.empty_like(q))))
    rows = tuple(q.shape[:3])
    tensors, out = _tensors(call, copies, of_context, rows)
    asked = AttentionSpec.parse(call.spec)
    problem = problem_of(tensors, geometry, scale, precision=asked.precision)
    specs, refusals = select(problem, kernel, asked.choice)
    for spec in specs:
        if spec not in _failed and (start := run(spec, tensors, geometry, scale, asked.trade)):
            if spec.precision != asked.precision:
                say(
                    f"precision={asked.precision!r} runs as 'native': {why_native(problem, kernel)}"
                )
            if len(_ready) >= MOST_READY:
                _ready.clear()
            _ready[key] = Launch(spec, start, copies, of_context, rows)
            return _result(tensors, out)
    failures = [_failed[spec] for spec in specs if spec in _failed]
    if len(failures) < len(specs):
        reason = "a CUDA graph is being captured and no call like this one ran before"
    else:
        reason = (*failures, *refusals)[0]
    if kernel != "auto":
        raise StaError(f"kernel={kernel!r} can't run: {reason}; pass kernel='auto'")
    if reason in failures:
        reason = "all kernels for it failed"  # a warning has named each reason
    say(f"attention runs in PyTorch operations, which is slow: {reason}")
    return None


def why_native(problem: Problem, kernel: str) -> str:
    """Why no kernel of the precision that a problem asks for runs it. kernel: the option."""
    emitter = next(each for each in EMITTERS if each.precision == problem.precision)
    if kernel not in ("auto", emitter.name):
        return f"kernel={kernel!r} has no other precision; pass kernel='auto'"
    return emitter.refuse(problem) or "its kernel failed"


def _tensors(
    call: Call, copies: Copies, of_context: bool, rows: tuple[int, ...]
) -> tuple[Tensors, Tensor]:
    """What a kernel works on, and the operator's own output, which may be another."""
    q, k, v, *_ = call
    out = torch.empty_like(q)
    lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    target = out
    if any(copies):
        dense = torch.contiguous_format
        q, k, v = (
            x.clone(memory_format=dense) if copy else x
            for x, copy in zip((q, k, v), copies, strict=False)
        )
        target = torch.empty_like(out, memory_format=dense) if copies.out else out
    return Tensors(q, k, v, target, lse, *flags_of(call, of_context)), out


def flags_of(call: Call, of_context: bool) -> Flags:
    """What says which keys count."""
    if call.key_lengths is call.dense is call.key_mask is call.video_mask is None:
        return None, None, None, None, None
    key_lengths, key_mask = (call.key_lengths, call.key_mask) if of_context else (None, None)
    video_mask = flat(call.video_mask)
    shown = None if video_mask is None else video_mask.all(1)
    return flat(key_lengths), flat(call.dense), flat(key_mask), video_mask, shown


def _result(tensors: Tensors, out: Tensor) -> tuple[Tensor, Tensor]:
    if tensors.out is not out:
        out.copy_(tensors.out)
    return out, tensors.lse


def run(
    spec: KernelSpec, tensors: Tensors, geometry: Geometry, scale: float, trade: Trade = EXACT
) -> Start | None:
    """Launches on the current stream; None if that is not possible. The result launches again."""
    binary = built(spec, tensors.q.device.index)
    if binary is None:
        return None
    try:
        start = runner_of(spec.emitter).bind(spec, binary, tensors, geometry, scale, trade)
        on_device(start, tensors.q.device, tensors)
    except Exception as error:
        fail(spec, error)
        return None
    return start


def built(spec: KernelSpec, device: int) -> Any:
    """The loaded binary; None if the kernel has failed, now or before, or can't be made ready while a graph is captured.

    It would have to be built then, or its table of windows be copied to the GPU.
    """
    made = (spec, device) in _built and not spec.head_windows
    if spec in _failed or (not made and torch.cuda.is_current_stream_capturing()):
        return None
    if (spec, device) not in _built:
        try:
            _built[spec, device] = runner_of(spec.emitter).build(spec, device)
        except Exception as error:
            fail(spec, error)
            return None
    return _built[spec, device]


def on_device(start: Start, device: torch.device, tensors: Any) -> None:
    if current_device() == device.index:
        start(tensors)
        return
    with torch.cuda.device(device):
        start(tensors)


def fail(spec: KernelSpec, error: Exception) -> None:
    """The kernel is not tried again. Says so once, with the last line of the error."""
    lines = str(error).strip().splitlines() or ["no message"]
    for key in [key for key, launch in _ready.items() if launch.spec == spec]:
        del _ready[key]
    _failed[spec] = f"kernel [{spec.text()}] failed with {type(error).__name__}: {lines[-1]}"
    say(f"{_failed[spec]}; it is not tried again. Please report this")
