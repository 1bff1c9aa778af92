"""Launches the kernels that write q and k in NVFP4 and v in e4m3: what Triton's kernels of precision "nvfp4" read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..ir.geometry import Geometry
from ..ir.kernel_spec import STRIDE_UNIT, KernelSpec, pad_head_dim
from ..ir.target import Target
from ..tiers.formats import E2M1_MAX, E4M3_MAX, GROUP
from .quantize import (
    ALIGNMENT,
    Launch,
    empty_mean,
    flags_of,
    load,
    shown_of,
    start,
    statistics,
    strides,
)
from .tensors import Nvfp4Tensors, Tensors, stand_ins

BLOCK, KEYS = 32, 64  # rows of q, and of k or v, that a program quantizes
BYTE = torch.uint8


def quantized_nvfp4(
    tensors: Tensors, geometry: Geometry, scale: float, convert: str
) -> Nvfp4Tensors:
    """Of tensors that kernels can read (`is_aligned`). scale: of the scores. convert: as `conversion`, "none" by Triton's
    interpreter.
    """
    made, mean = empty_nvfp4(tensors), empty_mean(tensors, padded_columns(tensors))
    start(_launches(tensors, shown_of(tensors, geometry), made, mean, scale, convert))
    return made


def warm_up_nvfp4(spec: KernelSpec, device: int) -> None:
    """Compiles and loads the kernels that calls of a spec need, with and without hidden keys; launches nothing."""
    tensors = stand_ins(replace(spec, contexts=1))
    made, mean = empty_nvfp4(tensors), empty_mean(tensors, padded_columns(tensors))
    convert = conversion(spec.arch)
    load(lambda shown: _launches(tensors, shown, made, mean, 1.0, convert), tensors, device)


def padded_columns(tensors: Tensors) -> int:
    return pad_head_dim(tensors.q.shape[3], "nvfp4")


def conversion(arch: int) -> str:
    """What a GPU has instructions for."""
    return "fp4" if "fp4" in Target.cuda(arch).features else "fp8"


def empty_nvfp4(tensors: Tensors, device: str | torch.device | None = None) -> Nvfp4Tensors:
    """Memory for what is quantized; beside it out, lse and flags as they are."""
    q, k, _, out, lse, *flags = tensors
    batch, heads, queries, head_dim = q.shape
    kv_heads, tokens = k.shape[1:3]
    padded, columns = padded_columns(tensors), -(-tokens // ALIGNMENT) * ALIGNMENT
    e4m3 = torch.float8_e4m3fn

    def make(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device or q.device)

    return Nvfp4Tensors(
        make(batch, heads, queries, padded // 2, dtype=BYTE),
        make(batch, kv_heads, tokens, padded // 2, dtype=BYTE),
        make(batch, kv_heads, head_dim, columns, dtype=e4m3)[..., :tokens],
        out,
        lse,
        make(batch, heads, queries, padded // GROUP, dtype=e4m3),
        make(batch, kv_heads, tokens, padded // GROUP, dtype=e4m3),
        make(batch, heads, queries),
        make(batch, kv_heads),
        make(batch, kv_heads, head_dim),
        make(batch, heads, queries),
        *flags,
    )


def _launches(
    tensors: Tensors,
    shown: Tensor | None,
    made: Nvfp4Tensors,
    mean: Tensor,
    scale: float,
    convert: str,
) -> tuple[Launch, ...]:
    from ..codegen.triton.quantize_nvfp4 import quantize_nvfp4

    q, k, v, *_ = tensors
    batch, heads, queries, head_dim = q.shape
    kv_heads, tokens = k.shape[1:3]
    samples, padded = mean.shape
    blocks, key_blocks = -(-queries // BLOCK), -(-tokens // KEYS)
    scales = made.k_scale, made.v_scale
    sixteens = -(-tokens // ALIGNMENT)
    return (
        *statistics(tensors, shown, mean, scales, E2M1_MAX * E4M3_MAX),
        Launch(
            quantize_nvfp4,
            (batch * heads * blocks + 2 * samples * key_blocks,),
            (
                *(q, k, v, flags_of(shown), mean, *scales),
                *(made.q, made.k, made.v.view(BYTE)),
                *(made.q_scales.view(BYTE), made.k_scales.view(BYTE), made.q_scale, made.shift),
                *(scale, heads, kv_heads, *strides(q), *strides(k), *strides(v)),
                *(queries, tokens, sixteens, blocks, key_blocks, batch),
                *(head_dim, padded, BLOCK, KEYS, STRIDE_UNIT, convert),
            ),
        ),
    )
