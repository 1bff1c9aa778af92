"""Attention through libraries: read by the arguments of their operators, or refused with what to do."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from tests.end_to_end import attention_stubs as stubs
from tests.end_to_end.compiled import compile_variants
from tests.end_to_end.spelled import check, latent, refusals, spelled
from tests.end_to_end.tiny import SPARSE

Mask = Tensor | None
SETTINGS = types.SimpleNamespace(scale=8**-0.5)
stubs.register()
stubs.flash_attn_4_func.__name__ = "flash_attn_func"
for function in (stubs.sageattn, stubs.flash_attn_4_func):
    torch.compiler.allow_in_graph(function)


def by_tokens(attend: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """A function of [batch, tokens, heads, features] for the model's [batch, heads, tokens, features]."""

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return attend(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)

    return call


def flash_qkvpacked(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    qkv = torch.stack([q, k, v]).permute(1, 3, 0, 2, 4)
    return stubs.flash_attn_qkvpacked_func(qkv).transpose(1, 2)


def packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """As the original Wan does it."""
    batch, tokens = q.shape[0], q.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = stubs.flash_attn_varlen_func(q, k, v, ends, ends, tokens, tokens)
    return out.unflatten(0, (batch, tokens)).transpose(1, 2)


def flash_varlen(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    lengths = torch.tensor([q.shape[2]] * q.shape[0], dtype=torch.int32)
    zero = lengths.new_zeros([1])
    return packed(q, k, v, torch.cat([zero, lengths]).cumsum(0, dtype=torch.int32))


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    batch, tokens = q.shape[0], q.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    ends = F.pad(torch.full((batch,), tokens, dtype=torch.int32).cumsum(0), (1, 0))
    out = varlen_attn(q, k, v, ends, ends, tokens, tokens)
    return out.unflatten(0, (batch, tokens)).transpose(1, 2)


def sage(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return stubs.sageattn(q, k, v, is_causal=False)


def flash_4(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, _ = stubs.flash_attn_4_func(q, k, v, window_size=(None, None), softcap=0.0)
    return out.transpose(1, 2)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return flex_attention(q, k, v)


def aten_flash(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def one_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


LIBRARIES = [
    by_tokens(stubs.flash_attn_func),
    by_tokens(stubs.flash_attn_3_func),
    by_tokens(stubs.memory_efficient_attention),
    by_tokens(stubs.memory_efficient_attention_hopper),
    by_tokens(stubs.memory_efficient_attention_forward),
    by_tokens(stubs.sageattn, tensor_layout="NHD"),
    sage,
    flash_4,
    flash_qkvpacked,
    flash_varlen,
    torch_varlen,
    flex,
    aten_flash,
    one_kernel,
]


@pytest.mark.parametrize("batch", [1, 2])
def test_calls_of_libraries(batch: int) -> None:
    check(LIBRARIES, batch)


def test_groups_of_heads_in_a_library() -> None:
    check([by_tokens(stubs.flash_attn_func)], heads=4, kv_heads=2)


def scaled_by_an_attribute(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return ((q @ k.mT) * SETTINGS.scale).softmax(-1) @ v


def test_numbers_that_are_inputs_of_a_dynamic_graph() -> None:
    """With dynamic=True, Dynamo makes inputs of the defaults of flash_attn_func and of numbers that it reads."""
    attends = [by_tokens(stubs.flash_attn_func), scaled_by_an_attribute]
    check(attends, compile_as={"dynamic": True})


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return by_tokens(stubs.flash_attn_func, causal=True)(q, k, v, mask)


def sliding(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return by_tokens(stubs.flash_attn_func, window_size=(8, 8))(q, k, v, mask)


def causal_by_its_window(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return by_tokens(stubs.flash_attn_func, window_size=(-1, 0))(q, k, v, mask)


def sliding_4(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return stubs.flash_attn_4_func(q, k, v, window_size=(None, 0))[0].transpose(1, 2)


def with_a_sink(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return stubs.flash_attn_4_func(q, k, v, learnable_sink=v[0, 0, :, 0])[0].transpose(1, 2)


def reading_sums(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, _ = stubs.flash_attn_func(q, k, v, return_attn_probs=True)
    return (out + lse.mean()).transpose(1, 2)


def lengths_of_data(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """As the original HunyuanVideo, which counts the prompt's tokens."""
    ones = (v.mean((1, 3)) < 9).sum(1)
    return packed(q, k, v, F.pad(ones.cumsum(0), (1, 0)).to(torch.int32))


def flex_biased(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j))


def flex_masked(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], q.shape[2], "cpu")
    return flex_attention(q, k, v, block_mask=blocks)


def unknown(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return torch.ops.stubs.block_attn(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def five_dimensions(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return F.scaled_dot_product_attention(*(x[:, None] for x in (q, k, v)))[:, 0]


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (five_dimensions, "`scaled_dot_product_attention` of tensors with 5 dimensions"),
        (causal, "causal attention"),
        (sliding, "`flash_attn::_flash_attn_forward` with `window_size_left`"),
        (causal_by_its_window, "`flash_attn::_flash_attn_forward` with `window_size_right`"),
        (sliding_4, "`flash_attn_func` with `window_size`"),
        (with_a_sink, "`flash_attn_func` with `learnable_sink`"),
        (reading_sums, "its log-sum-exp is read too"),
        (
            lengths_of_data,
            "the sequence lengths of `flash_attn::_flash_attn_varlen_forward` depend",
        ),
        (flex_biased, "flex_attention with a score_mod"),
        (flex_masked, "flex_attention with a block mask"),
        (unknown, "its attention is `stubs::block_attn`, which is not known"),
    ],
)
def test_calls_that_are_left_alone_say_why(attend: Callable[..., Tensor], reason: str) -> None:
    (found,) = refusals([attend])
    assert reason in found


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, grad, grad


def own_function(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return Function.apply(q, k, v)


def test_a_function_with_a_backward_of_its_own() -> None:
    """It is traced through without gradients; with them it is one region, and stays as it is."""
    check([own_function])
    model, inputs = spelled([own_function]), {"latent": latent()}
    variant = compile_variants(model, inputs, {"sta": SPARSE})["sta"]
    (site,) = variant.report.refused
    assert "inside `autograd_function_apply`" in site.reason
    assert torch.equal(variant.run(**inputs), model(**inputs))
