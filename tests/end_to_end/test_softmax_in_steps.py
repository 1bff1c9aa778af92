"""A softmax that is written out is one all the same; what only looks like attention's is left alone, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.end_to_end.spelled import check, refusals
from tests.end_to_end.tiny import Attend

Mask = Tensor | None
SCALE = 1 / math.sqrt(8)
OTHER = "its softmax is over other dimensions than its keys, or not of values"


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * SCALE


def of(weigh: Callable[[Tensor, Tensor], Tensor]) -> Attend:
    """Attention that makes its output of scores and values in a way of its own."""
    return lambda q, k, v, mask: weigh(scores(q, k), v)


def normalised(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


def in_place(s: Tensor, v: Tensor) -> Tensor:
    e = s.exp()
    e /= e.sum(-1, keepdim=True)
    return e @ v


def without_maximum(s: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(s - torch.amax(s, dim=-1, keepdim=True).detach())
    return torch.matmul(e / torch.sum(e, dim=-1, keepdim=True), v)


def values_first(s: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(s - s.max(-1, True)[0])
    return (e @ v) / e.sum(-1, keepdim=True)


def reciprocal(s: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(s - 3)
    return (e * e.sum(-1, keepdim=True).reciprocal()) @ v


def added_dimension(s: Tensor, v: Tensor) -> Tensor:
    e = s.exp()
    return (e / e.sum(-1)[..., None]) @ v


def unsqueezed(s: Tensor, v: Tensor) -> Tensor:
    e = s.exp()
    return (e / e.sum(dim=-1).unsqueeze(-1)) @ v


def in_float(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    s = torch.matmul(q.float(), k.float().transpose(-1, -2)) * SCALE
    return F.dropout(F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), 0.1, training=False) @ v


def regrouped(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """As einops has it: "b n (h d) -> (b h) n d"."""
    batch, heads, tokens, width = q.shape
    q, k, v = (
        x.transpose(1, 2).flatten(2).reshape(batch, tokens, heads, width).permute(0, 2, 1, 3)
        for x in (q, k, v)
    )
    q, k, v = (x.reshape(batch * heads, tokens, width) for x in (q, k, v))
    p = (torch.einsum("b i d, b j d -> b i j", q, k) * SCALE).softmax(-1)
    out = torch.einsum("b i j, b j d -> b i d", p, v)
    return out.reshape(batch, heads, tokens, width)


def into_empty(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    batch = q.shape[0]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    s = torch.baddbmm(torch.zeros(1, 1, 1), q, k.adjoint(), beta=0, alpha=SCALE)
    return torch.bmm(s.softmax(-1), v).unflatten(0, (batch, -1))


ATTENDS: list[Attend] = [
    of(lambda s, v: normalised(s.exp()) @ v),
    of(in_place),
    of(without_maximum),
    of(values_first),
    of(reciprocal),
    of(added_dimension),
    of(unsqueezed),
    of(lambda s, v: (s - s.logsumexp(-1, keepdim=True)).exp() @ v),
    of(lambda s, v: F.log_softmax(s, -1).exp() @ v),
    of(lambda s, v: torch.special.softmax(s, -1) @ v),
    of(lambda s, v: nn.Softmax(dim=-1)(s) @ v),
    in_float,
    regrouped,
    into_empty,
]


@pytest.mark.parametrize("batch", [1, 2])
def test_written_out(batch: int) -> None:
    variant = check(ATTENDS, batch)
    left = {str(getattr(n.target, "__name__", n.target)) for n in variant.gm.graph.nodes}
    assert not {"exp", "softmax", "logsumexp", "matmul", "bmm", "einsum", "baddbmm"} & left


def distances(s: Tensor) -> Tensor:
    places = torch.arange(s.shape[-1])
    return (places[:, None] - places).abs() * 0.1


def with_a_sink(s: Tensor, v: Tensor) -> Tensor:
    return torch.cat([s, torch.zeros_like(s[..., :1])], -1).softmax(-1)[..., :-1] @ v


def largest_only(s: Tensor, v: Tensor) -> Tensor:
    return s.masked_fill(s < s.topk(5, -1)[0][..., -1:], -torch.inf).softmax(-1) @ v


def returned_too(s: Tensor, v: Tensor) -> Tensor:
    p = s.softmax(-1)
    return p @ v + p.mean(-1, keepdim=True)


def divided_by_more(s: Tensor, v: Tensor) -> Tensor:
    e = s.exp()
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


def over_the_queries(s: Tensor, v: Tensor) -> Tensor:
    e = s.exp()
    return (e / e.sum(-2, keepdim=True)) @ v


def exchanged_by_heads(s: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,hg->bgqk", s.softmax(-1), torch.ones(2, 2) / 2) @ v


def sample_by_sample(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.T * SCALE).softmax(-1) @ v

    return torch.vmap(torch.vmap(attend))(q, k, v)


LEFT_ALONE: list[tuple[Attend, str]] = [
    (of(with_a_sink), "its scores go through `cat`"),
    (of(lambda s, v: (torch.tanh(s / 50) * 50).softmax(-1) @ v), "its scores go through `tanh`"),
    (of(lambda s, v: (s - distances(s)).softmax(-1) @ v), "a tensor is subtracted from its scores"),
    (of(lambda s, v: (s + distances(s)).softmax(-1) @ v), "its mask may hide video tokens"),
    (of(largest_only), "its scores are masked by `masked_fill`"),
    (of(returned_too), "its probabilities are read too"),
    (of(divided_by_more), "its probabilities are divided by more than their sum"),
    (of(lambda s, v: s.softmax(-2) @ v), OTHER),
    (of(over_the_queries), OTHER),
    (of(exchanged_by_heads), OTHER),
    (of(lambda s, v: (s.softmax(-1) * distances(s)) @ v), OTHER),
    (sample_by_sample, "its attention is inside `torch.vmap`"),
]


def test_what_is_left_alone_says_why() -> None:
    reasons = refusals([attend for attend, _ in LEFT_ALONE])
    assert len(reasons) == len(LEFT_ALONE)
    for reason, (_, wanted) in zip(reasons, LEFT_ALONE, strict=True):
        assert reason.startswith(wanted)
