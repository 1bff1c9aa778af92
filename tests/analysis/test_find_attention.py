"""Spellings of attention: what is found computes what the graph computes, and nothing else is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from sta_compile.analysis.attention_site import AttentionSite, DimOrder
from sta_compile.analysis.find_attention import find_attention
from sta_compile.analysis.graph_view import GraphView
from tests.analysis.traced import capture, capture_with_inputs

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, mask
SCALE = 1 / math.sqrt(8)


def baddbmm(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1])
    scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=0.3)
    return torch.bmm(scores.softmax(-1), v)


def baddbmm_with_mask(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    bias = m.expand(2, 3, 5, 7).flatten(0, 1)
    return torch.baddbmm(bias, q, k.transpose(1, 2), alpha=0.3).softmax(-1) @ v


def in_float(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)).float() * SCALE
    return scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v


def written_between(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    q = q + 1
    scores = q @ k.mT
    q.zero_()
    return scores.softmax(-1) @ v + q.sum()


def mask_written_after(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    seen = m > 0
    hidden = ~seen
    seen.fill_(True)
    return (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def scaled_behind_its_back(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.mul_(2)
    return scores.softmax(-1) @ v


SPELLINGS: dict[str, Attention] = {
    "positional": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v),
    "keywords": lambda q, k, v, m: F.scaled_dot_product_attention(query=q, key=k, value=v),
    "scale": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "all positional": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, 0.0, False),
    "mask": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
    "scale after": lambda q, k, v, m: (q @ k.mT * SCALE).softmax(-1) @ v,
    "scale before the product": lambda q, k, v, m: (SCALE * (q @ k.mT)).softmax(-1) @ v,
    "divided": lambda q, k, v, m: torch.softmax(q @ k.transpose(2, 3) / 8**0.5, dim=-1) @ v,
    "scale in q": lambda q, k, v, m: ((q * SCALE) @ k.mT).softmax(-1) @ v,
    "scale in q and k": lambda q, k, v, m: ((q * 0.5) @ (k * 0.6).mT).softmax(-1) @ v,
    "no scale": lambda q, k, v, m: torch.matmul((q @ k.mT).softmax(-1), v),
    "mask added": lambda q, k, v, m: (q @ k.mT * SCALE + m).softmax(-1) @ v,
    "mask after a division": lambda q, k, v, m: F.softmax((q @ k.mT).div(3) + m, -1) @ v,
    "dropout of 0": lambda q, k, v, m: F.dropout((q @ k.mT).softmax(-1), 0.0) @ v,
    "dropout in eval": lambda q, k, v, m: F.dropout((q @ k.mT).softmax(-1), 0.1, False) @ v,
    "softmax in float": in_float,
    "baddbmm": baddbmm,
    "baddbmm with a mask": baddbmm_with_mask,
    "bmm": lambda q, k, v, m: torch.bmm(
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).softmax(-1), v.flatten(0, 1)
    ),
    "mask on the left": lambda q, k, v, m: (m + q @ k.mT * SCALE).softmax(-1) @ v,
    "k transposed before its head split": lambda q, k, v, m: (
        (q @ k.flatten(0, 1).permute(0, 2, 1).unflatten(0, (2, 3))).softmax(-1) @ v
    ),
    "scores turned": lambda q, k, v, m: (k @ q.mT).mT.softmax(-1) @ v,
    "softmax over rows": lambda q, k, v, m: (k @ q.mT).softmax(-2).mT @ v,
    "values on the left": lambda q, k, v, m: v.mT @ (k @ q.mT).softmax(-2),
    "less the maximum": lambda q, k, v, m: (
        ((s := q @ k.mT) - s.amax(-1, keepdim=True)).softmax(-1) @ v
    ),
    "less max": lambda q, k, v, m: (
        ((s := q @ k.mT) - s.max(dim=-1, keepdim=True)[0]).softmax(-1) @ v
    ),
    "in place": lambda q, k, v, m: (q @ k.mT).mul_(SCALE).softmax(-1) @ v,
    "mask added in place": lambda q, k, v, m: (q @ k.mT).mul_(SCALE).add_(m).softmax(-1) @ v,
    "mask by masked_fill": lambda q, k, v, m: (
        (q @ k.mT * SCALE).masked_fill(~(m > 0), -math.inf).softmax(-1) @ v
    ),
    "mask by where": lambda q, k, v, m: torch.where(m > 0, q @ k.mT, -1e9).softmax(-1) @ v,
    "einsum": lambda q, k, v, m: torch.einsum(
        "bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v
    ),
    "einsum, tokens first": lambda q, k, v, m: torch.einsum(
        "bhqk,bkhd->bqhd",
        torch.einsum("bqhd,bkhd->bhqk", *(x.transpose(1, 2) for x in (q, k))).softmax(-1),
        v.transpose(1, 2),
    ),
    "einsum, sequence first": lambda q, k, v, m: torch.einsum(
        "nmbh,mbhd->nbhd",
        torch.einsum("nbhd,mbhd->nmbh", *(x.permute(2, 0, 1, 3) for x in (q, k))).softmax(1),
        v.permute(2, 0, 1, 3),
    ),
    "einsum, values first": lambda q, k, v, m: torch.einsum(
        "...kd,...qk->...qd", v, torch.einsum("...qd,...kd->...qk", q, k).softmax(-1)
    ),
    "scores split into heads": lambda q, k, v, m: (
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)
        .view(2, 3, 5, 7)
        .softmax(-1)
        .view(6, 5, 7)
        .bmm(v.flatten(0, 1))
    ),
    "no heads": lambda q, k, v, m: (q[:, 0] @ k[:, 0].mT).softmax(-1) @ v[:, 0],
    "three dimensions": lambda q, k, v, m: F.scaled_dot_product_attention(q[0], k[0], v[0]),
    "method": lambda q, k, v, m: q.matmul(k.transpose(-1, -2)).mul(SCALE).softmax(-1).matmul(v),
}


class Values(Interpreter):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)

    def of(self, node: Node | None) -> Tensor | None:
        return None if node is None else self.env[node]


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q [2, 3, 5, 8], k and v [2, 3, 7, 8], an additive mask."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, dtype=dtype) for n in (5, 7, 7))
    return [q, k, v, torch.randn(2, 1, 1, 7, dtype=dtype)]


def recomputed(site: AttentionSite, values: Values) -> Tensor:
    q, k, v = (in_order(values.env[node], order) for node, order in site.operands)
    mask = values.of(site.mask)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=site.causal, scale=site.scale, enable_gqa=site.gqa
    )
    assert out.shape == in_order(values.env[site.node], site.out_order).shape
    return out


def in_order(x: Tensor, order: DimOrder) -> Tensor:
    """The value as [batch, heads, tokens, features], as far as it has these."""
    dims = (order.batch, order.heads, order.tokens, order.features)
    return x.permute([d for d in dims if d is not None])


def found_in(function: Callable[..., Any], *inputs: Tensor) -> list[AttentionSite]:
    return find_attention(GraphView(capture(function, *inputs)))


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_site_computes_what_the_graph_computes(name: str) -> None:
    inputs = tensors()
    gm, examples = capture_with_inputs(lambda *x: SPELLINGS[name](*x) * 1, *inputs)
    (site,) = find_attention(GraphView(gm))
    values = Values(gm)
    values.run(*examples)
    wanted = in_order(values.env[site.node], site.out_order)
    torch.testing.assert_close(recomputed(site, values), wanted)
    assert site.problem is None
    assert (site.mask is not None) == ("mask" in name or name == "all positional")


def test_softmax_in_float_between_half_precision_products() -> None:
    (site,) = found_in(in_float, *tensors(torch.bfloat16))
    assert site.scale == pytest.approx(SCALE)
    assert site.mask is None


def test_grouped_and_causal_attention() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    (site,) = found_in(
        lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True, is_causal=True), q, k
    )
    assert site.gqa
    assert site.causal
    assert site.scale == pytest.approx(SCALE)


def test_dropout_of_attention_is_told() -> None:
    q, k, v, _ = tensors()
    (site,) = found_in(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.1), q, k, v)
    assert site.dropout == 0.1


def test_sites_are_in_order_and_have_the_path_of_their_module() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + F.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(Block(), nn.Sequential(Block()))
    assert [site.name for site in found_in(model, torch.randn(2, 3, 5, 8))] == ["0", "1.0"]


NOT_ATTENTION: dict[str, Attention] = {
    "softmax of queries": lambda q, k, v, m: (q @ k.mT).softmax(-2) @ v,
    "softmax alone": lambda q, k, v, m: q.softmax(-1) @ v[..., :8, :].mT.contiguous()[..., :8, :],
    "gate": lambda q, k, v, m: q.softmax(-1) * q,
    "tanh between": lambda q, k, v, m: (q @ k.mT).tanh().softmax(-1) @ v,
    "values over queries": lambda q, k, v, m: v.mT @ (k @ q.mT).softmax(-1),
    "less the maximum of each key": lambda q, k, v, m: (
        ((s := q @ k.mT) - s.amax(-2, keepdim=True)).softmax(-1) @ v
    ),
    "linear attention": lambda q, k, v, m: q.relu() @ (k.relu().mT @ v),
}

PROBLEMS: dict[str, tuple[str, Attention]] = {
    "probabilities": (
        "probabilities are read",
        lambda q, k, v, m: (p := (q @ k.mT).softmax(-1)) @ v + p.sum(-1, keepdim=True),
    ),
    "tensor": ("multiplied by a tensor", lambda q, k, v, m: ((q @ k.mT) * m).softmax(-1) @ v),
    "scaled mask": ("mask is", lambda q, k, v, m: ((q @ k.mT + m) * SCALE).softmax(-1) @ v),
    "mask on turned scores": (
        "its mask is added to scores that",
        lambda q, k, v, m: ((k @ q.mT) + m.mT).softmax(-2).mT @ v,
    ),
    "boolean": (
        "not floating point",
        lambda q, k, v, m: (q @ k.mT + (m > 0)).softmax(-1) @ v,
    ),
    "two masks": ("two tensors", lambda q, k, v, m: (q @ k.mT + m + m).softmax(-1) @ v),
    "masked_fill": (
        "masked by `masked_fill`",
        lambda q, k, v, m: (q @ k.mT).masked_fill(m > 0, -9e9).softmax(-1) @ v,
    ),
    "where": (
        "masked by `where`",
        lambda q, k, v, m: torch.where(m > 0, q @ k.mT, -1).softmax(-1) @ v,
    ),
    "written": ("written in place", written_between),
    "mask written": ("written in place", mask_written_after),
    "scaled behind its back": ("written in place", scaled_behind_its_back),
    "beta": (
        "mask is",
        lambda q, k, v, m: (
            torch.baddbmm(
                m.expand(2, 3, 5, 7).flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5
            ).softmax(-1)
            @ v.flatten(0, 1)
        ),
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_attention_that_has_no_replacement_says_why(name: str) -> None:
    reason, function = PROBLEMS[name]
    (site,) = found_in(function, *tensors())
    assert site.problem is not None
    assert reason in site.problem.reason


def test_dropout_of_probabilities_is_told() -> None:
    (site,) = found_in(lambda q, k, v, m: F.dropout((q @ k.mT).softmax(-1), 0.1) @ v, *tensors())
    assert site.dropout == 0.1


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_what_is_not_attention_is_not_found(name: str) -> None:
    assert found_in(NOT_ATTENTION[name], *tensors()) == []


def kernel_named(name: str) -> Callable[..., Any]:
    def kernel(**arguments: Any) -> None: ...

    kernel.__name__ = name
    return kernel


@pytest.mark.parametrize(
    ("name", "arguments", "found"),
    [
        ("_attn_fwd", ("A", "B", "C", "Out"), True),
        ("_fwd_kernel", ("q_ptr", "k_ptr", "v_ptr", "out_ptr"), True),
        ("_layer_norm", ("x", "weight", "bias", "out"), False),
    ],
)
def test_a_kernel_of_the_users_own(name: str, arguments: tuple[str, ...], found: bool) -> None:
    """Dynamo traces a launch to this operator where there is a GPU."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    gm = capture(lambda q, k, v, out: q + k + v + out, *[torch.randn(2, 3, 5, 8)] * 4)
    tensors = [node for node in gm.graph.nodes if node.op == "placeholder"]
    tensors = (tensors * 4)[:4]
    with gm.graph.inserting_after(list(gm.graph.nodes)[3]):
        gm.graph.call_function(
            wrap.triton_kernel_wrapper_mutation,
            kwargs={
                "kernel_idx": wrap.kernel_side_table.add_kernel(kernel_named(name)),
                "constant_args_idx": 0,
                "grid": [(1, 1, 1)],
                "tma_descriptor_metadata": {},
                "kwargs": dict(zip(arguments, tensors, strict=True)),
            },
        )
    sites = find_attention(GraphView(gm))
    assert [site.problem.reason for site in sites if site.problem is not None] == (
        [f"its attention is the Triton kernel `{name}`"] if found else []
    )
