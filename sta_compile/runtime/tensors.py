"""The tensors of one launch, and what their memory allows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..codegen.tensor_map import TensorMap, is_boxed, tensor_map
from ..ir.kernel_spec import STRIDE_UNIT, KernelSpec

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
LENGTHS = {torch.int32: "i32", torch.int64: "i64"}


class Tensors(NamedTuple):
    """q, k, v, out: [batch, heads, tokens, head_dim], aligned (`is_aligned`). lse: float32 [batch, heads, queries].

    The rest may be None, is contiguous and starts at 16 bytes. key_lengths: int [batch, segments beside the video].
    dense: bool [batch]. key_mask: bool [batch, tokens beside the video]. video_mask: bool [batch, tokens of the video].
    shown: bool [batch], samples whose video_mask hides nothing.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    key_lengths: Tensor | None = None
    dense: Tensor | None = None
    key_mask: Tensor | None = None
    video_mask: Tensor | None = None
    shown: Tensor | None = None


class QuantizedTensors(NamedTuple):
    """What kernels in e4m3 read and write. out, lse and flags: as in Tensors.

    q: uint8 [batch, heads, tokens, head_dim]; k: [batch, key heads, tokens, head_dim], tokens padded to sixteens; both
    contiguous; rows of k are permuted in each sixteen (codegen/triton/quantize.py). v: [batch, key heads, head_dim, tokens],
    strides of multiples of 16. q_scale, shift: float32 [batch, heads, tokens]; shift is added to lse. k_scale:
    [batch, key heads]. v_scale: [batch, key heads, head_dim].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    shift: Tensor
    key_lengths: Tensor | None = None
    dense: Tensor | None = None
    key_mask: Tensor | None = None
    video_mask: Tensor | None = None
    shown: Tensor | None = None


class Nvfp4Tensors(NamedTuple):
    """What kernels in NVFP4 read and write. out, lse and flags: as in Tensors.

    q: uint8 [batch, heads, tokens, padded head_dim / 2], k alike: two codes each; q_scales, k_scales: float8_e4m3fn [...,
    padded head_dim / 16]; all contiguous. v: float8_e4m3fn [batch, key heads, head_dim, tokens], strides of multiples of 16.
    q_scale, shift: float32 [batch, heads, tokens]; shift is added to lse. k_scale: [batch, key heads]. v_scale: [batch, key
    heads, head_dim].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    q_scales: Tensor
    k_scales: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    shift: Tensor
    key_lengths: Tensor | None = None
    dense: Tensor | None = None
    key_mask: Tensor | None = None
    video_mask: Tensor | None = None
    shown: Tensor | None = None


class TieredTensors(NamedTuple):
    """What kernels with tiers read and write: q, k, v, out, lse and flags as in Tensors, the rest as in QuantizedTensors.

    mean_k, mean_v: dtype of q [batch, key heads, key blocks, head_dim]; slope: alike [batch, key heads, columns of v,
    columns of q], what a query adds to the values of skipped keys (tiers/statistics.py); all contiguous. bias: float32
    [batch, heads, rows, key blocks padded to 128]; order: int32 [batch, heads, rows, key blocks]; counts: int32 [batch,
    heads, rows, 2]; see cutlass_templates/sm90/tier_problem.cuh. blocks: int32 [key blocks, 2], (start, length) in tokens
    of the video; byte_blocks: alike, in k_bytes.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    q_bytes: Tensor
    k_bytes: Tensor
    v_bytes: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    shift: Tensor
    mean_k: Tensor
    mean_v: Tensor
    slope: Tensor
    bias: Tensor
    order: Tensor
    counts: Tensor
    blocks: Tensor
    byte_blocks: Tensor
    key_lengths: Tensor | None = None
    dense: Tensor | None = None
    key_mask: Tensor | None = None
    video_mask: Tensor | None = None
    shown: Tensor | None = None


class GradientTensors(NamedTuple):
    """The tensors of a backward pass. q, k, v, out and flags: as in Tensors; dout, dq: as q; dk, dv: as k.

    statistics: float32 [batch * heads * queries + 1, 2]. dq_sum: float32 zeros [parts, batch, heads, queries, columns], if
    the kernels add to it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    statistics: Tensor
    dq_sum: Tensor | None
    key_lengths: Tensor | None
    dense: Tensor | None
    key_mask: Tensor | None
    video_mask: Tensor | None
    shown: Tensor | None


def may_be_dense(tensors: Tensors | QuantizedTensors | TieredTensors | GradientTensors) -> bool:
    """A sample whose video_mask hides keys is dense."""
    return tensors.dense is not None or tensors.video_mask is not None


def map_of(x: Tensor) -> TensorMap | None:
    return tensor_map(tuple(x.shape), x.stride(), x.itemsize, x.data_ptr())


def boxed(x: Tensor) -> bool:
    return is_boxed(tuple(x.shape), x.stride(), x.itemsize, x.data_ptr())


def is_aligned(x: Tensor) -> bool:
    """Whether a kernel can read x: contiguous rows that start at 16 bytes and at 8 elements."""
    used = 0
    for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True):
        used |= stride if size > 1 else 0
    return x.stride(3) == 1 and used % STRIDE_UNIT == 0 and x.data_ptr() % 16 == 0


def flat(x: Tensor | None) -> Tensor | None:
    """Contiguous memory that starts at 16 bytes, as compilers of kernels are told."""
    if x is None:
        return None
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def stand_ins(spec: KernelSpec) -> Tensors:
    """Meta tensors that a call of this kernel may have: for building it."""
    dtype = {name: kind for kind, name in DTYPES.items()}[spec.dtype]
    lengths = {name: kind for kind, name in LENGTHS.items()}

    def empty(*sizes: int, kind: torch.dtype = dtype, when: bool = True) -> Tensor | None:
        return torch.empty(sizes, dtype=kind, device="meta") if when else None

    x = torch.empty(1, 1, 16 + 16 * spec.contexts, spec.head_dim, dtype=dtype, device="meta")
    flags = torch.bool
    return Tensors(
        x,
        x,
        x,
        x,
        torch.empty(x.shape[:3], device="meta"),
        empty(
            1, spec.contexts, kind=lengths.get(spec.lengths, torch.int32), when=spec.lengths != ""
        ),
        empty(1, kind=flags, when=spec.dense),
        empty(1, 16 * spec.contexts, kind=flags, when=spec.masked),
        empty(1, 16, kind=flags, when=spec.video_masked),
        empty(1, kind=flags, when=spec.video_masked),
    )
