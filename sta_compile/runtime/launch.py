"""Runs an attention call: picks a kernel, builds it once, launches it.

A kernel that fails to build or to launch is never tried again in this process; the next one takes
its place and one warning names the reason. Nothing here waits for the device, and nothing is built
while a CUDA graph is being captured: `prepare` builds ahead of time, and so does any earlier call.

A call that is like an earlier one but for its memory costs a dictionary look-up and a launch: see
`_key` for what "like" means.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..codegen.emitter import Problem
from ..codegen.select import select
from ..errors import StaError
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from ..ir.tiling import Tiling
from ..ir.visibility import Visibility
from .bind import Binding, bind, is_aligned, map_of
from .target import detect

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
LENGTHS = {torch.int32: "i32", torch.int64: "i64"}
Maybe = Tensor | None
# key_lengths, dense, key_mask, video_mask, shown (see Binding.arguments)
Extra = tuple[Maybe, Maybe, Maybe, Maybe, Maybe]
# q, k, v, out, lse, and those
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Maybe, Maybe, Maybe, Maybe, Maybe]

MOST_READY = 4096


@dataclass(frozen=True)
class Launch:
    """A kernel that ran once and all of its arguments but the tensors.

    start: takes the kernel's arguments in order, on the current device and stream.
    """

    spec: KernelSpec
    binding: Binding
    start: Callable[..., Any]
    constants: tuple[Any, ...]

    def __call__(self, tensors: Tensors) -> None:
        device = tensors[0].device
        if torch.cuda.current_device() == device.index:
            self.start(*self.binding.arguments(*tensors), *self.constants)
            return
        with torch.cuda.device(device):
            self.start(*self.binding.arguments(*tensors), *self.constants)


_failed: dict[KernelSpec, str] = {}
_built: set[tuple[KernelSpec, int]] = set()  # and the device index
_ready: dict[tuple[Any, ...], Launch] = {}
_said: set[str] = set()


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visibility,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor] | None:
    """(out, lse), or None if the PyTorch reference has to compute this call.

    kernel: "auto", "triton" (raises StaError if it can't run) or "reference".
    """
    if kernel == "reference" or (kernel == "auto" and q.device.type == "cpu") or q.numel() == 0:
        return None
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    rows = torch.contiguous_format
    q, k, v = (x if is_aligned(x) else x.clone(memory_format=rows) for x in (q, k, v))
    target = out if is_aligned(out) else torch.empty_like(out, memory_format=rows)
    of_context = visible.geometry.context_keys > 0
    lengths, dense, key_mask, video_mask = (
        None if x is None else x.contiguous()
        for x in (
            visible.key_lengths if of_context else None,
            visible.dense,
            visible.key_mask if of_context else None,
            visible.video_mask,
        )
    )
    shown = None if video_mask is None else video_mask.all(1)
    tensors = q, k, v, target, lse, lengths, dense, key_mask, video_mask, shown
    if not _launched(tensors, visible.geometry, scale, kernel):
        return None
    if target is not out:
        out.copy_(target)
    return out, lse


def _launched(tensors: Tensors, geometry: Geometry, scale: float, kernel: str) -> bool:
    """Runs the best kernel that works. If none does, warns or raises with the reason."""
    key = _key(tensors, geometry, scale, kernel)
    ready = _ready.get(key)
    if ready is not None and _again(ready, tensors):
        return True
    problem = _problem(*tensors[:3], *tensors[5:], geometry, scale)
    specs, refusals = select(problem, kernel)
    for spec in specs:
        if spec not in _failed and (first := _run(spec, tensors, geometry, scale)):
            if len(_ready) >= MOST_READY:
                _ready.clear()
            _ready[key] = first
            return True
    failures = [_failed[spec] for spec in specs if spec in _failed]
    if len(failures) < len(specs):
        reason = "a CUDA graph is being captured and no kernel is built yet"
    else:
        reason = (*failures, *refusals)[0]
    if kernel != "auto":
        raise StaError(f"kernel={kernel!r} can't run: {reason}; pass kernel='auto'")
    if reason in failures:
        reason = "all kernels for it failed"  # a warning has named each reason
    _say(f"attention runs in PyTorch operations, which is slow: {reason}")
    return False


def _key(tensors: Tensors, geometry: Geometry, scale: float, kernel: str) -> tuple[Any, ...]:
    """Calls of one key launch one binary with the same numbers; only addresses differ.

    Triton makes other binaries for pointers that are no multiples of 16, hence the remainders.
    """
    q, k, v, out, _, key_lengths, dense, key_mask, video_mask, _ = tensors
    return (
        geometry,
        scale,
        kernel,
        q.dtype,
        q.device,
        q.shape,
        k.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        out.stride(),
        None if key_lengths is None else key_lengths.dtype,
        dense is None,
        key_mask is None,
        video_mask is None,
        *[x.data_ptr() % 16 for x in tensors if x is not None],
    )


def prepare(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    keys: int,
    dtype: torch.dtype,
    device: torch.device,
    geometry: Geometry | None,
    contexts: int,
    *,
    token_major: bool = True,
    lengths: torch.dtype | None = None,
    dense: bool = False,
    masked: bool = False,
    video_masked: bool = False,
    scale: float = 1.0,
    kernel: str = "auto",
) -> tuple[str, ...]:
    """Builds what calls on tensors [batch, heads, tokens, head_dim] will launch; texts of the kernels.

    keys: tokens of k and v. geometry: None for a grid that is not known yet: builds every block size that may be chosen.
    token_major: memory is [batch, tokens, heads, head_dim]. Failures are kept and reported as for
    a call, so that a model never fails to compile because a kernel does.
    """
    batch, heads, queries, head_dim = shape
    if device.type != "cuda" or kernel == "reference":
        return ()

    def empty(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=kind, device="meta")

    def vectors(count: int, tokens: int) -> Tensor:
        if token_major:
            return empty(batch, tokens, count, head_dim).transpose(1, 2)
        return empty(batch, count, tokens, head_dim)

    q, k = vectors(heads, queries), vectors(kv_heads, keys)
    counts = None if lengths is None else empty(batch, contexts, kind=lengths)
    flags = empty(batch, kind=torch.bool) if dense else None
    mask = empty(batch, keys, kind=torch.bool) if masked else None
    video_mask = empty(batch, keys, kind=torch.bool) if video_masked else None
    shown = empty(batch, kind=torch.bool) if video_masked else None
    rows = [((n, 1),) for n in (64, 128)] if geometry is None else [_query_rows(geometry)]
    stand_in = geometry or _one_tile(keys, contexts)
    extra = counts, flags, mask, video_mask, shown
    built: dict[str, None] = {}
    for query_rows in rows:
        problem = _problem(q, k, k, *extra, stand_in, scale, device, query_rows)
        for spec in select(problem, kernel)[0]:
            if spec in _failed or _build(spec, q, k, extra, stand_in, scale, device):
                built[spec.text()] = None
                break
    return tuple(built)


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    dense: Tensor | None,
    key_mask: Tensor | None,
    video_mask: Tensor | None,
    shown: Tensor | None,
    geometry: Geometry,
    scale: float,
    device: torch.device | None = None,
    query_rows: tuple[tuple[int, int], ...] | None = None,
) -> Problem:
    return Problem(
        target=detect(device or q.device),
        dtype=DTYPES.get(q.dtype, str(q.dtype)),
        head_dim=q.shape[3],
        contexts=len(geometry.contexts),
        lengths="" if key_lengths is None else LENGTHS.get(key_lengths.dtype, "i64"),
        dense=dense is not None,
        masked=key_mask is not None,
        video_masked=video_mask is not None,
        scale=scale,
        query_rows=query_rows or _query_rows(geometry),
        mapped=all(map_of(x) is not None for x in (q, k, v)),
    )


@lru_cache(maxsize=4096)
def _query_rows(geometry: Geometry) -> tuple[tuple[int, int], ...]:
    """(rows, how many units) of tiles, by size class, and contexts."""
    tiling = geometry.tiling
    sizes = [Counter(tiling.sizes(axis)) for axis in range(3)]
    units: Counter[int] = Counter()
    for (t, a), (h, b), (w, c) in product(*(axis.items() for axis in sizes)):
        units[t * h * w] += a * b * c
    for _, length in geometry.context_queries:
        units[length] += 1
    return tuple(units.items())


def _run(spec: KernelSpec, tensors: Tensors, geometry: Geometry, scale: float) -> Launch | None:
    """Launches on the current stream; None if that is not possible."""
    device = tensors[0].device.index
    if (spec, device) not in _built and torch.cuda.is_current_stream_capturing():
        return None
    try:
        binding = bind(spec, *tensors[:4], geometry, scale)
        kernel, constants, options = _kernel(spec)
        with torch.cuda.device(device):
            grid = (binding.programs, 1, 1)
            compiled = kernel[grid](*binding.arguments(*tensors), *constants, **options)
    except Exception as error:
        _fail(spec, error)
        return None
    _built.add((spec, device))
    return Launch(spec, binding, compiled[grid], constants)


def _again(launch: Launch, tensors: Tensors) -> bool:
    try:
        launch(tensors)
    except Exception as error:
        _fail(launch.spec, error)
        return False
    return True


def _build(
    spec: KernelSpec,
    q: Tensor,
    k: Tensor,
    extra: Extra,
    geometry: Geometry,
    scale: float,
    device: torch.device,
) -> bool:
    """Compiles and loads without a launch; the arguments are meta tensors."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if (spec, index) in _built:
        return True
    try:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
        values = bind(spec, q, k, k, q, geometry, scale).arguments(q, k, k, q, lse, *extra)
        kernel, constants, options = _kernel(spec)
        with torch.cuda.device(index):
            kernel.warmup(*values, *constants, grid=(1,), **options)._init_handles()
    except Exception as error:
        _fail(spec, error)
        return False
    _built.add((spec, index))
    return True


@lru_cache(maxsize=256)
def _kernel(spec: KernelSpec) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function, its constants in order, and how to compile it."""
    from ..codegen.triton import build, forward

    constants = tuple(build.constants(spec).values())
    return forward.attention_forward, constants, build.options(spec)


def _one_tile(tokens: int, contexts: int) -> Geometry:
    from ..ir.window import Window

    one = (1, 1, 1)
    roles = ("video", *("context",) * contexts)
    return Geometry((tokens, *(0,) * contexts), roles, Tiling((1, 1, tokens), one), Window(one))


def _fail(spec: KernelSpec, error: Exception) -> None:
    lines = str(error).strip().splitlines() or ["no message"]
    for key in [key for key, launch in _ready.items() if launch.spec == spec]:
        del _ready[key]
    _failed[spec] = f"kernel [{spec.text()}] failed with {type(error).__name__}: {lines[-1]}"
    _say(f"{_failed[spec]}; it is not tried again. Please report this")


def _say(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(f"sta: {message}", RuntimeWarning, stacklevel=4)
