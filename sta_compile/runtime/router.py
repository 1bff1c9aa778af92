"""Launches the kernels that choose a tier for each pair of a row of queries and a key block: statistics, then the router.

Nothing waits for the GPU, and each run gives the same bits. The reference is sta_compile/tiers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ir.geometry import Geometry
from ..ir.kernel_spec import STRIDE_UNIT, pad_head_dim
from ..tiers.calibrate import price_of_error, price_of_speedup
from ..tiers.predict import Predicted
from ..tiers.router import PADDING, Costs, Routing
from ..tiers.statistics import STAND_OUT, Partition

TOKENS = 64  # queries or keys whose statistics a program takes at a time
LEAST_GROUPS = 16  # rows of a product on tensor cores
PARTS = 32  # about so many programs add up the covariance of a head
ROWS, BLOCK = 64, 64  # groups of queries, or rows of them, and key blocks of a program
ATTENDING = 128  # groups of queries in `attend`
CENTERS, AVERAGED, LISTED = 64, 16, 1024
SAMPLED = 16  # rows of each head that a price is found from
WARPS = 8


@dataclass(frozen=True)
class Statistics:
    """Of queries: means, spread [batch, heads, groups, rows, head_dim]; size [batch, heads, rows].

    Of keys: mean_k, mean_v [batch, kv_heads, blocks, head_dim]; offsets [batch, kv_heads, groups, blocks, head_dim];
    slope [batch, kv_heads, head_dim, head_dim], all in the dtype of q. parts: float32 [batch, kv_heads, groups, blocks],
    shares of the groups. numbers: float32 [6, batch, kv_heads, blocks];
    center: float32 [batch, kv_heads, padded head_dim] (codegen/triton/masses.py).
    """

    means: Tensor
    spread: Tensor
    size: Tensor
    mean_k: Tensor
    mean_v: Tensor
    offsets: Tensor
    parts: Tensor
    slope: Tensor
    numbers: Tensor
    center: Tensor


def take_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    geometry: Geometry,
    scale: float,
    rows: Partition,
    blocks: Partition,
) -> Statistics:
    """q, k, v: the whole sequences [batch, heads, tokens, head_dim], aligned (`is_aligned`). scale: of the scores."""
    from ..codegen.triton import block_statistics, masses

    batch, heads, _, d = q.shape
    kv_heads, padded = k.shape[1], pad_head_dim(d)
    many, groups = len(rows.runs), rows.sizes.shape[1]
    means = q.new_empty((batch, heads, groups, many, d))
    spread, size = torch.empty_like(means), _numbers(q, batch, heads, many)
    of_q, of_k, of_v = ([s // STRIDE_UNIT for s in x.stride()[:3]] for x in (q, k, v))
    block_statistics.query_statistics[(many, batch * heads)](
        *(q, rows.runs, rows.groups, rows.sizes, means, spread, size),
        *(heads, *of_q, geometry.video_query, many),
        *(d, padded, TOKENS, -(-rows.longest // TOKENS) * TOKENS),
        *(groups, max(LEAST_GROUPS, groups), STRIDE_UNIT),
    )
    many, compact = len(blocks.runs), blocks.sizes.shape[1]
    groups = compact + STAND_OUT
    mean_k, mean_v = (k.new_empty((batch, kv_heads, many, d)) for _ in range(2))
    offsets = k.new_empty((batch, kv_heads, groups, many, d))
    parts = _numbers(q, batch, kv_heads, groups, many)
    numbers = _numbers(q, masses.NUMBERS, batch, kv_heads, many)
    chunk = -(-many // PARTS)
    chunks = -(-many // chunk)
    cross = _numbers(q, batch, kv_heads, chunks, padded, padded)
    block_statistics.key_statistics[(chunks, batch * kv_heads)](
        *(k, v, blocks.runs, blocks.groups),
        *(mean_k, mean_v, offsets, parts, numbers, cross),
        *(kv_heads, *of_k, *of_v, geometry.video_key, many, chunks),
        *(d, padded, chunk, max(LEAST_GROUPS, 1 << (blocks.longest - 1).bit_length())),
        *(compact, STAND_OUT, max(LEAST_GROUPS, groups), STRIDE_UNIT),
        num_warps=WARPS,
        num_stages=2,
    )
    center = _numbers(q, batch, kv_heads, padded)
    masses.centers[(batch * kv_heads,)](
        *(mean_k, mean_v, blocks.runs, numbers, center, many, blocks.tokens, d, padded, CENTERS)
    )
    slope = (cross.sum(2)[..., :d, :d] * (scale / blocks.tokens)).to(q.dtype).contiguous()
    return Statistics(means, spread, size, mean_k, mean_v, offsets, parts, slope, numbers, center)


def choose_tiers(
    found: Statistics,
    k: Tensor,
    v: Tensor,
    shown: Tensor | None,
    geometry: Geometry,
    scale: float,
    rows: Partition,
    blocks: Partition,
    price: float | Tensor,
    costs: Costs,
    inside: Tensor | None = None,
    predicted: Predicted | None = None,
) -> Routing:
    """The lists of a price, a number or float32 [1].

    k, v: the whole sequences, of which keys beside the video are read; shown: bool [batch, keys]. inside: uint8 [1 or
    heads, rows, blocks], pairs that a window shows; None for all. predicted: memory for what is predicted. What is behind
    the counts in `Routing.order` is not written. Of dense samples all is meaningless.
    """
    from ..codegen.triton import masses, route

    batch, heads, q_groups, many, d = found.means.shape
    kv_heads, k_groups, columns = found.offsets.shape[1:4]
    padded, share = pad_head_dim(d), heads // kv_heads
    sheets = -(-columns // PADDING)
    wide = sheets * PADDING
    samples, tiles = batch * heads, -(-many // ROWS)
    gain, uneven = (
        found.means.new_empty((samples, q_groups * many, wide), dtype=torch.float16)
        for _ in range(2)
    )
    masses.gains[(-(-columns // BLOCK), -(-many * q_groups // ROWS), samples)](
        *(found.means, found.size, found.offsets, found.numbers, blocks.runs, found.parts),
        *(gain, uneven, scale, share, many, columns, sheets),
        *(d, padded, q_groups, k_groups, ROWS, BLOCK, PADDING),
        num_warps=WARPS,
        num_stages=3,
    )
    product, out = torch.empty_like(found.means), torch.empty_like(found.means)
    total, own = (_numbers(gain, samples, q_groups * many) for _ in range(2))
    of_k, of_v = ([s // STRIDE_UNIT for s in x.stride()[:3]] for x in (k, v))
    flags = None if shown is None else shown.view(torch.uint8)
    masses.attend[(-(-many * q_groups // ATTENDING), samples)](
        *(found.means, found.spread, found.mean_k, found.mean_v, found.slope, blocks.runs),
        *(found.center, k, v, flags, gain, total, product, own, out, scale),
        *(heads, share, many, columns, sheets),
        *(geometry.video_key, geometry.context_keys, geometry.tiling.tokens, k.shape[2]),
        *(*of_k, *of_v, d, padded, q_groups, ATTENDING, BLOCK, PADDING, STRIDE_UNIT),
        num_warps=WARPS,
        num_stages=2,
    )
    mean = found.means.new_empty((batch, heads, many, d))
    length, energy = (_numbers(gain, batch, heads, many) for _ in range(2))
    masses.average[(-(-many // AVERAGED), samples)](
        *(out, rows.runs, rows.sizes, mean, length, energy, many, d, padded, q_groups, AVERAGED)
    )
    unit = energy.sum((1, 2)).clamp(min=1e-30) * (rows.longest / heads) / rows.lengths.sum()
    tiers = torch.empty((samples, many, wide), dtype=torch.uint8, device=gain.device)
    bias = _numbers(gain, batch, heads, many, wide)
    if not isinstance(price, Tensor):
        price = torch.full((1,), price, dtype=torch.float32, device=gain.device)
    differences = costs.refine - costs.skip, costs.skim - costs.skip, costs.refine - costs.skim
    route.choose[(wide // BLOCK, tiles, samples)](
        *(found.means, found.spread, found.size, rows.runs, rows.sizes, found.mean_k, found.mean_v),
        *(found.numbers, blocks.runs, found.center, gain, uneven, total, product, own),
        *(mean, length, unit, price, inside, tiers, bias),
        *((None, None) if predicted is None else (predicted.skip, predicted.skim)),
        *(scale, *(each / columns for each in differences), heads, share, many, columns, sheets),
        *(1 if inside is None else len(inside), d, padded, q_groups, k_groups),
        *(ROWS, BLOCK, PADDING),
        num_warps=WARPS,
    )
    order = torch.empty((batch, heads, many, columns), dtype=torch.int32, device=gain.device)
    counts = torch.empty((batch, heads, many, 2), dtype=torch.int32, device=gain.device)
    route.list_blocks[(samples * many,)](tiers, order, counts, columns, sheets, LISTED, PADDING)
    return Routing(order, counts, bias)


def price_of(
    found: Statistics,
    k: Tensor,
    v: Tensor,
    shown: Tensor | None,
    geometry: Geometry,
    scale: float,
    rows: Partition,
    blocks: Partition,
    costs: Costs,
    inside: Tensor | None = None,
    speedup: float | None = None,
    max_error: float | None = None,
) -> Tensor:
    """float32 [1]: the price of a speedup, or else of an error, as predicted for some rows of this call (calibrate.py).

    Arguments as of `choose_tiers`.
    """
    step = max(1, len(rows.runs) // SAMPLED)
    few = rows.every(step)
    some = replace(
        found,
        means=found.means[:, :, :, ::step].contiguous(),
        spread=found.spread[:, :, :, ::step].contiguous(),
        size=found.size[:, :, ::step].contiguous(),
    )
    seen = None if inside is None else inside[:, ::step].contiguous()
    batch, heads = found.means.shape[:2]
    shape = batch, heads, len(few.runs), len(blocks.runs)
    predicted = Predicted(*(_numbers(k, *shape) for _ in range(3)))
    choose_tiers(some, k, v, shown, geometry, scale, few, blocks, 0.0, costs, seen, predicted)
    pairs = None if seen is None else seen.bool()
    if speedup is not None:
        return price_of_speedup([predicted], speedup, costs, pairs)
    return price_of_error([predicted], max_error or 0.0, costs, pairs)


def _numbers(like: Tensor, *sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32, device=like.device)


def kernels() -> tuple[Any, ...]:
    """All of them, in the order of their launches."""
    from ..codegen.triton import block_statistics, masses, route

    return (
        block_statistics.query_statistics,
        block_statistics.key_statistics,
        masses.centers,
        masses.gains,
        masses.attend,
        masses.average,
        route.choose,
        route.list_blocks,
    )
