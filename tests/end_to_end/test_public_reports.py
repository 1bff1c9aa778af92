"""Faults that users of sparse and fused attention reported in public, each as a test of the whole kind of fault.

The operator alone is tested against most of them in tests/ops; here whole models are compiled.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sta_compile.errors import StaError
from sta_compile.pipeline import rewrite
from sta_compile.settings import Settings
from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import (
    CHANNELS,
    SPARSE,
    Attention,
    TinyVideo,
    check,
    check_left_alone,
    valid,
)


def latent(*grid: int, batch: int = 1) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(batch, CHANNELS, *grid)


class TestGrids:
    """FastVideo 225, 249, 620: other grids than the three that a kernel was written for crash or are wrong. FastVideo 237:
    nobody permutes tokens by hand. vllm-omni 672, xDiT 471: the output is as long as the input."""

    @pytest.mark.parametrize(
        "grid",
        [
            (3, 45, 16), (2, 16, 45), (1, 45, 45),  # 45 rows in tiles of 8
            (2, 30, 52), (8, 30, 13),  # 30 rows in tiles of 4
            (21, 9, 8), (31, 6, 8), (33, 5, 8),  # odd frames
            (13, 11, 7), (9, 8, 8), (2, 2, 200),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("window", ["auto", "tokens"])
    def test_any_grid(self, grid, window):
        asked = "auto" if window == "auto" else tuple(math.ceil(0.4 * length) for length in grid)
        model = TinyVideo()
        variant = check(model, model.sites, {"window": asked}, latent=latent(*grid))
        assert variant.report.replaced[0].grid == grid
        assert variant.report.replaced[0].kept < 0.7 or math.prod(grid) < 1000

    @pytest.mark.parametrize(
        ("grid", "reason"),
        [
            ((1, 1, 300), "shows no order of frames, rows and columns"),
            ((1, 300, 1), "shows no order of frames, rows and columns"),
            ((300, 1, 1), "shows no order of frames, rows and columns"),
            ((1, 1, 1), "is not known"),
        ],
    )
    def test_grids_of_one_axis_are_exact(self, grid, reason):
        """They are no video; nothing in their graphs tells the axes apart."""
        check_left_alone(TinyVideo(), reason, {}, latent=latent(*grid))

    @pytest.mark.parametrize(
        ("tile", "window"),
        [
            ((6, 8, 8), (18, 24, 24)),
            ((100, 100, 100), (1, 1, 1)),
            ((1, 1, 1), (1, 1, 1)),
            (None, (1000, 1, 1)),
            ((2, 1, 5), (2, 2, 2)),
        ],
    )
    def test_any_request(self, tile, window):
        """FastVideo 538: shapes that a kernel does not know end as a KeyError."""
        model = TinyVideo()
        check(model, model.sites, {"tile": tile, "window": window}, latent=latent(5, 6, 7))

    @pytest.mark.parametrize("request_", [{"window": (0, 1, 1)}, {"tile": (6, 8)}, {"window": 7}])
    def test_what_is_no_request_gets_one_clear_message(self, request_):
        with pytest.raises(StaError, match="pass"):
            Settings.resolve(request_)


class TestLengths:
    """SpargeAttn 59: sequences shorter than a block fail. PyTorch 133717, 153799: lengths beside a multiple of 128."""

    @pytest.mark.parametrize("grid", [(2, 2, 2), (1, 2, 9), (4, 5, 5), (3, 1, 43), (1, 25, 41)])
    @pytest.mark.parametrize("text", [0, 1, 127, 129])
    def test_awkward_lengths(self, grid, text):
        model = TinyVideo()
        inputs = {"latent": latent(*grid, batch=2)}
        if text:
            inputs["text"] = torch.randn(2, text, 16)
            inputs["valid"] = valid(text, text // 2, of=text)
        tokens = math.prod(grid)
        check(model, model.sites, SPARSE, **inputs)
        check_left_alone(
            model, f"{tokens} video tokens are fewer", {"min_tokens": tokens + 1}, **inputs
        )

    @pytest.mark.parametrize("poison", [1e4, math.nan])
    @pytest.mark.parametrize("window", [(1, 3, 3), "full"])
    def test_padding_has_exactly_no_weight(self, poison, window):
        """flashinfer 5090, SageAttention 99 and 115: padded text leaks into the video."""
        model = TinyVideo()
        text = torch.randn(2, 9, 16)
        poisoned = text.clone()
        poisoned[0, 5:] = poison
        with torch.no_grad():
            inputs = {"latent": latent(3, 6, 6, batch=2), "text": text, "valid": valid(5, 9, of=9)}
            options = {"sta": {**SPARSE, "window": window}}
            variant = compile_variants(model, inputs, options)["sta"]
            assert variant.report.replaced
            run = variant.run
            assert torch.equal(run(**inputs), run(**{**inputs, "text": poisoned}))

    def test_a_sample_without_any_text(self):
        model = TinyVideo()
        inputs = {"latent": latent(3, 6, 6, batch=2), "text": torch.randn(2, 4, 16)}
        check(model, model.sites, SPARSE, **inputs, valid=valid(0, 4, of=4))


class TestHeads:
    @pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 96, 120, 128, 160, 256])
    def test_head_dims(self, head_dim):
        """FastVideo, own reading: a head size without a kernel returns memory that nobody wrote."""
        model = TinyVideo(head_dim=head_dim)
        check(model, model.sites, SPARSE, latent=latent(3, 6, 6))

    @pytest.mark.parametrize("head_dim", [4, 12, 257, 264, 512])
    def test_head_dims_without_kernels_stay_dense(self, head_dim):
        """SageAttention 119, 134: 160 fails, and an attention with heads of 512 is hit as well."""
        model = TinyVideo(head_dim=head_dim)
        check_left_alone(model, f"head dim {head_dim}", {}, latent=latent(3, 6, 6))

    def test_one_attention_with_huge_heads_does_not_keep_the_others_dense(self):
        model = TinyVideo(layers=3)
        model.blocks[1].attn = Attention(16, 1, 512, 1, model.blocks[0].attn.attend)
        sites = ["blocks.0.attn", "blocks.2.attn"]
        variant = check(model.eval(), sites, SPARSE, latent=latent(3, 6, 6))
        assert [site.name for site in variant.report.refused] == ["blocks.1.attn"]

    @pytest.mark.parametrize("kv_heads", [1, 2, 4])
    def test_fewer_keys_than_queries(self, kv_heads):
        """vllm-omni 3015: grouped queries."""
        model = TinyVideo(heads=8, kv_heads=kv_heads)
        check(model, model.sites, SPARSE, latent=latent(3, 6, 6))

    def test_large_values_in_half_precision(self):
        """SageAttention 93: a sum in fp16 overflows, and the video is black."""
        model = TinyVideo()
        with torch.no_grad():
            model.blocks[0].attn.to_v.weight *= 1e3 / 0.15
            model.half()
            run = compile_variants(model, {"latent": latent(3, 6, 6).half()}, {"sta": SPARSE})[
                "sta"
            ].run
            assert run(latent=latent(3, 6, 6).half()).isfinite().all()


class CrossAttending(TinyVideo):
    """Attends to another video of the same grid, then to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = Attention(16, 2, 8, 2, self.blocks[0].attn.attend)

    def forward(self, latent: Tensor, reference: Tensor) -> Tensor:
        grid = latent.shape[2:]
        x, y = (self.patchify(a).flatten(2).transpose(1, 2) for a in (latent, reference))
        x = x + self.cross(x, y)
        x = self.blocks[0](x)
        return self.out(x).reshape(x.shape[0], *grid, CHANNELS).permute(0, 4, 1, 2, 3)


