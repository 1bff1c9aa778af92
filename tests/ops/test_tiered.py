"""precision="tiered" of the operator on a CPU against the definition: what is refined, what its means stand for, what the
price changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sta_compile.codegen.cutlass_blocks import FP8_KEYS, TIER_ROWS
from sta_compile.errors import StaError
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.trade import EXACT, Trade
from sta_compile.ir.visibility import Visibility
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime.quantize import shown_keys
from sta_compile.runtime.tiered import TierPlan, routed
from tests import oracle
from tests.ops.test_fp8 import CASES, arguments


def tiered(case, price, window=None, **changes):
    given, seen = arguments(case, "tiered", **changes)
    spec = replace(AttentionSpec.parse(given[7]), trade=Trade(price))
    spec = spec if window is None else replace(spec, window=window)
    given[7] = spec.text()
    return given, seen


def with_means(given, seen):
    """Dense attention over the keys that a window shows, and the means of each other block as keys of their own."""
    q, k, v, lengths, flags, segments, grid, spec, scale, mask, video = given
    visible = Visibility(geometry_of(segments, grid, spec), lengths, mask, flags, video)
    geometry = visible.geometry
    plan = TierPlan.of(geometry, TIER_ROWS, FP8_KEYS, 0, q.device)
    keys, predicted, _ = routed(q, k, v, plan, shown_keys(visible, k), scale, EXACT)
    share = q.shape[1] // k.shape[1]
    mean_k, mean_v = (x.repeat_interleave(share, 1).float() for x in (keys.mean_k, keys.mean_v))
    batch, heads, queries, _ = q.shape
    bias = torch.full((batch, heads, queries, len(plan.blocks.runs)), -torch.inf)
    seen = seen.expand(batch, heads, -1, -1)
    dense = visible.whole if visible.whole is not None else torch.zeros(batch, dtype=torch.bool)
    for r, (start, length) in enumerate(plan.rows.runs.tolist()):
        at = slice(geometry.video_query + start, geometry.video_query + start + length)
        for j, (first, _) in enumerate(plan.blocks.runs.tolist()):
            outside = ~seen[:, :, at.start, geometry.video_key + first] & ~dense[:, None]
            log = predicted.log_skipped[:, :, r, j].masked_fill(~outside, -torch.inf)
            bias[:, :, at, j] = log[..., None]
    k, v = (x.nan_to_num().repeat_interleave(share, 1) for x in (k, v))
    scores = torch.cat(
        [
            (scale * q @ k.mT).masked_fill(~seen, -torch.inf),
            (scale * q @ mean_k.nan_to_num().mT) + bias,
        ],
        -1,
    )
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights @ torch.cat([v, mean_v.nan_to_num()], 2)
    slope = keys.slope(scale).float().repeat_interleave(share, 1)
    out = out + weights[..., k.shape[2] :].sum(-1, keepdim=True) * (q @ slope.nan_to_num())
    out = out / total.clamp(min=1e-30)
    return out, (total.log() + top)[..., 0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_at_price_0_the_window_is_exact_and_means_stand_for_the_rest(case, masked):
    given, seen = tiered(case, 0.0, masked=masked)
    out, lse = torch.ops.sta.attention(*given)
    expected, expected_lse = with_means(given, seen)
    # The means are multiplied in bfloat16.
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=2e-2, rtol=0)
    assert out.stride() == torch.empty_like(given[0]).stride()


@pytest.mark.parametrize("case", ["ragged", "text, a dense sample", "keys only"])
def test_price_0_and_a_full_window_is_the_native_precision(case):
    given, _ = tiered(case, 0.0, window="full")
    out, lse = torch.ops.sta.attention(*given)
    native = list(given)
    native[7] = replace(AttentionSpec.parse(given[7]), precision="native").text()
    expected, expected_lse = torch.ops.sta.attention(*native)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_a_higher_price_errs_more():
    given, _ = tiered("ragged", 0.0, window="full")
    exact, _ = torch.ops.sta.attention(*given)
    errors = []
    for price in (1e-3, 1e-1, 1e1, 1e4):
        given[7] = replace(AttentionSpec.parse(given[7]), trade=Trade(price)).text()
        out, _ = torch.ops.sta.attention(*given)
        errors.append(float((out - exact).norm() / exact.norm()))
    assert errors == sorted(errors)
    assert errors[0] < 1e-2
    assert errors[-1] > 0.3


def test_dense_samples_and_text_have_no_tiers():
    given, seen = tiered("text, a dense sample", 1e6)
    out, _ = torch.ops.sta.attention(*given)
    q, k, v = given[:3]
    exact, _ = oracle.attention(q, k.nan_to_num(), v.nan_to_num(), seen, 0.2)
    torch.testing.assert_close(out[1], exact[1])
    torch.testing.assert_close(out[:, :, :40], exact[:, :, :40])
    assert not torch.allclose(out[0, :, 40:208], exact[0, :, 40:208], atol=1e-2)


def test_gradients_and_what_they_are_of_are_native():
    given, _ = tiered("ragged", 1.0)
    native = list(given)
    native[7] = replace(AttentionSpec.parse(given[7]), precision="native", trade=Trade()).text()
    q = given[0].clone().requires_grad_()
    out, _ = torch.ops.sta.attention(q, *given[1:])
    expected, _ = torch.ops.sta.attention(*native)
    torch.testing.assert_close(out.detach(), expected)


TRADES = {
    "price=0.001": Trade(1e-3),
    "speedup=3.0": Trade(0.01, speedup=3.0),
    "max_error=0.05": Trade(max_error=0.05),
}


@pytest.mark.parametrize("text", TRADES)
def test_a_trade_is_part_of_the_text(text):
    spec = AttentionSpec(("video",), (2, 2, 2), "full", precision="tiered", trade=TRADES[text])
    assert spec.text().endswith(f"precision=tiered {text}")
    assert AttentionSpec.parse(spec.text()).text() == spec.text()


def test_a_speedup_or_an_error_is_kept():
    """As far as blocks allow; errors are those that are predicted, here of values without a common part."""
    for name, bounds in (("speedup", (1.0, 3.0, 30.0)), ("max_error", (10.0, 0.1, 1e-3))):
        outs = []
        for bound in bounds:
            given, _ = tiered("ragged", 0.0, "full")
            spec = replace(AttentionSpec.parse(given[7]), trade=Trade(**{name: bound}))
            given[7] = spec.text()
            outs.append(torch.ops.sta.attention(*given)[0])
        given, _ = tiered("ragged", 0.0, "full")
        exact = torch.ops.sta.attention(*given)[0]
        errors = [float((out - exact).norm() / exact.norm()) for out in outs]
        assert errors == sorted(errors, reverse=name == "max_error")
    assert errors[-1] < 1e-2


@pytest.mark.parametrize(
    "given",
    [{"price": x} for x in (-1.0, float("nan"), float("inf"))]
    + [{"speedup": 0.5}, {"speedup": 99.0}, {"max_error": 0.0}, {"speedup": 2.0, "max_error": 0.1}],
    ids=str,
)
def test_a_trade_is_one_that_can_be_kept(given):
    with pytest.raises(StaError, match="pass one"):
        Trade(**given)


@pytest.mark.parametrize("precision", ["fp8", "nvfp4", "tiered"])
def test_no_samples(precision):
    spec = AttentionSpec(("video",), (1, 2, 2), "full", precision=precision).text()
    x = torch.empty(0, 2, 24, 32)
    out, lse = torch.ops.sta.attention(x, x, x, None, None, [24], [1, 4, 6], spec, 0.2)
    assert (out.shape, lse.shape) == (x.shape, (0, 2, 24))
