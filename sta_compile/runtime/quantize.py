"""Launches the kernels that write q, k, v in e4m3, with their scales: what C++ kernels of precision "fp8" read.

What every kernel that quantizes needs before it is here too: which keys count, their mean, their largest magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ir.geometry import Geometry
from ..ir.kernel_spec import STRIDE_UNIT, KernelSpec, pad_head_dim
from ..ir.visibility import Visibility
from ..tiers.formats import E4M3_MAX
from .tensors import QuantizedTensors, Tensors, stand_ins

# Measured on an H200 with 24 heads of 30x48x80 tokens of 128, among blocks of 16 to 128 rows and 4 to 16 warps.
BLOCK, KEYS = 32, 64  # rows of q, and of k or v, that a program quantizes
CHUNK, CHUNK_BLOCK = 1024, 16  # keys whose statistics a program takes, and how many at a time
CHUNKS = 32  # that are added up at a time
ALIGNMENT = 16  # tokens of k, and bytes of a column of v
WARPS = 4


@dataclass(frozen=True)
class Launch:
    """kernel: of Triton."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


def quantized(
    tensors: Tensors,
    geometry: Geometry,
    scale: float,
    interpreted: bool = False,
    sources: Tensor | None = None,
) -> QuantizedTensors:
    """Of tensors that kernels can read (`is_aligned`). scale: of the scores. interpreted: by Triton's interpreter.

    sources: int32 [sixteens, 2], keys (first, how many) of each sixteen of k and v; None: all, in their order.
    """
    made = empty(tensors, sixteens_of(sources))
    mean = empty_mean(tensors, pad_head_dim(tensors.q.shape[3]))
    shown = shown_of(tensors, geometry)
    start(_launches(tensors, shown, sources, made, mean, scale, interpreted))
    return made


def start(launches: tuple[Launch, ...]) -> None:
    """In a row, on the current stream."""
    for each in launches:
        each.kernel[each.grid](*each.arguments, num_warps=WARPS)


def warm_up(spec: KernelSpec, device: int) -> None:
    """Compiles and loads the kernels that calls of a spec need, with and without hidden keys; launches nothing."""
    tensors = stand_ins(replace(spec, contexts=1))
    made, mean = empty(tensors), empty_mean(tensors, pad_head_dim(spec.head_dim))
    load(lambda shown: _launches(tensors, shown, None, made, mean, 1.0, False), tensors, device)


def load(
    launches: Callable[[Tensor | None], tuple[Launch, ...]], tensors: Tensors, device: int
) -> None:
    """Compiles and loads what may be started. launches: with and without a tensor of `shown_keys`."""
    batch, _, keys, _ = tensors.k.shape
    with torch.cuda.device(device):
        for shown in (None, torch.empty(batch, keys, dtype=torch.bool, device="meta")):
            for each in launches(shown):
                compiled = each.kernel.warmup(*each.arguments, grid=(1,), num_warps=WARPS)
                compiled._init_handles()


def sixteens_of(sources: Tensor | None) -> int | None:
    return None if sources is None else len(sources)