@pytest.mark.parametrize("grid", [(3, 6, 6), (2, 6, 6)])
def test_cross_attention_stays_dense_also_at_equal_length(grid):
    """sglang 18900: sparse attention reached Wan's cross-attention."""
    model = CrossAttending()
    inputs = {"latent": latent(3, 6, 6), "reference": latent(*grid) + 1}
    variant = check(model, ["blocks.0.attn"], SPARSE, **inputs)
    assert not variant.report.refused
    with torch.no_grad():
        exact = model(**inputs)
        assert relative_error(variant.run(**inputs), exact) > 1e-3


SCALE = 8**-0.5


def by_name(q, k, v, mask):
    return F.scaled_dot_product_attention(value=v, key=k, query=q, attn_mask=mask, scale=0.5)


def scale_after(q, k, v, mask):
    return ((q @ k.mT) * SCALE).softmax(-1) @ v


def scale_by_division(q, k, v, mask):
    return F.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(8), dim=-1).matmul(v)


def scale_before(q, k, v, mask):
    return torch.softmax((q * SCALE) @ k.mT, -1) @ v


def scale_on_both(q, k, v, mask):
    root = SCALE**0.5
    return ((q * root) @ (k * root).mT).softmax(-1) @ v


def with_dropout_of_nothing(q, k, v, mask):
    weights = F.dropout((q @ k.mT * SCALE).softmax(-1), 0.1, training=False)
    return weights @ v


