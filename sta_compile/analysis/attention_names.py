"""The attention functions and operators that are known, and what their arguments mean.

A call is told by its name, whatever package or namespace it comes from: a kernel from a hub has a namespace of its own, and
`torch.ops._flash_attn3_1a2b3c._flash_attn_forward` is flash-attn's all the same. To add one, give its name and the order of
its tensors, and the meaning of arguments that no other has.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from .attention_site import BHND, BNHD, PACKED, DimOrder
from .graph_view import canonical_name

# What the tensors of a call are; a call with sequence lengths is packed.
ORDERS: Mapping[str, DimOrder] = {
    "scaled_dot_product_attention": BHND,
    "flex_attention": BHND,
    "_scaled_dot_product_flash_attention": BHND,
    "_scaled_dot_product_flash_attention_for_cpu": BHND,
    "_scaled_dot_product_efficient_attention": BHND,
    "_scaled_dot_product_cudnn_attention": BHND,
    "_scaled_dot_product_fused_attention_overrideable": BHND,
    "_scaled_dot_product_attention_math": BHND,
    "_flash_attention_forward": BNHD,
    "_efficient_attention_forward": BNHD,
    "efficient_attention_forward_cutlass": BNHD,
    "memory_efficient_attention": BNHD,
    "memory_efficient_attention_forward": BNHD,
    "_flash_attn_forward": BNHD,
    "_flash_attn_varlen_forward": PACKED,
    "_flash_attn_forward_v3": BNHD,
    "_flash_attn_varlen_forward_v3": PACKED,
    "flash_fwd": BNHD,
    "fwd": BNHD,
    "varlen_fwd": PACKED,
    "flash_attn_func": BNHD,
    "flash_attn_varlen_func": PACKED,
    "_varlen_attn": PACKED,
    "sageattn": BHND,
    "sageattn_qk_int8_pv_fp16_cuda": BHND,
    "sageattn_qk_int8_pv_fp16_triton": BHND,
    "sageattn_qk_int8_pv_fp8_cuda": BHND,
    "sageattn_qk_int8_pv_fp8_cuda_sm90": BHND,
    "sageattn3_blackwell": BHND,
    "sageattn_varlen": PACKED,
}  # fmt: skip
MULTIHEAD = "multi_head_attention_forward"  # has its projections inside
LAYOUTS = {"HND": BHND, "NHD": BNHD}
# Names that say too little by themselves.
_NAMESPACES = {"fwd": "flash", "varlen_fwd": "flash", "flash_fwd": "flash"}
MEANINGS = {
    "q": "q", "query": "q", "k": "k", "key": "k", "v": "v", "value": "v",
    "scale": "scale", "softmax_scale": "scale", "sm_scale": "scale",
    "causal": "causal", "is_causal": "causal", "custom_mask_type": "causal",
    "dropout_p": "dropout", "p": "dropout",
    "attn_mask": "mask", "attn_bias": "mask", "bias": "mask", "b": "mask",
    "tensor_layout": "layout",
    "cu_seqlens_q": "q lengths", "cu_seq_q": "q lengths", "cum_seq_q": "q lengths", "seqstart_q": "q lengths",
    "cu_seqlens_k": "k lengths", "cu_seq_k": "k lengths", "cum_seq_k": "k lengths", "seqstart_k": "k lengths",
}  # fmt: skip
# Arguments that don't change the result, or only where another one does.
FREE = re.compile(
    r"max_(seqlen_?)?[qk]|(max|min)_seqlen_.*|return_.*|.*log_?sumexp|deterministic|num_splits|pack_gqa|sm_margin|out_?|zero_tensors"
    r"|scheduler_metadata|enable_gqa|rotary_interleaved|kernel_options|smooth_k|pv_accum_dtype|qk_quant_gran|output_dtype|op"
    r"|philox_.*|kwargs|is_grad_enabled|seqlens_rotary|seqlen_k_per_split|disable_scheduler_metadata|gather_bwd_.*"
)
SET_NATIVE = "call torch.nn.functional.scaled_dot_product_attention; in diffusers: set_attention_backend('native')"
LOOKS_LIKE = re.compile(r"attn|attention|flash|sage", re.IGNORECASE)


def is_known_call(node: torch.fx.Node) -> bool:
    name = canonical_name(node)
    return name in ORDERS and _NAMESPACES.get(name, "") in target_name(node)


def target_name(node: torch.fx.Node) -> str:
    """The operator or function that a node calls, as its author writes it: "flash_attn::_flash_attn_forward"."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    owner = getattr(target, "__self__", None)
    name = getattr(target, "__name__", str(target))
    return f"{owner.__name__}.{name}" if inspect.isclass(owner) else str(name)