def empty(
    tensors: Tensors, sixteens: int | None = None, device: str | torch.device | None = None
) -> QuantizedTensors:
    """Memory for what is quantized; beside it out, lse and flags as they are. sixteens: of k and v, None for all keys."""
    q, k, _, out, lse, *flags = tensors
    batch, heads, queries, head_dim = q.shape
    kv_heads, tokens = k.shape[1:3]
    if sixteens is not None:
        tokens = sixteens * ALIGNMENT
    columns = -(-tokens // ALIGNMENT) * ALIGNMENT

    def make(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device or q.device)

    return QuantizedTensors(
        make(*q.shape, dtype=torch.uint8),
        make(batch, kv_heads, columns, head_dim, dtype=torch.uint8),
        make(batch, kv_heads, head_dim, columns, dtype=torch.uint8)[..., :tokens],
        out,
        lse,
        make(batch, heads, queries),
        make(batch, kv_heads),
        make(batch, kv_heads, head_dim),
        make(batch, heads, queries),
        *flags,
    )


def empty_mean(tensors: Tensors, columns: int) -> Tensor:
    """float32 [batch * key heads, columns]: what is taken off the keys. columns: the padded head_dim."""
    batch, kv_heads = tensors.k.shape[:2]
    return torch.empty((batch * kv_heads, columns), dtype=torch.float32, device=tensors.k.device)


def shown_of(tensors: Tensors, geometry: Geometry) -> Tensor | None:
    """As `shown_keys`, by the flags of a call."""
    masks = tensors.key_lengths, tensors.key_mask, None, tensors.video_mask
    return shown_keys(Visibility(geometry, *masks), tensors.k)


def shown_keys(visible: Visibility, k: Tensor) -> Tensor | None:
    """bool [batch, keys]: which keys a query may see at all; None if all. k: [batch, heads, keys, head_dim]"""
    geometry, lengths, mask = visible.geometry, visible.key_lengths, visible.key_mask
    video = visible.video_mask
    if lengths is None and mask is None and video is None:
        return None
    shown = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    column = 0
    for index, (start, length) in enumerate(geometry.contexts):
        part = shown[:, start : start + length]
        if lengths is not None:
            part &= torch.arange(length, device=k.device) < lengths[:, index, None]
        if mask is not None:
            part &= mask[:, column : column + length]
        column += length
    if video is not None:
        shown[:, geometry.video_key : geometry.video_key + geometry.tiling.tokens] &= video
    return shown


def statistics(
    tensors: Tensors,
    shown: Tensor | None,
    mean: Tensor,
    scales: tuple[Tensor, Tensor],
    k_largest: float,
) -> tuple[Launch, Launch]:
    """Writes the mean of k and the scales of k and v. k_largest: what k's largest magnitude becomes."""
    from ..codegen.triton import quantize as kernels

    _, k, v, *_ = tensors
    kv_heads, tokens, head_dim = k.shape[1:]
    samples, padded = mean.shape
    chunks = -(-tokens // CHUNK)
    partial = mean.new_empty((samples, chunks, kernels.STATISTICS, padded))
    count = None if shown is None else shown.sum(1, dtype=torch.int32)
    of_k, of_v = strides(k), strides(v)
    return (
        Launch(
            kernels.key_statistics,
            (chunks, samples),
            (
                *(k, v, flags_of(shown), partial, kv_heads, *of_k, *of_v, tokens, chunks),
                *(head_dim, padded, CHUNK_BLOCK, CHUNK, STRIDE_UNIT),
            ),
        ),
        Launch(
            kernels.key_scales,
            (samples,),
            (
                *(partial, count, mean, *scales, kv_heads, tokens, chunks),
                *(head_dim, padded, CHUNKS, k_largest),
            ),
        ),
    )


def strides(x: Tensor) -> list[int]:
    """Of samples, heads and tokens, as kernels count them."""
    return [s // STRIDE_UNIT for s in x.stride()[:3]]


def flags_of(shown: Tensor | None) -> Tensor | None:
    """Bytes of a tensor of `shown_keys`."""
    return None if shown is None else shown.view(torch.uint8)


def _launches(
    tensors: Tensors,
    shown: Tensor | None,
    sources: Tensor | None,
    made: QuantizedTensors,
    mean: Tensor,
    scale: float,
    interpreted: bool,
) -> tuple[Launch, ...]:
    from ..codegen.triton import quantize as kernels

    q, k, v, *_ = tensors
    batch, heads, queries, head_dim = q.shape
    kv_heads, tokens = k.shape[1:3]
    samples, padded = mean.shape
    blocks, key_blocks = -(-queries // BLOCK), -(-made.k.shape[2] // KEYS)
    of_q, of_k, of_v = strides(q), strides(k), strides(v)
    scales = made.k_scale, made.v_scale
    return (
        *statistics(tensors, shown, mean, scales, E4M3_MAX),
        Launch(
            kernels.quantize,
            (batch * heads * blocks + 2 * samples * key_blocks,),
            (
                *(q, k, v, flags_of(shown), sources, mean, *scales, made.q, made.k, made.v),
                *(made.q_scale, made.shift, scale, heads, kv_heads, *of_q, *of_k, *of_v),
                *(queries, tokens, made.k.shape[2] // ALIGNMENT, blocks, key_blocks, batch),
                *(head_dim, padded, BLOCK, KEYS, STRIDE_UNIT, interpreted),
            ),
        ),
    )
