"""Every way to write attention: it is found, replaced with a sparse window, and equal to the definition."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.end_to_end.spelled import check, check_models, latent, refusals, spelled
from tests.end_to_end.tiny import Attend, TinyVideo, valid

Mask = Tensor | None
SCALE = 1 / math.sqrt(8)


def every_keyword(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return F.scaled_dot_product_attention(
        query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=SCALE
    )


def mixed_arguments(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, None, 0.0, False)


def tokens_before_heads(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    q, k, v = (x.transpose(1, 2).contiguous().permute(0, 2, 1, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)


def merged_heads(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    out = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)))
    return out.unflatten(0, (q.shape[0], -1))


def by_bmm(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    batch = q.shape[0]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    p = torch.bmm(q, k.transpose(1, 2)).mul(SCALE).softmax(-1, dtype=torch.float32)
    return torch.bmm(p.to(v.dtype), v).unflatten(0, (batch, -1))


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    batch = q.shape[0]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=SCALE)
    return torch.bmm(F.softmax(scores, dim=-1), v).unflatten(0, (batch, -1))


def scale_in_both(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    p = F.dropout(((q * SCALE**0.5) @ (k * SCALE**0.5).mT).softmax(-1), 0.0)
    return p @ v


def scale_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores *= SCALE
    return scores.softmax(-1) @ v


def einsum_by_heads(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    p = torch.einsum("bhqd,bhkd->bhqk", q * SCALE, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", p, v)


def einsum_by_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    p = torch.einsum("bqhd,bkhd->bhqk", q, k).div(math.sqrt(8)).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v).transpose(1, 2)


def einsum_sequence_first(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    p = (torch.einsum("sbhd,tbhd->bhst", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", p, v).permute(1, 2, 0, 3)


def scores_turned(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    p = (k @ (SCALE * q).mT).softmax(-2)
    return (v.mT @ p).mT


PLAIN = [
    every_keyword,
    mixed_arguments,
    tokens_before_heads,
    merged_heads,
    by_bmm,
    by_baddbmm,
    scale_in_both,
    scale_in_place,
    einsum_by_heads,
    einsum_by_tokens,
    einsum_sequence_first,
    scores_turned,
]


@pytest.mark.parametrize("batch", [1, 2])
def test_one_call_or_its_steps(batch: int) -> None:
    variant = check(PLAIN, batch)
    names = [getattr(n.target, "__name__", n.target) for n in variant.gm.graph.nodes]
    left = {"softmax", "bmm", "baddbmm", "einsum", "imul", "mul_"} & set(map(str, names))
    assert not left


def interleaved(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def interleaved_by_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    k, v = (torch.repeat_interleave(x.transpose(1, 2), 2, dim=2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k.transpose(1, 2), v.permute(0, 2, 1, 3))


def expanded(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    batch, heads, tokens, features = k.shape
    k, v = (
        x[:, :, None].expand(batch, heads, 2, tokens, features).reshape(q.shape) for x in (k, v)
    )
    return (q @ k.mT * SCALE).softmax(-1) @ v


def repeated(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """As in Lumina 2, which repeats before the tokens go behind the heads."""
    k, v = (
        x.transpose(1, 2).unsqueeze(3).repeat(1, 1, 1, 2, 1).flatten(2, 3).transpose(1, 2)
        for x in (k, v)
    )
    return F.scaled_dot_product_attention(q, k, v)


def enabled(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


GROUPED = [interleaved, interleaved_by_tokens, expanded, repeated, enabled]


def test_copies_of_heads_are_not_made() -> None:
    variant = check(GROUPED, heads=4, kv_heads=2)
    calls = [n for n in variant.gm.graph.nodes if n.target is torch.ops.sta.attention.default]
    assert [n.args[1].meta["example_value"].shape[1] for n in calls] == [2] * len(GROUPED)
    names = {str(getattr(n.target, "__name__", n.target)) for n in variant.gm.graph.nodes}
    assert not names & {"repeat_interleave", "repeat", "expand"}


def one_head_repeated(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    k, v = k.expand(-1, q.shape[1], -1, -1), v.repeat(1, q.shape[1], 1, 1)
    return F.scaled_dot_product_attention(q, k, v)


def test_one_head_for_all() -> None:
    variant = check([one_head_repeated], heads=4, kv_heads=1)
    (call,) = (n for n in variant.gm.graph.nodes if n.target is torch.ops.sta.attention.default)
    assert call.args[1].meta["example_value"].shape[1] == 1


def in_chunks(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return torch.cat([F.scaled_dot_product_attention(x, k, v) for x in q.chunk(4, dim=2)], dim=2)


def in_slices(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Chunks of 50, the last one shorter, in steps, with tokens before heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = []
    for start in range(0, q.shape[1], 50):
        part = q[:, start : start + 50].transpose(1, 2) * SCALE
        p = (part @ k.permute(0, 2, 3, 1)).softmax(-1)
        out.append((p @ v.transpose(1, 2)).transpose(1, 2))
    return torch.cat(out, 1).transpose(1, 2)


def by_samples(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """As diffusers' sliced attention: a part of the batch at a time."""
    out = [F.scaled_dot_product_attention(*(x[i : i + 1] for x in (q, k, v))) for i in range(2)]
    return torch.cat(out)


def test_chunks_of_queries_are_one_attention() -> None:
    variant = check([in_chunks, in_slices])
    calls = [n for n in variant.gm.graph.nodes if n.target is torch.ops.sta.attention.default]
    assert len(calls) == 2


def out_of_order(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    a, b = (F.scaled_dot_product_attention(x, k, v) for x in q.chunk(2, dim=2))
    return torch.cat([b, a], 2)


def part_left_out(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    a, b, c = (F.scaled_dot_product_attention(x, k, v) for x in q.chunk(3, dim=2))
    return torch.cat([a, b, b], 2) + c.mean()


@pytest.mark.parametrize("attend", [out_of_order, part_left_out])
def test_chunks_that_are_not_the_queries_in_order(attend: Attend) -> None:
    said = "part of the video", "shows no order of frames"
    assert all(any(text in reason for text in said) for reason in refusals([attend]))


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return (q @ k.mT * SCALE).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def where(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return torch.where(mask, q @ k.mT * SCALE, torch.finfo(q.dtype).min).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return (bias + q @ k.mT * SCALE).softmax(-1) @ v


def test_masks_over_the_text() -> None:
    attends = [filled, where, added]
    model, twin = spelled(attends), TinyVideo(layers=len(attends))
    text, lengths = torch.randn(2, 7, 16), valid(7, 4, of=7)
    check_models(model, twin, twin.sites, latent=latent(), text=text, valid=lengths)


def hidden(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    scores = (q @ k.mT * SCALE).masked_fill(torch.ones(q.shape[2], dtype=torch.bool), -9e9)
    return scores.softmax(-1) @ v


def read_too(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    p = (q @ k.mT * SCALE).softmax(-1)
    return p @ v + p.mean()


def learned(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return ((q @ k.mT) * v.mean()).softmax(-1) @ v


def test_what_has_no_replacement_says_why() -> None:
    reasons = refusals([hidden, read_too, learned])
    assert [reason.split("`")[0].strip() for reason in reasons] == [
        "its scores are masked by",
        "its probabilities are read too",
        "its scores are multiplied by a tensor",
    ]
