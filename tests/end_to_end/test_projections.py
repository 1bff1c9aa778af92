"""Attention between its linear layers: fused ones, those of nn.MultiheadAttention, gates, and every order of dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.models import randomize
from tests.end_to_end.spelled import GRID, check_models, latent
from tests.end_to_end.tiny import CHANNELS, SPARSE

WIDTH, HEADS = 16, 2
Forward = Callable[["Fused", Tensor], Tensor]


class Fused(nn.Module):
    """[batch, tokens, width] -> the same; `forward_as` is the way that a test writes it."""

    def __init__(self, forward_as: Forward) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate = nn.Linear(WIDTH, HEADS)
        self.to_out = nn.Linear(WIDTH, WIDTH)
        self.forward_as = forward_as

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_as(self, x)


class Model(nn.Module):
    """A block for each attention; with `sequence_first` their tokens are [tokens, batch, width]."""

    def __init__(self, attentions: list[nn.Module], sequence_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patchify = nn.Conv3d(CHANNELS, WIDTH, 1)
        self.norm = nn.LayerNorm(WIDTH)
        self.attentions = nn.ModuleList(attentions)
        self.out = nn.Linear(WIDTH, CHANNELS)
        self.sequence_first = sequence_first
        randomize(self)
        self.eval()

    @property
    def sites(self) -> list[str]:
        return [f"attentions.{i}" for i in range(len(self.attentions))]

    def forward(self, latent: Tensor) -> Tensor:
        x = self.patchify(latent).flatten(2)
        x = x.permute(2, 0, 1) if self.sequence_first else x.transpose(1, 2)
        for attention in self.attentions:
            x = x + attention(self.norm(x))
        x = self.out(x)
        x = x.transpose(0, 1) if self.sequence_first else x
        return x.unflatten(1, GRID).permute(0, 4, 1, 2, 3)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, heads, tokens, features] -> [batch, tokens, width]"""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def chunked(self: Fused, x: Tensor) -> Tensor:
    q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
    return self.to_out(attend(q, k, v))


def split(self: Fused, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).split(WIDTH, dim=-1)
    q, k, v = (t.view(*t.shape[:2], HEADS, -1).permute(0, 2, 1, 3) for t in (q, k, v))
    return self.to_out(attend(q, k, v))


def unbound(self: Fused, x: Tensor) -> Tensor:
    """As in the original HunyuanVideo: B L (K H D) -> K B H L D."""
    qkv = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    return self.to_out(attend(*qkv.unbind(0)))


def indexed(self: Fused, x: Tensor) -> Tensor:
    qkv = self.qkv(x).unflatten(2, (3, HEADS, -1))
    return self.to_out(attend(*(qkv[:, :, i].transpose(1, 2) for i in range(3))))


