"""Stubs of attention libraries that can't be installed here: their operators, with the schemas that they register and with
SDPA behind them, and the functions that reach them.

flash_attn 2.8, flash-attn 3 (hopper/flash_attn_interface.py), flash-attn 4.0.0b36, xformers 0.0.35 and sageattention 2.2.
Compared with the packages on PyPI: flash-attn-4 4.0.0b36 and xformers 0.0.35 (wheels), sageattention 1.0.6, which has no
`return_lse`; flash-attn 3 is not there. Without gradients, torch.compile traces through their Python into these operators;
what it doesn't trace is one call of a function.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_NO_WINDOW = (-1, -1)
_SCHEMAS = (
    "flash_attn::_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
    "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "flash_attn::_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, "
    "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
    "bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)",
    "flash_attn_3::_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, "
    "Tensor? qv=None, Tensor? out_=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, SymInt? max_seqlen_q=None, "
    "SymInt? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, bool causal=False, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, SymInt attention_chunk=0, float softcap=0., "
    "bool rotary_interleaved=True, Tensor? scheduler_metadata=None, SymInt num_splits=1, bool? pack_gqa=None, "
    "SymInt sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)",
    "xformers_flash::flash_fwd(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, bool is_causal, "
    "SymInt window_left, SymInt window_right, bool return_softmax, Tensor? block_tables) -> (Tensor, Tensor, Tensor)",
    "xformers_flash3::flash_fwd(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_k, Tensor? leftpad_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, "
    "bool is_causal, Tensor? descale_q=None, Tensor? descale_k=None, Tensor? descale_v=None, Tensor? block_table=None, "
    "bool use_kvsplit=False, SymInt window_left=-1, SymInt window_right=-1) -> (Tensor, Tensor)",
    "xformer::memory_efficient_attention_forward(Tensor q, Tensor k, Tensor v, Tensor? b=None, float? p=0.0, "
    "float? scale=None) -> Tensor",
    "stubs::sageattn_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, bool is_causal, float? sm_scale) -> Tensor",
    "stubs::block_attn(Tensor q, Tensor k, Tensor v) -> Tensor",
)
_libraries: list[torch.library.Library] = []


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """[..., tokens, heads, features]"""
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(-2, -3).contiguous()


def _packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float | None) -> Tensor:
    """[tokens of all samples, heads, features]"""
    bounds = list(zip(ends.tolist(), ends.tolist()[1:], strict=False))
    return torch.cat([_attend(*(x[a:b] for x in (q, k, v)), scale) for a, b in bounds])


def _results(q: Tensor, out: Tensor, schema: str) -> tuple[Tensor, ...] | Tensor:
    count = schema.partition("->")[2].count("Tensor")
    lse = q.new_zeros(q.shape[:-1], dtype=torch.float32)
    return out if count == 1 else (out, lse, *(q.new_zeros(2) for _ in range(count - 2)))


def _implementation(schema: str) -> Any:
    names = [part.split()[-1].partition("=")[0] for part in schema.partition(") ->")[0].split(",")]
    names[0] = "q"

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        q, k, v = list(given.values())[:3]
        ends, scale = given.get("cu_seqlens_q"), given.get("softmax_scale")
        if ends is None:
            return _results(q, _attend(q, k, v, scale), schema)
        return _results(q, _packed(q, k, v, ends, scale), schema)

    return run


def _fake(schema: str) -> Any:
    return lambda q, *args, **kwargs: _results(q, torch.empty_like(q), schema)


def register() -> None:
    """Once per process."""
    if _libraries:
        return
    for schema in _SCHEMAS:
        namespace, _, signature = schema.partition("::")
        name = signature.partition("(")[0]
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(signature)
        library.impl(name, _implementation(signature), "CPU")
        torch.library.register_fake(f"{namespace}::{name}", _fake(signature), lib=library)
        _libraries.append(library)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    scale = q.shape[-1] ** (-0.5) if softmax_scale is None else softmax_scale
    out, lse, probabilities, _ = torch.ops.flash_attn._flash_attn_forward(
        q, k, v, dropout_p, scale, causal=causal, window_size_left=window_size[0],
        window_size_right=window_size[1], softcap=softcap, alibi_slopes=alibi_slopes,
        return_softmax=return_attn_probs and dropout_p > 0,
    )  # fmt: skip
    return (out, lse, probabilities) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv: Tensor, **options: Any) -> Any:
    """qkv [batch, tokens, 3, heads, features]"""
    return flash_attn_func(
        qkv[:, :, 0].detach(), qkv[:, :, 1].detach(), qkv[:, :, 2].detach(), **options
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    **options: Any,
) -> Tensor:
    scale = q.shape[-1] ** (-0.5) if softmax_scale is None else softmax_scale
    out, *_ = torch.ops.flash_attn._flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, scale, causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False, block_table=None,
    )  # fmt: skip
    return out


def flash_attn_3_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """As diffusers calls kernels-community/flash-attn3 of the hub."""
    options.pop("deterministic", None)
    options.pop("return_attn_probs", None)
    left, right = options.pop("window_size", _NO_WINDOW)
    scale = options.pop("softmax_scale", None) or q.shape[-1] ** (-0.5)
    out, *_ = torch.ops.flash_attn_3._flash_attn_forward(
        q, k, v, softmax_scale=scale, window_size_left=left, window_size_right=right, **options
    )
    return out


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """xformers without a bias, which packs the samples for flash-attn."""
    batch, tokens, heads, features = query.shape
    ends = torch.arange(
        0, (batch + 1) * tokens, step=tokens, dtype=torch.int32, device=query.device
    )
    out, *_ = torch.ops.xformers_flash.flash_fwd(
        *(x.reshape(batch * tokens, heads, features) for x in (query, key, value)),
        ends, ends, None, tokens, tokens, p, scale or features**-0.5, False, -1, -1, False, None,
    )  # fmt: skip
    return out.reshape(batch, tokens, heads, features)


def memory_efficient_attention_hopper(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """xformers on Hopper, which does not pack."""
    tokens, scale = query.shape[1], query.shape[-1] ** -0.5
    out, _ = torch.ops.xformers_flash3.flash_fwd(
        query, key, value, None, None, None, None, tokens, tokens, 0.0, scale, False,
        window_left=-1, window_right=-1, block_table=None, use_kvsplit=False,
    )  # fmt: skip
    return out


def memory_efficient_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
) -> Tensor:
    """xformers as the one operator that it registers for torch.compile."""
    return torch.ops.xformer.memory_efficient_attention_forward(query, key, value, bias, 0.0, None)


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Quantised attention, here without the quantisation."""
    if tensor_layout == "NHD":
        return _attend(q, k, v, sm_scale)
    return F.scaled_dot_product_attention(q, k, v, scale=sm_scale)


def sageattn_hnd(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **kwargs: Any) -> Tensor:
    """sageattn3_blackwell, which takes no scale and no layout."""
    return F.scaled_dot_product_attention(q, k, v)


def sageattn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
) -> Any:
    return torch.ops.stubs.sageattn_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, sm_scale
    )


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """torch_npu's, in the layout BSND."""
    return _attend(query, key, value, kwargs.get("scale")), query.new_zeros(1)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, **kwargs: Any) -> Tensor:
    """torch_xla's Pallas kernel, of queries that are scaled already."""
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def flash_attn_4_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """flash-attn 4 (flash_attn.cute) returns the log-sum-exp too."""
    return _attend(q, k, v, softmax_scale), q.new_zeros(q.shape[:-1])


def aiter_flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """flash-attn 2 on ROCm, with `return_lse` in the place of `return_attn_probs`."""
    return flash_attn_func(q, k, v, return_attn_probs=options.pop("return_lse"), **options)
