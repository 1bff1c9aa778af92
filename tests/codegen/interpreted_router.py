"""Run in a process with TRITON_INTERPRET=1: statistics and router on the CPU against their reference.

The interpreter multiplies bf16 wrongly (triton 3.6 to 3.9), so q, k and v are fp16 here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.runs import Run
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.window import Window
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import router as launches
from sta_compile.runtime.router import choose_tiers, price_of, take_statistics
from sta_compile.tiers import router
from sta_compile.tiers.attention import Tier
from sta_compile.tiers.calibrate import price_of_error, price_of_speedup
from sta_compile.tiers.inside import inside_window
from sta_compile.tiers.predict import Context, Predicted, predict
from sta_compile.tiers.router import Costs
from sta_compile.tiers.statistics import Partition, key_statistics, query_statistics

SCALE, COSTS = 0.2, Costs()
launches.SAMPLED = 1000


def runs_of(tiling: Tiling, size: int) -> tuple[Run, ...]:
    """As many of each tile as the largest has; some may be empty."""
    most = -(-tiling.count(0, 0, 0) // size)
    found = []
    for a in range(tiling.tiles[0]):
        for b in range(tiling.tiles[1]):
            for c in range(tiling.tiles[2]):
                start, count = tiling.start(a, b, c), tiling.count(a, b, c)
                found += [
                    (start + at, max(0, min(size, count - at)))
                    for at in range(0, most * size, size)
                ]
    return tuple(found)


def near(found: Tensor, expected: Tensor, of: float) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=2)
    assert error < of, float(error)


def run(grid, tiles, roles, segments, heads, d, sizes, groups, window, price, seed=0):
    torch.manual_seed(seed)
    spec = AttentionSpec(roles, tiles=tiles, window=window).text()
    geometry = geometry_of(segments, grid, spec)
    tiling, batch = geometry.tiling, 2
    # Neighbours are alike, so that some blocks are worth skipping.
    smooth = torch.randn(batch, 1, tiling.tokens, d).cumsum(2) / 4
    q, k, v = (
        torch.randn(batch, n, sum(segments), h, d).transpose(2, 3)[:, 0]
        for n, h in ((1, heads[0]), (1, heads[1]), (1, heads[1]))
    )
    at = slice(geometry.video_key, geometry.video_key + tiling.tokens)
    for x in (q, k, v):
        x[:, :, at] = 0.5 * x[:, :, at] + smooth
    k += 3
    q, k, v = (x.half() for x in (q, k, v))
    shown = torch.ones(batch, sum(segments), dtype=torch.bool)
    beside = torch.cat([torch.arange(at.start), torch.arange(at.stop, sum(segments))])
    shown[:, beside] = torch.rand(batch, len(beside)) < 0.7
    for x in (k, v):
        x.masked_fill_(~shown[:, None, :, None], torch.nan)
    rows, blocks = (
        Partition.of(tiling, runs_of(tiling, n), g) for n, g in zip(sizes, groups, strict=True)
    )
    inside = inside_window(tiling, (Window(window),), rows.runs, blocks.runs)

    made = take_statistics(q, k, v, geometry, SCALE, rows, blocks)
    video = [x[:, :, at] for x in (q, k, v)]
    of_q, of_k = query_statistics(video[0], rows), key_statistics(*video[1:], blocks)
    some = rows.lengths > 0
    for found, expected in (
        (made.means.transpose(2, 3), of_q.groups),
        (made.size, of_q.size),
        (made.mean_k, of_k.mean_k),
        (made.mean_v, of_k.mean_v),
        (made.offsets, of_k.offsets),
        (made.parts, of_k.sizes / blocks.lengths.clamp(min=1)),
        (made.slope, of_k.slope(SCALE)),
        (made.numbers[0], of_k.total),
        (made.numbers[1], of_k.rest),
        (made.numbers[2], of_k.spread_v),
        (made.numbers[3], of_k.between_v),
    ):
        near(found, expected, 2e-3)
    near(made.spread.transpose(2, 3), of_q.spread, 2e-2)  # from squares in 16 bits

    context = Context(*(x[:, :, beside] for x in (k, v)), shown[:, beside])
    expected = predict(of_q, of_k, rows, blocks, SCALE, context)
    predicted = Predicted(*(torch.full_like(expected.skip, torch.nan) for _ in range(3)))
    routing = choose_tiers(
        *(made, k, v, shown, geometry, SCALE, rows, blocks, price, COSTS),
        *(inside.view(torch.uint8), predicted),
    )
    for found, exact in ((predicted.skip, expected.skip), (predicted.skim, expected.skim)):
        near(found[:, :, some], exact[:, :, some], 2e-2)
    # The choice is the reference's, of what the kernel predicts.
    known = Predicted(predicted.skip, predicted.skim, expected.log_skipped)
    tiers = router.choose_tiers(known, price, COSTS, inside)
    lists = router.lists_of(tiers, known, SCALE)
    assert torch.equal(routing.counts, lists.counts)
    listed = torch.arange(len(blocks.runs)) < lists.counts.sum(-1, keepdim=True)
    assert torch.equal(routing.order[listed], lists.order[listed])
    skipped = lists.bias > -torch.inf
    assert torch.equal(routing.bias > -torch.inf, skipped)
    near(routing.bias[skipped], lists.bias[skipped], 2e-3)
    # With so few rows all of them are sampled.
    of_price = made, k, v, shown, geometry, SCALE, rows, blocks, COSTS, inside.view(torch.uint8)
    for name, find in (("speedup", price_of_speedup), ("max_error", price_of_error)):
        found = price_of(*of_price, **{name: 1.5})
        torch.testing.assert_close(found, find([known], 1.5, COSTS, inside))
    return [
        float((tiers[:, :, some] == tier).float().mean())
        for tier in (Tier.SKIP, Tier.SKIM, Tier.REFINE)
    ]


def main():
    C, V = "context", "video"
    shares = [
        run(
            (4, 6, 8),
            (2, 2, 2),
            (C, V, C),
            [5, 192, 30],
            (2, 1),
            16,
            (12, 8),
            (4, 8),
            (1, 2, 2),
            0.3,
        ),
        run((3, 7, 6), (2, 2, 1), (V,), [126], (1, 1), 24, (24, 16), (4, 4), (2, 2, 1), 3e-3, 1),
        run(
            (3, 7, 6), (2, 2, 1), (V, C), [126, 3], (2, 2), 32, (24, 16), (1, 1), (2, 2, 1), 0.1, 2
        ),
        run(
            (3, 7, 6), (2, 2, 1), (V, C), [126, 3], (2, 2), 32, (24, 16), (2, 4), (2, 2, 1), 0.0, 2
        ),
    ]
    print(shares)
    print("the router is its reference")


if __name__ == "__main__":
    main()
