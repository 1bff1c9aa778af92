"""Tiered attention against attention by its definition, and what each precision may cost."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sta_compile import StaError
from sta_compile.ir.geometry import Geometry
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.token_blocks import TokenBlocks, token_blocks
from sta_compile.ir.window import Window
from sta_compile.tiers.arithmetic import Fp8, Native, Nvfp4, Refined
from sta_compile.tiers.attention import Tier, tiered_attention
from sta_compile.tiers.statistics import Partition, key_statistics

EXACT = Native(torch.float32)
LOW = [Fp8(), Nvfp4(), Nvfp4("nvfp4"), Refined()]


def video(grid=(4, 8, 8), tiles=(2, 2, 1), window=(1, 1, 1), text=0, roles=("video", "context")):
    tiling = Tiling(grid, tiles)
    lengths = tuple(tiling.tokens if role == "video" else text for role in roles)
    return Geometry(lengths, roles, tiling, Window(window))


def operands(geometry: Geometry, heads=2, kv_heads=2, d=32, batch=1, seed=0) -> list[Tensor]:
    gen = torch.manual_seed(seed)
    sizes = ((heads, geometry.queries), (kv_heads, geometry.keys), (kv_heads, geometry.keys))
    return [torch.randn(batch, h, n, d, generator=gen) for h, n in sizes]


def all_of(tier: Tier, blocks: TokenBlocks, batch=1, heads=2) -> Tensor:
    return torch.full((batch, heads, len(blocks.queries), len(blocks.keys)), int(tier))


def of_tokens(x: Tensor, blocks: TokenBlocks) -> Tensor:
    """A value for each pair of blocks [..., i, j] as one for each pair of tokens."""
    rows = torch.tensor([length for _, length in blocks.queries])
    columns = torch.tensor([length for _, length in blocks.keys])
    return x.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, kept: Tensor | None = None) -> Tensor:
    """softmax(scale q k^T) v in float64 over the pairs that are kept."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(share, 1) for x in (k, v))
    scores = scale * q.double() @ k.mT
    if kept is not None:
        scores = scores.masked_fill(~kept, -torch.inf)
    return scores.softmax(-1) @ v


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@settings(max_examples=40)
@given(
    grid=st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(1, 7)),
    data=st.data(),
    text=st.integers(0, 9),
    before=st.booleans(),
    role=st.sampled_from(["context", "keys"]),
    share=st.sampled_from([1, 2]),
    size=st.sampled_from([(4, 4), (8, 16), (128, 128)]),
    seed=st.integers(0, 99),
)
def test_tiers_that_are_exact_are_the_attention_of_the_kept_pairs(
    grid, data, text, before, role, share, size, seed
):
    tiles = tuple(data.draw(st.integers(1, length)) for length in grid)
    roles = (role, "video") if before else ("video", role)
    geometry = video(grid, tiles, text=text, roles=roles)
    blocks = token_blocks(geometry, *size)
    q, k, v = operands(geometry, 2, 2 // share, d=16, seed=seed)
    tiers = torch.randint(0, 4, (1, 2, len(blocks.queries), len(blocks.keys)))
    tiers[tiers == Tier.SKIP] = Tier.DROP
    valid = torch.rand(1, geometry.keys) < 0.9
    found, lse = tiered_attention(q, k, v, tiers, blocks, 0.3, EXACT, EXACT, valid)
    kept = of_tokens(tiers > Tier.DROP, blocks) & valid[:, None, None]
    expected = dense(q, k, v, 0.3, kept).nan_to_num(0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    scores = (0.3 * q.double() @ k.double().repeat_interleave(share, 1).mT).masked_fill(
        ~kept, -torch.inf
    )
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


@settings(max_examples=40)
@given(
    grid=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
    data=st.data(),
    text=st.integers(0, 5),
)
def test_blocks_are_pieces_of_tiles_and_see_their_window(grid, data, text):
    """By positions: each token in one block, all of one tile, windows by the rule of the definition."""
    tiles = tuple(data.draw(st.integers(1, length)) for length in grid)
    window = tuple(data.draw(st.integers(1, 5)) for _ in grid)
    geometry = video(grid, tiles, window, text, roles=("context", "video"))
    blocks = token_blocks(geometry, 4, 8)
    covered = [token for start, length in blocks.keys for token in range(start, start + length)]
    assert covered == list(range(geometry.keys))
    assert max(length for _, length in blocks.queries) <= 4
    order = geometry.tiling.order()
    _, rows, cols = grid

    def tile_of(token: int) -> tuple[int, ...]:
        raster = order[token - text]
        return geometry.tiling.tile_of(
            raster // (rows * cols), raster // cols % rows, raster % cols
        )

    def sees(query: tuple[int, ...], key: tuple[int, ...]) -> bool:
        for at, other, n, w in zip(query, key, tiles, window, strict=True):
            wide = min(n, 2 * (w // 2) + 1)
            first = min(max(at - w // 2, 0), n - wide)
            if not first <= other < first + wide:
                return False
        return True

    for (i, (start, _)), (j, (at, length)) in product(
        enumerate(blocks.queries), enumerate(blocks.keys)
    ):
        if start < text or at < text:
            assert blocks.visible[i][j]
            continue
        tile = tile_of(at)
        assert all(tile_of(token) == tile for token in range(at, at + length))
        assert blocks.visible[i][j] == sees(tile_of(start), tile)


def test_equal_keys_are_their_means():
    """Skipping is exact where all keys of a block are one key, whatever their values."""
    geometry = video()
    blocks = token_blocks(geometry, 16, 16)
    q, k, v = operands(geometry)
    k = k.view(1, 2, -1, 16, 32)[:, :, :, :1].expand(-1, -1, -1, 16, -1).flatten(2, 3)
    found, lse = tiered_attention(q, k, v, all_of(Tier.SKIP, blocks), blocks, 0.2, EXACT, EXACT)
    # means are in bfloat16, as in the kernel
    assert relative_error(found, dense(q, k, v, 0.2)) < 4e-3
    scores = 0.2 * q.double() @ k.double().mT
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=4e-3)


def test_values_that_are_linear_in_keys_need_a_slope():
    """Keys of normal distribution in each block, and v = k A: the mean value of softmax is mean_v + q @ slope, its mass
    that of half the variance of its scores."""
    geometry = video((8, 8, 8), tiles=(1, 1, 1))
    blocks = token_blocks(geometry, 512, 512)
    q, k, _ = operands(geometry, kv_heads=1, d=16)
    v = k @ torch.randn(16, 16)
    scale = 0.15
    statistics = key_statistics(k, v, Partition.of(geometry.tiling, blocks.keys, 1))
    variance = (scale * q) @ torch.cov(k[0, 0].mT, correction=0) * (scale * q)
    mass = math.log(512) + (variance.sum(-1) / 2).mean(-1)
    tiers = all_of(Tier.SKIP, blocks)
    known = mass[:, :, None, None], statistics.slope(scale)
    errors = []
    for means in ((None, None), known):
        found, lse = tiered_attention(q, k, v, tiers, blocks, scale, EXACT, EXACT, None, *means)
        exact = (scale * q @ k.mT).logsumexp(-1)
        errors.append((relative_error(found, dense(q, k, v, scale)), float((lse - exact).norm())))
    (plain, far), (linear, near) = errors
    assert linear < 0.2 * plain
    assert near < 0.6 * far


@pytest.mark.parametrize("tier", [Tier.SKIM, Tier.REFINE])
@pytest.mark.parametrize(
    ("arithmetic", "bound"),
    [
        (Native(torch.bfloat16), 4e-3),
        (Fp8(), 6e-2),
        (Nvfp4(), 0.16),
        (Nvfp4("nvfp4"), 0.2),
        (Refined(), 3e-2),
    ],
    ids=str,
)
def test_error_of_each_precision(arithmetic, bound, tier):
    """On N(0, 1), which averages nothing away: the output is as small as the noise of its weights."""
    geometry = video((8, 8, 8), text=20)
    blocks = token_blocks(geometry)
    q, k, v = operands(geometry, d=64)
    found, _ = tiered_attention(
        q, k, v, all_of(tier, blocks), blocks, 0.125, arithmetic, arithmetic
    )
    error = relative_error(found, dense(q, k, v, 0.125))
    assert bound / 4 < error < bound


CASES = {
    "logits of standard deviation 20": lambda q, k, v: (q * 20, k, v),
    "values of 1e3": lambda q, k, v: (q, k, v * 1e3),
    "outlier channels": lambda q, k, v: (q, k * channels(k), v * channels(v)),
    "keys far from zero": lambda q, k, v: (q, k + 30 * torch.randn(1, 2, 1, 32), v),
    "all keys equal": lambda q, k, v: (q, k[:, :, :1].expand_as(k), v),
    "zeros": lambda q, k, v: (q * 0, k * 0, v * 0),
    "a block of zeros": lambda q, k, v: (q, blank(k), blank(v)),
}

# Errors of scores grow with the scores; those of an outlier channel have a standard deviation of 9.
HARDER = {"logits of standard deviation 20": 4, "outlier channels": 3}


def channels(x: Tensor) -> Tensor:
    scale = torch.ones(x.shape[-1])
    scale[3] = 50
    return scale


def blank(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :, 64:128] = 0
    return x


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("arithmetic", LOW, ids=str)
def test_hard_inputs_stay_finite_and_near(case, arithmetic):
    """Tiles of 65 tokens leave blocks of one token."""
    geometry = video((5, 13, 2), (1, 1, 2), text=7)
    blocks = token_blocks(geometry, 64, 64)
    assert min(length for _, length in blocks.keys) == 1
    q, k, v = CASES[case](*operands(geometry))
    found, lse = tiered_attention(
        q, k, v, all_of(Tier.SKIM, blocks), blocks, 32**-0.5, arithmetic, EXACT
    )
    expected = dense(q, k, v, 32**-0.5)
    assert found.isfinite().all()
    assert lse.isfinite().all()
    bounds = {Fp8: 0.06, Nvfp4: 0.22, Refined: 0.025}
    hard = HARDER.get(case, 1)
    if expected.norm() > 0:
        assert relative_error(found, expected) < hard * bounds[type(arithmetic)]
    else:
        assert not found.any()


def test_170_thousand_keys_are_summed_right():
    """Weights of 6e-6 each: sums in a short accumulator would stall (SageAttention issue 388)."""
    geometry = video((85, 40, 50), (17, 5, 5), text=0)
    blocks = token_blocks(geometry, 4096, 4096)
    one = TokenBlocks(((0, 8),), blocks.keys, ((0, 0, 0),), blocks.key_tiles, blocks.visible[:1])
    gen = torch.manual_seed(0)
    q = torch.randn(1, 1, 8, 16, generator=gen)
    k, v = (torch.randn(1, 1, geometry.keys, 16, generator=gen) for _ in range(2))
    v += 1
    tiers = torch.full((1, 1, 1, len(one.keys)), int(Tier.SKIM))
    for arithmetic in LOW:
        found, lse = tiered_attention(q, k, v, tiers, one, 0.25, arithmetic, EXACT)
        assert relative_error(found, dense(q, k, v, 0.25)) < 2e-2
        scores = 0.25 * q.double() @ k.double().mT
        assert (lse.double() - scores.logsumexp(-1)).abs().max() < 0.1


def test_hidden_keys_may_hold_anything():
    geometry = video(text=9)
    blocks = token_blocks(geometry, 16, 16)
    q, k, v = operands(geometry)
    valid = torch.ones(1, geometry.keys, dtype=torch.bool)
    valid[:, -4:] = False
    poisoned = [x.clone() for x in (k, v)]
    for x in poisoned:
        x[:, :, -4:] = torch.nan
    tiers = all_of(Tier.SKIM, blocks)
    tiers[..., ::3], tiers[..., 1::3] = int(Tier.SKIP), int(Tier.REFINE)
    found = tiered_attention(q, *poisoned, tiers, blocks, 0.2, Fp8(), Native(), valid)
    expected = tiered_attention(
        q, k[:, :, :-4], v[:, :, :-4], tiers, trimmed(blocks, 4), 0.2, Fp8(), Native()
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def trimmed(blocks: TokenBlocks, tokens: int) -> TokenBlocks:
    """With the last block of keys that much shorter."""
    *others, (start, length) = blocks.keys
    return TokenBlocks(
        blocks.queries,
        (*others, (start, length - tokens)),
        blocks.query_tiles,
        blocks.key_tiles,
        blocks.visible,
    )


def test_more_precision_errs_less():
    """SKIP, SKIM and REFINE of a whole sequence, on values that vary within blocks."""
    geometry = video((8, 8, 8))
    blocks = token_blocks(geometry)
    q, k, v = operands(geometry, d=64)
    expected = dense(q, k, v, 0.125)
    errors = [
        relative_error(
            tiered_attention(q, k, v, all_of(tier, blocks), blocks, 0.125, skim, refine)[0],
            expected,
        )
        for tier, skim, refine in (
            (Tier.SKIP, Fp8(), Native()),
            (Tier.SKIM, Nvfp4(), Native()),
            (Tier.SKIM, Fp8(), Native()),
            (Tier.REFINE, Fp8(), Refined()),
            (Tier.REFINE, Fp8(), Native()),
        )
    ]
    assert errors == sorted(errors, reverse=True)


def test_mistakes_say_what_to_pass():
    geometry = video()
    blocks = token_blocks(geometry)
    q, k, v = operands(geometry)
    tiers = all_of(Tier.SKIM, blocks)[..., :-1]
    with pytest.raises(StaError, match="pass one for each pair of blocks"):
        tiered_attention(q, k, v, tiers, blocks, 1.0, Fp8(), EXACT)
    with pytest.raises(StaError, match='pass "nvfp4" or "fp8"'):
        Nvfp4("bf16")