def per_head(self: Fused, x: Tensor) -> Tensor:
    """As in Step-Video: each head has its own q, k and v side by side."""
    qkv = self.qkv(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
    return self.to_out(attend(*qkv.split(WIDTH // HEADS, dim=-1)))


def gated(self: Fused, x: Tensor) -> Tensor:
    """As in LTX-2: a gate per head and token after the attention."""
    q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return self.to_out((out * 2 * torch.sigmoid(self.gate(x)).unsqueeze(-1)).flatten(2))


def samples_merged(self: Fused, x: Tensor) -> Tensor:
    """Packed tokens (batch * tokens, heads, features) up to the attention."""
    batch, tokens = x.shape[:2]
    q, k, v = self.qkv(x.flatten(0, 1)).unflatten(1, (3, HEADS, -1)).unbind(1)
    q, k, v = (t.unflatten(0, (batch, tokens)).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
    return self.to_out(out.flatten(1)).unflatten(0, (batch, tokens))


def heads_first(self: Fused, x: Tensor) -> Tensor:
    """[batch * heads, tokens, features], as in early diffusers."""
    q, k, v = (
        t.reshape(*x.shape[:2], HEADS, -1).permute(0, 2, 1, 3).reshape(-1, x.shape[1], 8)
        for t in self.qkv(x).chunk(3, -1)
    )
    out = F.scaled_dot_product_attention(q, k, v)
    out = out.reshape(-1, HEADS, *out.shape[1:]).permute(0, 2, 1, 3)
    return self.to_out(out.reshape(x.shape))


FUSED = [chunked, split, unbound, indexed, per_head, gated, samples_merged]


@pytest.mark.parametrize("batch", [1, 2])
def test_fused_projections(batch: int) -> None:
    model = Model([Fused(forward_as) for forward_as in FUSED])
    check_models(model, model, model.sites, latent=latent(batch))


def test_heads_merged_into_the_batch() -> None:
    model, twin = Model([Fused(heads_first)]), Model([Fused(chunked)])
    check_models(model, twin, model.sites, latent=latent())


def sequence_first(self: Fused, x: Tensor) -> Tensor:
    """[tokens, batch, width], as in Megatron and Open-Sora-Plan."""
    q, k, v = (t.unflatten(2, (HEADS, -1)).permute(1, 2, 0, 3) for t in self.qkv(x).chunk(3, -1))
    out = F.scaled_dot_product_attention(q, k, v)
    return self.to_out(out.permute(2, 0, 1, 3).flatten(2))


def test_sequence_first() -> None:
    model = Model([Fused(sequence_first), Fused(sequence_first)], sequence_first=True)
    check_models(model, model, model.sites, latent=latent())


class WithPositions(nn.Module):
    """Positions are added to what queries and keys are made of, not to values; in linear layers or nn.MultiheadAttention."""

    def __init__(self, multihead: bool) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.positions = nn.Parameter(torch.empty(math.prod(GRID), WIDTH))
        self.multihead = multihead

    def forward(self, x: Tensor) -> Tensor:
        placed = x + self.positions
        if self.multihead:
            out: Tensor = self.mha(placed, placed, x, need_weights=False)[0]
            return out
        weights, biases = self.mha.in_proj_weight.chunk(3), self.mha.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(tokens, weight, bias).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for tokens, weight, bias in zip((placed, placed, x), weights, biases, strict=True)
        )
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.mha.out_proj(out)


def test_positions_added_in_every_layer() -> None:
    model, twin = (Model([WithPositions(m), WithPositions(m)]) for m in (True, False))
    variant = check_models(model, twin, model.sites, latent=latent())
    assert variant.report.conversions == 4  # the tokens, in and out, and each table
    check_models(twin, twin, twin.sites, latent=latent())


def no_batch(self: Fused, x: Tensor) -> Tensor:
    """One sample without a batch dimension, [heads, tokens, features]."""
    q, k, v = (t.unflatten(1, (HEADS, -1)).transpose(0, 1) for t in self.qkv(x[0]).chunk(3, -1))
    return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))[None]


def test_one_sample_without_a_batch() -> None:
    model, twin = Model([Fused(no_batch)]), Model([Fused(chunked)])
    check_models(model, twin, model.sites, latent=latent(1))


class MultiHead(nn.Module):
    """nn.MultiheadAttention of the tokens, and its twin in linear layers and SDPA."""

    def __init__(self, *, spelled: bool, batch_first: bool, **options: bool) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **options)
        self.spelled, self.batch_first = spelled, batch_first
        self.weights = False
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.spelled:
            out, weights = self.mha(x, x, x, need_weights=self.weights, attn_mask=self.mask)
            return out if weights is None else out + weights.mean()
        x = x if self.batch_first else x.transpose(0, 1)
        qkv = F.linear(x, self.mha.in_proj_weight, self.mha.in_proj_bias)
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
        out = self.mha.out_proj(attend(q, k, v))
        return out if self.batch_first else out.transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(batch_first: bool) -> None:
    def model(spelled: bool) -> Model:
        blocks: list[nn.Module] = [
            MultiHead(spelled=spelled, batch_first=batch_first, bias=bias) for bias in (True, False)
        ]
        return Model(blocks, sequence_first=not batch_first)

    twin = model(spelled=False)
    variant = check_models(model(spelled=True), twin, twin.sites, latent=latent())
    assert not [n for n in variant.gm.graph.nodes if "multi_head" in str(n.target)]


def by_einsum(self: Fused, x: Tensor) -> Tensor:
    q, k, v = (t.unflatten(2, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
    p = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5).softmax(-1)
    return self.to_out(torch.einsum("bhqk,bkhd->bqhd", p, v).flatten(2))


def test_through_aotautograd() -> None:
    """The views around the operator are what the later stages are told of."""
    blocks = [MultiHead(spelled=True, batch_first=True), Fused(by_einsum), Fused(heads_first)]
    twins = [MultiHead(spelled=False, batch_first=True), Fused(chunked), Fused(chunked)]
    model, twin = Model(blocks), Model(twins)
    check_models(model, twin, twin.sites, {"finish": aot_eager}, latent=latent())


@pytest.mark.parametrize(
    ("reason", "options", "weights", "mask"),
    [
        ("probabilities are read", {}, True, False),
        ("with attn_mask", {}, False, True),
        ("a key of its own", {"add_bias_kv": True}, False, False),
    ],
)
def test_multihead_attention_that_is_left_alone(
    reason: str, options: dict[str, bool], weights: bool, mask: bool
) -> None:
    block = MultiHead(spelled=True, batch_first=True, **options)
    block.weights = weights
    block.mask = torch.ones(144, 144).triu(1).bool() if mask else None
    model, inputs = Model([block]), {"latent": latent()}
    with torch.no_grad():
        variant = compile_variants(model, inputs, {"sta": SPARSE})["sta"]
        assert relative_error(variant.run(**inputs), model(**inputs)) < 1e-5
    (site,) = variant.report.refused
    assert reason in site.reason


@pytest.mark.parametrize("fast", [True, False])
def test_encoder_layers(fast: bool) -> None:
    """torch's fast path is one operator for the whole layer; without it the attention is replaced."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
    model, inputs = Model([layer]), {"latent": latent()}
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.no_grad():
            variant = compile_variants(model, inputs, {"sta": {**SPARSE, "window": "full"}})["sta"]
            assert relative_error(variant.run(**inputs), model(**inputs)) < 1e-5
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert len(variant.report.replaced) == (not fast)
    assert [site.hint for site in variant.report.refused] == (
        ["call torch.backends.mha.set_fastpath_enabled(False)"] if fast else []
    )
