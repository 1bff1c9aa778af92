"""Statistics by their definitions, masses against softmax, and what must hold of a choice whatever is predicted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sta_compile import StaError
from sta_compile.ir.geometry import Geometry
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.token_blocks import token_blocks
from sta_compile.ir.token_groups import compact_groups
from sta_compile.ir.window import Window
from sta_compile.tiers.attention import Tier
from sta_compile.tiers.calibrate import price_of_error, price_of_speedup
from sta_compile.tiers.inside import inside_window
from sta_compile.tiers.predict import LARGEST_BIAS, Context, Predicted, masses, predict
from sta_compile.tiers.router import Costs, choose_tiers, costs_of, error_of, lists_of
from sta_compile.tiers.statistics import (
    STAND_OUT,
    Partition,
    key_statistics,
    query_statistics,
)

COSTS = Costs()


def runs_of(tiling: Tiling, size: int) -> tuple[tuple[int, int], ...]:
    """Each tile cut in as many runs as the largest one has, of at most `size` tokens; some may be empty."""
    most = -(-tiling.count(0, 0, 0) // size)
    tiles = [
        (a, b, c)
        for a in range(tiling.tiles[0])
        for b in range(tiling.tiles[1])
        for c in range(tiling.tiles[2])
    ]
    return tuple(
        (tiling.start(*tile) + at, max(0, min(size, tiling.count(*tile) - at)))
        for tile in tiles
        for at in range(0, most * size, size)
    )


def operands(tiling: Tiling, heads=(2, 1), d=16, seed=0, size=1.0) -> list[Tensor]:
    generator = torch.manual_seed(seed)
    return [
        torch.randn(2, h, tiling.tokens, d, generator=generator) * size
        for h in (heads[0], *heads[1:] * 2)
    ]


tilings = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 7)).flatmap(
    lambda grid: st.builds(
        Tiling, st.just(grid), st.tuples(*(st.integers(1, min(n, 3)) for n in grid))
    )
)


@settings(max_examples=30)
@given(st.tuples(*[st.integers(1, 6)] * 3), st.data(), st.integers(1, 16))
def test_groups_are_balanced_and_cover_the_block(extents, data, count):
    tokens = extents[0] * extents[1] * extents[2]
    first = data.draw(st.integers(0, tokens - 1))
    length = data.draw(st.integers(0, tokens - first))
    groups = compact_groups(extents, first, length, count)
    sizes = [groups.count(group) for group in range(count)]
    assert sum(sizes) == len(groups) == length
    assert max(sizes) - min(sizes) <= 2


def test_groups_are_compact():
    assert list(compact_groups((2, 3, 4), 0, 12, 4)) == [0, 0, 2, 2, 0, 1, 2, 3, 1, 1, 3, 3]
    groups = torch.tensor(list(compact_groups((6, 8, 8), 128, 128, 4))).view(2, 8, 8)
    corners = [groups[:, i : i + 4, j : j + 4].unique() for i in (0, 4) for j in (0, 4)]
    assert sorted(int(corner) for corner in corners) == [0, 1, 2, 3]


@settings(max_examples=25)
@given(
    tilings,
    st.sampled_from([(5, 7), (12, 8)]),
    st.sampled_from([(1, 1), (3, 4)]),
    st.integers(0, 9),
)
def test_statistics_are_what_they_say(tiling, sizes, groups, seed):
    q, k, v = operands(tiling, seed=seed)
    rows, blocks = (
        Partition.of(tiling, runs_of(tiling, n), g) for n, g in zip(sizes, groups, strict=True)
    )
    of_q, of_k = query_statistics(q, rows), key_statistics(k, v, blocks)
    for i, (start, length) in enumerate(rows.runs.tolist()):
        part = q[:, :, start : start + length]
        expected = part.square().sum(-1).sum(-1) / max(length, 1)
        torch.testing.assert_close(of_q.size[:, :, i], expected)
        for g in range(groups[0]):
            of_group = part[:, :, rows.groups[start : start + length] == g]
            assert rows.sizes[i, g] == of_group.shape[2]
            expected = of_group.sum(2) / max(of_group.shape[2], 1)
            torch.testing.assert_close(of_q.groups[:, :, i, g], expected)
            if of_group.shape[2]:
                expected = of_group.var(2, unbiased=False)
                torch.testing.assert_close(of_q.spread[:, :, i, g], expected)
    cross = torch.zeros_like(of_k.cross)
    for j, (start, length) in enumerate(blocks.runs.tolist()):
        if not length:
            continue
        keys, values = (x[:, :, start : start + length] for x in (k, v))
        torch.testing.assert_close(of_k.mean_k[:, :, j], keys.mean(2))
        torch.testing.assert_close(of_k.mean_v[:, :, j], values.mean(2))
        for found, x in ((of_k.total, keys), (of_k.spread_v, values)):
            torch.testing.assert_close(
                found[:, :, j], x.var(2, unbiased=False).sum(-1), rtol=1e-4, atol=1e-5
            )
        cross += (keys - keys.mean(2, True)).mT @ (values - values.mean(2, True))
        rest, between = torch.zeros(2, 1), torch.zeros(2, 1)
        for sample in range(2):
            x, y = keys[sample, 0] - keys[sample, 0].mean(0), values[sample, 0]
            group = blocks.groups[start : start + length].clone()
            farthest = x.square().sum(-1).argsort(descending=True)[:STAND_OUT]
            group[farthest] = torch.arange(groups[1], groups[1] + len(farthest), dtype=torch.uint8)
            for g in range(groups[1] + STAND_OUT):
                of_group = x[group == g]
                assert of_k.sizes[sample, 0, g, j] == len(of_group)
                if len(of_group):
                    torch.testing.assert_close(of_k.offsets[sample, 0, g, j], of_group.mean(0))
                    rest[sample] += (of_group - of_group.mean(0)).square().sum()
                    off = y[group == g].mean(0) - y.mean(0)
                    between[sample] += len(of_group) * off.square().sum()
        torch.testing.assert_close(of_k.rest[:, :, j], rest / length, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(of_k.between_v[:, :, j], between / length, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_k.cross, cross / tiling.tokens, rtol=1e-4, atol=1e-5)


@settings(max_examples=20)
@given(tilings, st.integers(0, 9), st.booleans())
def test_masses_of_single_tokens_are_those_of_softmax(tiling, seed, text):
    """With a group for each token nothing is estimated."""
    q, k, v = operands(tiling, seed=seed)
    rows, blocks = (Partition.of(tiling, runs_of(tiling, n), n) for n in (6, 4))
    context, keys, shown = None, k, torch.ones(2, 1, 1, tiling.tokens, dtype=torch.bool)
    if text:
        more = [torch.randn(2, 1, 5, 16) for _ in range(2)]
        context = Context(*more, torch.rand(2, 5) < 0.7)
        keys = torch.cat([k, more[0]], 2)
        shown = torch.cat([shown, context.shown[:, None, None]], -1)
    found = masses(
        query_statistics(q, rows), key_statistics(k, v, blocks), rows, blocks, 0.3, context
    )
    weights = (0.3 * q @ keys.mT).masked_fill(~shown, -torch.inf).softmax(-1)
    for i, (start, length) in enumerate(rows.runs.tolist()):
        for j, (key, count) in enumerate(blocks.runs.tolist()):
            of_pair = weights[:, :, start : start + length, key : key + count].sum(-1)
            order = rows.groups[start : start + length].long()
            torch.testing.assert_close(
                found.weight[:, :, i, order, j], of_pair, rtol=1e-4, atol=1e-6
            )


def predictions(seed: int, blocks=37) -> Predicted:
    generator = torch.manual_seed(seed)
    skip, skim = (torch.randn(1, 2, 5, blocks, generator=generator).mul(6).exp() for _ in range(2))
    skip[..., ::5], skim[..., ::7] = 0, 0
    return Predicted(skip, skim * 1e-3, torch.full_like(skip, 5.0))


@settings(max_examples=40)
@given(st.integers(0, 999), st.floats(0, 1e6), st.floats(0, 1e6), st.booleans())
def test_no_pair_gets_cheaper_and_no_error_grows_as_the_price_falls(seed, a, b, windowed):
    predicted = predictions(seed)
    inside = torch.rand(1, 5, 37) < 0.5 if windowed else None
    cheap, dear = (choose_tiers(predicted, price, COSTS, inside) for price in sorted([a, b]))
    assert bool((cheap >= dear).all())
    assert bool((error_of(cheap, predicted) <= error_of(dear, predicted)).all())
    assert bool((costs_of(cheap, COSTS) >= costs_of(dear, COSTS)).all())


def test_price_zero_refines_all_that_a_window_shows():
    predicted = predictions(0)
    predicted.skip[..., 3], predicted.skim[..., 3] = torch.nan, torch.nan
    inside = torch.rand(2, 5, 37) < 0.5
    tiers = choose_tiers(predicted, 0.0, COSTS, inside)
    assert torch.equal(tiers == Tier.REFINE, inside.expand_as(tiers))
    assert torch.equal(tiers == Tier.SKIP, ~inside.expand_as(tiers))
    assert bool(
        (choose_tiers(predicted, 1e30, COSTS)[..., 3] == Tier.REFINE).all()
    )  # NaN is unknown


@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(1, 140))
def test_lists_are_ascending_and_say_each_block_once(seed, blocks):
    predicted = predictions(seed, blocks)
    tiers = choose_tiers(predicted, 1.0, COSTS)
    routing = lists_of(tiers, predicted, scale=0.5)
    assert routing.bias.shape[-1] % 128 == 0
    for of_pair, order, (refined, skimmed), bias in zip(
        tiers.flatten(0, 2),
        routing.order.flatten(0, 2),
        routing.counts.flatten(0, 2),
        routing.bias.flatten(0, 2),
        strict=True,
    ):
        assert torch.equal(order[:refined], (of_pair == Tier.REFINE).nonzero()[:, 0].int())
        assert torch.equal(
            order[refined : refined + skimmed], (of_pair == Tier.SKIM).nonzero()[:, 0].int()
        )
        assert bool((order[refined + skimmed :] == -1).all())
        skipped = torch.full((len(bias),), -torch.inf)
        skipped[:blocks][of_pair == Tier.SKIP] = 10.0
        assert torch.equal(bias, skipped)


HARD = {
    "large logits": lambda q, k, v: (q * 30, k, v),
    "large values": lambda q, k, v: (q, k, v * 1e3),
    "far keys": lambda q, k, v: (q, k + 30, v),
    "equal keys": lambda q, k, v: (q, k[:, :, :1].expand_as(k), v),
    "zeros": lambda q, k, v: (q * 0, k * 0, v * 0),
}


@pytest.mark.parametrize("case", HARD)
def test_predictions_are_finite_and_not_negative(case):
    tiling = Tiling((3, 7, 6), (2, 2, 1))
    q, k, v = (x.bfloat16() for x in HARD[case](*operands(tiling, (2, 2))))
    rows, blocks = (Partition.of(tiling, runs_of(tiling, n), 4) for n in (24, 16))
    assert int(rows.lengths.min()) == 0
    found = predict(query_statistics(q, rows), key_statistics(k, v, blocks), rows, blocks, 0.25)
    for x in (found.skip, found.skim):
        assert bool(x.isfinite().all())
        assert bool((x >= 0).all())
    some = blocks.lengths > 0
    above = found.log_skipped - blocks.lengths.log()
    full_rows = rows.lengths > 0
    assert bool((above[:, :, full_rows][..., some] <= LARGEST_BIAS + 1e-5).all())
    if case == "equal keys":
        assert float(found.skip.max()) < 1e-4
    assert bool((found.log_skipped[..., ~some] == -torch.inf).all())


@settings(max_examples=20)
@given(tilings, st.tuples(*[st.integers(1, 4)] * 3))
def test_inside_is_what_blocks_see(tiling, window):
    geometry = Geometry((tiling.tokens,), ("video",), tiling, Window(window))
    blocks = token_blocks(geometry, 5, 4)
    runs = (torch.tensor(x, dtype=torch.int32) for x in (blocks.queries, blocks.keys))
    full = Window(tiling.tiles)
    found = inside_window(tiling, (Window(window), full), *runs)
    assert torch.equal(found[0], torch.tensor(blocks.visible))
    assert bool(found[1].all())


def test_grouped_heads_are_repeated_heads():
    tiling = Tiling((3, 6, 6), (1, 2, 2))
    q, k, v = operands(tiling, (4, 2))
    rows, blocks = (Partition.of(tiling, runs_of(tiling, n), 4) for n in (24, 16))
    a = predict(query_statistics(q, rows), key_statistics(k, v, blocks), rows, blocks, 0.25)
    repeated = key_statistics(*(x.repeat_interleave(2, 1) for x in (k, v)), blocks)
    b = predict(query_statistics(q, rows), repeated, rows, blocks, 0.25)
    for x, y in ((a.skip, b.skip), (a.skim, b.skim), (a.log_skipped, b.log_skipped)):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("windowed", [False, True])
def test_calibrated_prices_keep_their_promise(windowed):
    many = [predictions(seed) for seed in range(3)]
    inside = torch.rand(2, 5, 37, generator=torch.manual_seed(0)) < 0.6 if windowed else None

    def outcome(price: Tensor) -> tuple[float, float]:
        tiers = [choose_tiers(each, float(price), COSTS, inside) for each in many]
        cost = torch.stack([costs_of(each, COSTS).mean() for each in tiers]).mean()
        errors = [error_of(*both).mean() for both in zip(tiers, many, strict=True)]
        return float(cost), float(torch.stack(errors).mean().sqrt())

    for speedup in (2.0, 3.0, 10.0):
        price = price_of_speedup(many, speedup, COSTS, inside)
        assert outcome(price)[0] * speedup <= 1 + 1e-5
        if price > 1e-20:  # else what makes no error is enough
            assert outcome(price * 0.999)[0] * speedup > 1 - 2e-3
    hidden = outcome(torch.zeros(()))[1]
    for error in (1e-2, 1e-1, 10.0):
        price = price_of_error(many, hidden + error, COSTS, inside)
        assert outcome(price)[1] <= (hidden + error) * (1 + 1e-4)
        assert outcome(price * 1.001)[1] > hidden + error - 1e-4
    assert price_of_error(many, 1e9, COSTS, inside) > 1e9
    assert price_of_speedup(many, 1.0, COSTS) == 0
    if windowed:
        assert price_of_error(many, hidden / 2, COSTS, inside) == 0
    with pytest.raises(StaError, match="skipping every block"):
        price_of_speedup(many, 100.0, COSTS)
    with pytest.raises(StaError, match="pass a positive one"):
        price_of_error(many, 0.0, COSTS)
