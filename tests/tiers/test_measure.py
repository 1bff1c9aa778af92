"""Errors that are measured row by row are those of the reference of tiered kernels."""

from __future__ import annotations

import pytest
import torch

from sta_compile.ir.geometry import Geometry
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.token_blocks import token_blocks
from sta_compile.ir.window import Window
from sta_compile.tiers.arithmetic import Fp8, Native
from sta_compile.tiers.attention import Tier, tiered_attention
from sta_compile.tiers.calibrate import price_of_error
from sta_compile.tiers.measure import excess, rows_of
from sta_compile.tiers.predict import Context, predict
from sta_compile.tiers.router import Costs, choose_tiers, error_of
from sta_compile.tiers.statistics import Partition, key_statistics, query_statistics

SCALE = 0.25


@pytest.mark.parametrize(("low", "bound"), [(Tier.SKIM, 4e-2), (Tier.REFINE, 5e-3)])
def test_rows_are_those_of_tiered_attention(low, bound):
    """With text, short blocks and grouped heads. Rows round keys without their mean, which here is near zero."""
    tiling = Tiling((4, 6, 7), (2, 2, 1))
    geometry = Geometry((tiling.tokens, 9), ("video", "keys"), tiling, Window(tiling.tiles))
    pairs = token_blocks(geometry, 24, 16)
    n, columns = tiling.tokens, len(pairs.keys) - 1
    generator = torch.manual_seed(0)
    q = torch.randn(1, 4, n, 32, generator=generator).bfloat16()
    k, v = (torch.randn(1, 2, n + 9, 32, generator=generator).bfloat16() for _ in range(2))
    shown = torch.rand(1, 9, generator=generator) < 0.6
    context = Context(k[:, :, n:], v[:, :, n:], shown)
    rows = Partition.of(tiling, pairs.queries, 4)
    blocks = Partition.of(tiling, pairs.keys[:columns], 4)
    of_q, of_k = query_statistics(q, rows), key_statistics(k[:, :, :n], v[:, :, :n], blocks)
    predicted = predict(of_q, of_k, rows, blocks, SCALE, context)
    tiers = torch.randint(0, 4, (1, 4, len(pairs.queries), columns), generator=generator)
    tiers[tiers == Tier.SKIM] = low
    text = torch.full((1, 4, len(pairs.queries), 1), int(Tier.REFINE))
    valid = torch.cat([torch.ones(1, n, dtype=torch.bool), shown], 1)
    nothing = torch.zeros_like(predicted.log_skipped[..., :1])
    expected, _ = tiered_attention(
        *(q.float(), k.float(), v.float(), torch.cat([tiers, text], -1), pairs, SCALE),
        *(Fp8(), Native(torch.float32), valid),
        torch.cat([predicted.log_skipped, nothing], -1),
        of_k.slope(SCALE),
    )
    video = (x[:, :, :n] for x in (k, v))
    wrong, size = 0.0, 0.0
    for place, row in rows_of(q, *video, of_k, rows, blocks, SCALE, predicted.log_skipped, context):
        start, length = rows.runs[place[2]].tolist()
        found = row.read(tiers[place])
        exact = expected[place[0], place[1], start : start + length]
        wrong, size = wrong + (found - exact).square().sum(), size + exact.square().sum()
    assert float(wrong / size) ** 0.5 < bound  # e4m3 by other scales; means in bf16


@pytest.mark.parametrize("leaning", [0.0, 2.0])
def test_a_bound_of_errors_is_kept_where_they_add_up(leaning):
    """Values that depend on keys alike in each block."""
    tiling = Tiling((8, 8, 8), (1, 2, 2))
    generator = torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, tiling.tokens, 16, generator=generator) for _ in range(3))
    v = v + leaning * k @ torch.randn(16, 16, generator=generator)
    runs = tuple((start, 32) for start in range(0, tiling.tokens, 32))
    rows, blocks = (Partition.of(tiling, runs, 4) for _ in range(2))
    of_k = key_statistics(k, v, blocks)
    predicted = predict(query_statistics(q, rows), of_k, rows, blocks, SCALE)

    def measured(price: float) -> tuple[float, float, float]:
        tiers = choose_tiers(predicted, price, Costs())
        wrong, size = 0.0, 0.0
        for place, row in rows_of(q, k, v, of_k, rows, blocks, SCALE, predicted.log_skipped):
            wrong += float((row.read(tiers[place]) - row.exact).square().sum())
            size += float(row.exact.square().sum())
        factor = excess(q, k, v, of_k, rows, blocks, SCALE, tiers, predicted)
        return factor, (wrong / size) ** 0.5, float(error_of(tiers, predicted).mean())

    factor, error, expected = measured(1.0)
    assert factor * expected == pytest.approx(error**2, rel=1e-3)
    price = float(price_of_error([predicted], error / 3, Costs(), excesses=[factor]))
    assert error / 8 < measured(price)[1] < 0.6 * error
