"""Launches the kernels that choose a tier for each pair of a row of queries and a key block: statistics, then the router.

Nothing waits for the GPU, and each run gives the same bits. The reference is sta_compile/tiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ir.geometry import Geometry
from ..ir.kernel_spec import STRIDE_UNIT, pad_head_dim
from ..tiers.predict import Predicted
from ..tiers.router import PADDING, Costs, Routing
from ..tiers.statistics import Partition

TOKENS = 64  # queries or keys whose statistics a program takes at a time
LEAST_GROUPS = 16  # rows of a product on tensor cores
PARTS = 32  # about so many programs add up the covariance of a head
ROWS, BLOCK = 16, 64  # rows of queries and key blocks at a time
BLOCK_CHOSEN, TILES = 32, 4  # in `choose`, and how many times
WARPS = 8
CENTERS, LISTED = 64, 1024


@dataclass(frozen=True)
class Statistics:
    """Of queries: means, spread [batch, heads, rows, groups, head_dim]; size [batch, heads, rows].

    Of keys: mean_k, mean_v [batch, kv_heads, blocks, head_dim]; offsets [batch, kv_heads, groups, blocks, head_dim];
    slope [batch, kv_heads, head_dim, head_dim], all in the dtype of q. numbers: float32 [6, batch, kv_heads, blocks];
    center: float32 [batch, kv_heads, padded head_dim] (codegen/triton/masses.py).
    """

    means: Tensor
    spread: Tensor
    size: Tensor
    mean_k: Tensor
    mean_v: Tensor
    offsets: Tensor
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
    means = q.new_empty((batch, heads, many, groups, d))
    spread, size = torch.empty_like(means), _numbers(q, batch, heads, many)
    of_q, of_k, of_v = ([s // STRIDE_UNIT for s in x.stride()[:3]] for x in (q, k, v))
    block_statistics.query_statistics[(many, batch * heads)](
        *(q, rows.runs, rows.groups, rows.sizes, means, spread, size),
        *(heads, *of_q, geometry.video_query, many),
        *(d, padded, TOKENS, -(-rows.longest // TOKENS) * TOKENS),
        *(groups, max(LEAST_GROUPS, groups), STRIDE_UNIT),
    )
    many, groups = len(blocks.runs), blocks.sizes.shape[1]
    mean_k, mean_v = (k.new_empty((batch, kv_heads, many, d)) for _ in range(2))
    offsets = k.new_empty((batch, kv_heads, groups, many, d))
    numbers = _numbers(q, masses.NUMBERS, batch, kv_heads, many)
    chunk = -(-many // PARTS)
    chunks = -(-many // chunk)
    cross = _numbers(q, batch, kv_heads, chunks, padded, padded)
    block_statistics.key_statistics[(chunks, batch * kv_heads)](
        *(k, v, blocks.runs, blocks.groups, blocks.sizes),
        *(mean_k, mean_v, offsets, numbers, cross),
        *(kv_heads, *of_k, *of_v, geometry.video_key, many, chunks),
        *(d, padded, chunk, TOKENS, -(-blocks.longest // TOKENS) * TOKENS),
        *(groups, max(LEAST_GROUPS, groups), STRIDE_UNIT),
        num_warps=WARPS,
        num_stages=2,
    )
    center = _numbers(q, batch, kv_heads, padded)
    masses.centers[(batch * kv_heads,)](
        *(mean_k, mean_v, blocks.runs, numbers, center, many, blocks.tokens, d, padded, CENTERS)
    )
    slope = (cross.sum(2)[..., :d, :d] * (scale / blocks.tokens)).to(q.dtype).contiguous()
    return Statistics(means, spread, size, mean_k, mean_v, offsets, slope, numbers, center)


def choose_tiers(
    found: Statistics,
    k: Tensor,
    v: Tensor,
    shown: Tensor | None,
    geometry: Geometry,
    scale: float,
    rows: Partition,
    blocks: Partition,
    price: float,
    costs: Costs,
    inside: Tensor | None = None,
    predicted: Predicted | None = None,
) -> Routing:
    """The lists of a price. k, v: the whole sequences, of which keys beside the video are read; shown: bool [batch, keys].

    inside: uint8 [1 or heads, rows, blocks], pairs that a window shows; None for all. predicted: memory for what is
    predicted. What is behind the counts in `Routing.order` is not written. Of dense samples all is meaningless.
    """
    from ..codegen.triton import masses, route

    batch, heads, many, q_groups, d = found.means.shape
    kv_heads, k_groups, columns = found.offsets.shape[1:4]
    padded, share = pad_head_dim(d), heads // kv_heads
    gain = found.means.new_empty((batch, heads, many * q_groups, columns), dtype=torch.float16)
    uneven = torch.empty_like(gain)
    total = _numbers(gain, batch, heads, many * q_groups)
    product, own = torch.empty_like(found.means), torch.empty_like(total)
    out = found.means.new_empty((batch, heads, many, d))
    energy = _numbers(gain, batch, heads, many)
    of_k, of_v = ([s // STRIDE_UNIT for s in x.stride()[:3]] for x in (k, v))
    wide = -(-columns // PADDING) * PADDING
    tiles = -(-many // ROWS)
    masses.gains[(-(-columns // BLOCK), tiles, batch * heads)](
        *(found.means, found.size, found.offsets, found.numbers, blocks.runs, blocks.sizes),
        *(gain, uneven, scale, share, many, columns),
        *(d, padded, q_groups, k_groups, ROWS * q_groups, BLOCK),
        num_warps=WARPS,
    )
    masses.attend[(tiles, batch * heads)](
        *(found.means, found.spread, rows.runs, rows.sizes, found.mean_k, found.mean_v),
        *(
            found.slope,
            blocks.runs,
            found.center,
            k,
            v,
            None if shown is None else shown.view(torch.uint8),
        ),
        *(gain, total, product, own, out, energy, scale, heads, share, many, columns),
        *(geometry.video_key, geometry.context_keys, geometry.tiling.tokens, k.shape[2]),
        *(*of_k, *of_v, d, padded, q_groups, ROWS, BLOCK, STRIDE_UNIT),
        num_warps=WARPS,
    )
    mean = (energy @ rows.lengths).sum(1).clamp(min=1e-30)
    unit = mean * (rows.longest / (heads * rows.tokens))
    tiers = torch.empty((batch, heads, many, columns), dtype=torch.uint8, device=gain.device)
    bias = _numbers(gain, batch, heads, many, wide)
    one = price / columns
    route.choose[(-(-wide // (BLOCK_CHOSEN * TILES)), tiles, batch * heads)](
        *(found.means, found.spread, found.size, rows.runs, rows.sizes, found.mean_k, found.mean_v),
        *(found.numbers, blocks.runs, found.center, gain, uneven, total, product, own, out, unit),
        *(inside, tiers, bias),
        *((None, None) if predicted is None else (predicted.skip, predicted.skim)),
        *(scale, one * (costs.refine - costs.skip), one * (costs.skim - costs.skip)),
        *(one * (costs.refine - costs.skim), heads, share, many, columns, wide),
        *(1 if inside is None else len(inside), d, padded, q_groups, k_groups),
        *(ROWS, BLOCK_CHOSEN, TILES),
        num_warps=WARPS,
        num_stages=2,
    )
    order = torch.empty(tiers.shape, dtype=torch.int32, device=gain.device)
    counts = torch.empty((batch, heads, many, 2), dtype=torch.int32, device=gain.device)
    route.list_blocks[(batch * heads * many,)](tiers, order, counts, columns, LISTED)
    return Routing(order, counts, bias)


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
        route.choose,
        route.list_blocks,
    )