def softmax_in_fp32(q, k, v, mask):
    return (q @ k.mT * SCALE).float().softmax(-1).to(q.dtype) @ v


def baddbmm(q, k, v, mask):
    batch, heads = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1])
    scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=SCALE)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (batch, heads))


def einsum(q, k, v, mask):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * SCALE
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def einsum_of_scaled_and_matmul(q, k, v, mask):
    return torch.einsum("abij, abkj -> abik", q * SCALE, k).softmax(-1) @ v


def merged_heads(q, k, v, mask):
    batch, heads = q.shape[:2]
    out = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)))
    return out.unflatten(0, (batch, heads))


SPELLINGS = [
    by_name, scale_after, scale_by_division, scale_before, scale_on_both,
    with_dropout_of_nothing, softmax_in_fp32, baddbmm, einsum,
    einsum_of_scaled_and_matmul, merged_heads,
]  # fmt: skip


@pytest.mark.parametrize("attend", SPELLINGS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("batch", [1, 2])
def test_spellings_of_attention(attend, batch):
    """PyTorch 100452: matchers miss masks, dropout, other places of the scale."""
    x = latent(3, 6, 6, batch=batch)
    model, options = TinyVideo(attend=attend), SPARSE
    scale = 0.5 if attend is by_name else SCALE
    twin = TinyVideo(attend=lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v, scale=scale))
    with torch.no_grad():
        variant = compile_variants(model, {"latent": x}, {"sta": options})["sta"]
        (site,) = variant.report.replaced
        with Oracle(twin, twin.sites, window_mask(site.grid, site.tiles, site.window)):
            expected = twin(x)
        assert relative_error(variant.run(latent=x), expected) < 1e-5


def softmax_over_queries(q, k, v, mask):
    return (q @ k.mT * SCALE).softmax(-2) @ v


def learned_scale(q, k, v, mask):
    return (q @ k.mT * q.new_tensor(SCALE).exp()).softmax(-1) @ v


def weights_read_twice(q, k, v, mask):
    weights = (q @ k.mT * SCALE).softmax(-1)
    return weights @ v + weights.sum(-1, keepdim=True)


def causal(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "attend", [softmax_over_queries, learned_scale, weights_read_twice, causal]
)
def test_what_is_not_matched_stays_as_it_is(attend):
    model = TinyVideo(attend=attend)
    check_left_alone(model, "sta: nothing was replaced", {}, latent=latent(3, 6, 6))


def test_a_failing_stage_leaves_the_model_as_it_was(monkeypatch):
    """FastVideo 680: a missing piece ends as "NoneType is not callable" in the user's call."""
    from sta_compile import pipeline

    def broken(*args):
        raise TypeError("'NoneType' object is not callable")

    monkeypatch.setattr(pipeline, "apply_plan", broken)
    monkeypatch.setattr(pipeline.log, "exception", lambda *args: None)
    assert rewrite is pipeline.rewrite
    model = TinyVideo()
    check_left_alone(model, "an internal error: TypeError", {}, latent=latent(3, 6, 6))
