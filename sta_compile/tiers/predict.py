"""The squared error that each pair of a row of queries and a key block adds to the output, by tier, from statistics alone.

docs/tiers.md derives the estimates. Errors are relative: a share of the mean of |output|^2 over all heads and queries of a
sample, as the statistics estimate it, so that they add up over rows, heads and blocks of a layer. Times the length of a row
over that of the longest one, so that rows count by their queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .statistics import KeyStatistics, Partition, QueryStatistics

# Relative root mean square of a number's rounding to e4m3, of evenly spread mantissas.
E4M3_ERROR = 0.0264
LARGEST_BIAS = 1.0


@dataclass(frozen=True)
class Context:
    """Keys beside the video. k, v: [batch, kv_heads, keys, head_dim]. shown: bool [batch, keys], False hides a key."""

    k: Tensor
    v: Tensor
    shown: Tensor | None = None


@dataclass(frozen=True)
class Predicted:
    """float32 [batch, heads, rows, key blocks]. skip, skim: relative squared errors.

    log_skipped: what is added to the scaled score of a skipped block's mean: ln of its keys, and what the mean weight of
    its keys has over the weight of their mean, but at most LARGEST_BIAS of it.
    """

    skip: Tensor
    skim: Tensor
    log_skipped: Tensor


def predict(
    queries: QueryStatistics,
    keys: KeyStatistics,
    rows: Partition,
    blocks: Partition,
    scale: float,
    context: Context | None = None,
) -> Predicted:
    """scale: of the scores."""
    share = queries.groups.shape[1] // keys.mean_k.shape[1]
    found = masses(queries, keys, rows, blocks, scale, context)
    mean_v = _of_heads(keys.mean_v, share).float()
    noise, spread_v, between_v = (
        _of_heads(x, share)[:, :, None, None]
        for x in (noise_of_keys(keys, blocks), keys.spread_v, keys.between_v)
    )
    n = blocks.lengths.clamp(min=1)
    groups = keys.offsets.shape[2]
    parts = rows.sizes / rows.lengths[:, None].clamp(min=1)  # [rows, query groups]
    counted = parts * (rows.lengths / rows.lengths.max())[:, None]

    length = mean_v.square().sum(-1)[:, :, None, None]
    out = (parts[..., None] * found.out).sum(3, keepdim=True)
    apart = length - 2 * torch.einsum("bhrqd,bhkd->bhrqk", out, mean_v)
    apart = (apart + out.square().sum(-1, keepdim=True)).clamp(min=0)  # |mean_v - out|^2
    gain = (parts[..., None] * found.gain).sum(3, keepdim=True)
    bias = gain.clamp(max=LARGEST_BIAS)
    lost = 1 - (bias - gain).exp()
    skip = between_v * (found.uneven_groups - 1) / max(groups - 1, 1) + lost.square() * apart
    skip = skip + (spread_v - between_v) * (found.uneven - found.uneven_groups) / n
    size = queries.size[..., None, None] * scale**2 / mean_v.shape[-1]
    of_weight = E4M3_ERROR**2 * (1 + 2 * size * noise)
    skim = of_weight * (spread_v + apart) + E4M3_ERROR**2 * (spread_v + length)
    skim = skim * found.uneven / n

    energy = (counted[..., None] * found.out.square()).sum((1, 2, 3, 4))
    energy = energy / (counted.sum() * mean_v.shape[1])
    unit = energy.clamp(min=1e-30)[:, None, None, None, None]
    squared = counted[..., None] * found.squared / unit
    return Predicted(
        (squared * skip).sum(3),
        (squared * skim).sum(3),
        bias[:, :, :, 0] + blocks.lengths.log(),
    )


@dataclass(frozen=True)
class Masses:
    """float32, of groups of queries: out [batch, heads, rows, groups, head_dim], the output; all else
    [batch, heads, rows, groups, blocks].

    weight: what a key block has of all weights; squared: the mean of its square over the group's queries. gain: ln of the
    mean weight of a block's keys over the weight of their mean. uneven: the mean of the squared weights of a block's keys
    over the square of their mean; uneven_groups: that of the means of its groups.
    """

    weight: Tensor
    squared: Tensor
    gain: Tensor
    uneven: Tensor
    uneven_groups: Tensor
    out: Tensor


def masses(
    queries: QueryStatistics,
    keys: KeyStatistics,
    rows: Partition,
    blocks: Partition,
    scale: float,
    context: Context | None = None,
) -> Masses:
    """Exact where groups are single tokens."""
    share = queries.groups.shape[1] // keys.mean_k.shape[1]
    q = queries.groups.float()
    offsets = _of_heads(keys.offsets, share).float()
    center = center_of_keys(keys, blocks)
    mean_k = _of_heads(keys.mean_k, share).float()
    rest = _of_heads(keys.rest, share)[:, :, None, None]
    n = blocks.lengths.clamp(min=1)
    of_group = (n / keys.offsets.shape[2]).clamp(min=1)
    within = scale**2 / q.shape[-1] * queries.size[..., None, None] * rest
    gain_within = log_of_mean(within, of_group)
    uneven_within = within.minimum(of_group.log())

    mean = scale * torch.einsum("bhrqd,bhkd->bhrqk", q, mean_k)
    apart = scale * torch.einsum("bhrqd,bhgkd->gbhrqk", q, offsets)
    part = _of_heads(keys.sizes / n, share).permute(2, 0, 1, 3)[:, :, :, None, None]
    gain_groups = (apart + part.log()).logsumexp(0)
    uneven_groups = ((2 * apart + part.log()).logsumexp(0) - 2 * gain_groups).nan_to_num(0).exp()
    gain = (gain_groups + gain_within).nan_to_num(0, neginf=0)
    log_mass = mean + gain + blocks.lengths.log()

    total, of_context, k_context = log_mass.logsumexp(-1), torch.zeros_like(q), torch.zeros_like(q)
    if context is not None and context.k.shape[2]:
        total, of_context, k_context = _read_context(q, context, center, total, scale, share)
    log_weight = log_mass - total[..., None]
    weight = log_weight.exp()
    mean_v = _of_heads(keys.mean_v, share).float()
    mean_k = mean_k - _of_heads(center, share)
    out, seen = (torch.einsum("bhrqk,bhkd->bhrqd", weight, x) for x in (mean_v, mean_k))
    slope = _of_heads(keys.slope(scale), share).float()
    out = out + weight.sum(-1, keepdim=True) * torch.einsum("bhrqd,bhde->bhrqe", q, slope)
    spread = _spread_of_queries(queries, mean_k, seen + k_context, scale)
    tokens = rows.sizes[..., None].clamp(min=1)
    squared = (2 * log_weight + log_of_mean(4 * spread, tokens)).clamp(max=0).exp()
    return Masses(
        weight,
        squared,
        gain,
        uneven_groups * uneven_within.exp(),
        uneven_groups,
        out + of_context,
    )


def _spread_of_queries(
    queries: QueryStatistics, mean_k: Tensor, seen: Tensor, scale: float
) -> Tensor:
    """The variance of ln weight of a block over a group's queries: that of scale q . (mean_k - mean of the keys it sees).

    As Sigma is diagonal, the square is multiplied out. mean_k: [batch, heads, blocks, head_dim]
    """
    spread = queries.spread.float()
    squares = torch.einsum("bhrqd,bhkd->bhrqk", spread, mean_k.square())
    products = torch.einsum("bhrqd,bhkd->bhrqk", spread * seen, mean_k)
    own = (spread * seen.square()).sum(-1, keepdim=True)
    return scale**2 * (squares - 2 * products + own).clamp(min=0)


def center_of_keys(keys: KeyStatistics, blocks: Partition) -> Tensor:
    """float32 [batch, kv_heads, 1, head_dim]: the mean of all keys"""
    part = (blocks.lengths / blocks.lengths.sum())[:, None]
    return (part * keys.mean_k.float()).sum(2, keepdim=True)


def noise_of_keys(keys: KeyStatistics, blocks: Partition) -> Tensor:
    """float32 [batch, kv_heads, blocks]: the mean of |k - mean of all keys|^2, what e4m3 rounds of a block."""
    return keys.total + (keys.mean_k.float() - center_of_keys(keys, blocks)).square().sum(-1)


def log_of_mean(variance: Tensor, n: Tensor) -> Tensor:
    """ln of the mean of exp over n numbers of mean 0 and a variance, as of normal ones; at most ln n."""
    return (variance / 2).minimum(n.log())


def _read_context(
    q: Tensor, context: Context, center: Tensor, total: Tensor, scale: float, share: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(logsumexp with the keys of the context [batch, heads, rows, groups], their part of the output [..., head_dim],
    and of the mean of the keys, less `center`)"""
    k, v, center = (_of_heads(x, share).float() for x in (context.k, context.v, center))
    scores = scale * torch.einsum("bhrqd,bhkd->bhrqk", q, k)
    k = k - center
    if context.shown is not None:
        scores = scores.masked_fill(~context.shown[:, None, None, None], -torch.inf)
        k, v = (x.masked_fill(~context.shown[:, None, :, None], 0) for x in (k, v))
    total = torch.logaddexp(total, scores.logsumexp(-1))
    weight = (scores - total[..., None]).exp()
    of_values, of_keys = (torch.einsum("bhrqk,bhkd->bhrqd", weight, x) for x in (v, k))
    return total, of_values, of_keys


def _of_heads(x: Tensor, share: int) -> Tensor:
    """Heads of k or v for each query head."""
    return x.repeat_interleave(share, 1)
