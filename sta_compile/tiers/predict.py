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
# Share of a block's values that vary with the scores of its keys: rows of q are taken as directions at random otherwise.
COMMON = 0.1
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

    log_skipped: what is added to the scaled score of a skipped block's mean: ln of its keys, and half the variance of their
    scores, but at most LARGEST_BIAS of it.
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
    weight, variance, out = found.weight, found.variance, found.out
    mean_v = _of_heads(keys.mean_v, share).float()
    noise, spread_v = (
        _of_heads(x, share)[:, :, None, None] for x in (noise_of_keys(keys, blocks), keys.spread_v)
    )
    n = blocks.lengths.clamp(min=1)
    log_n = n.log()

    length = mean_v.square().sum(-1)[:, :, None, None]
    apart = length - 2 * torch.einsum("bhrqd,bhkd->bhrqk", out, mean_v)
    apart = (apart + out.square().sum(-1, keepdim=True)).clamp(min=0)  # |mean_v - out|^2
    few = variance.minimum(log_n)
    bias = (variance / 2).clamp(max=LARGEST_BIAS)
    lost = 1 - (bias - log_of_mean(variance, n)).exp()
    skip = spread_v * (COMMON * variance + few.expm1() / n).clamp(max=1) + lost.square() * apart
    size = queries.size[..., None, None] * scale**2 / out.shape[-1]
    of_weight = E4M3_ERROR**2 * (1 + 2 * size * noise)
    skim = of_weight * (spread_v + apart) + E4M3_ERROR**2 * (spread_v + length)
    skim = skim * few.exp() / n

    parts = rows.sizes / rows.lengths[:, None].clamp(min=1)  # [rows, query groups]
    counted = parts * (rows.lengths / rows.lengths.max())[:, None]
    heads = queries.groups.shape[1]
    energy = (counted[..., None] * out.square()).sum((1, 2, 3, 4)) / (counted.sum() * heads)
    unit = energy.clamp(min=1e-30)[:, None, None, None, None]
    squared = counted[..., None] * weight.square() / unit
    return Predicted(
        (squared * skip).sum(3),
        (squared * skim).sum(3),
        (parts[..., None] * bias).sum(3) + blocks.lengths.log(),
    )


@dataclass(frozen=True)
class Masses:
    """float32, of groups of queries. weight: what a key block has of all weights [batch, heads, rows, groups, blocks].

    variance: of the scores of its keys, alike. out: the output [batch, heads, rows, groups, head_dim].
    """

    weight: Tensor
    variance: Tensor
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
    groups = _of_heads(keys.groups, share).float()
    rest = _of_heads(keys.rest, share)[:, :, None, None]
    n = blocks.lengths.clamp(min=1)
    within = scale**2 / q.shape[-1] * queries.size[..., None, None] * rest
    scores = scale * torch.einsum("bhrqd,bhgkd->gbhrqk", q, groups)
    part = (blocks.sizes / n[:, None]).T[:, None, None, None, None]
    log_mass = (scores + blocks.sizes.T.log()[:, None, None, None, None]).logsumexp(0)
    log_mass = log_mass + log_of_mean(within, (n / blocks.sizes.shape[1]).clamp(min=1))
    mean = (part * scores).sum(0)
    variance = (part * (scores - mean).square()).sum(0) + within
    total, of_context = log_mass.logsumexp(-1), torch.zeros_like(q)
    if context is not None and context.k.shape[2]:
        total, of_context = _read_context(q, context, total, scale, share)
    weight = (log_mass - total[..., None]).exp()
    mean_v = _of_heads(keys.mean_v, share).float()
    out = torch.einsum("bhrqk,bhkd->bhrqd", weight, mean_v) + of_context
    return Masses(weight, variance, out)


def noise_of_keys(keys: KeyStatistics, blocks: Partition) -> Tensor:
    """float32 [batch, kv_heads, blocks]: the mean of |k - mean of all keys|^2, what e4m3 rounds of a block."""
    mean_k = keys.mean_k.float()
    part = (blocks.lengths / blocks.lengths.sum())[:, None]
    return keys.total + (mean_k - (part * mean_k).sum(2, keepdim=True)).square().sum(-1)


def log_of_mean(variance: Tensor, n: Tensor) -> Tensor:
    """ln of the mean of exp over n numbers of mean 0 and a variance, as of normal ones; beyond a variance of 2 ln n, where
    the largest of n numbers makes the sum, the line that goes on from there: sqrt(2 variance ln n) - ln n."""
    log_n = n.log()
    return torch.where(
        variance <= 2 * log_n, variance / 2, (2 * variance * log_n).sqrt() - log_n
    ).clamp(min=0)


def _read_context(
    q: Tensor, context: Context, total: Tensor, scale: float, share: int
) -> tuple[Tensor, Tensor]:
    """(logsumexp with the keys of the context [batch, heads, rows, groups], their part of the output [..., head_dim])"""
    k, v = (_of_heads(x, share).float() for x in (context.k, context.v))
    scores = scale * torch.einsum("bhrqd,bhkd->bhrqk", q, k)
    if context.shown is not None:
        hidden = ~context.shown[:, None, None, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        v = v.masked_fill(~context.shown[:, None, :, None], 0)
    total = torch.logaddexp(total, scores.logsumexp(-1))
    return total, torch.einsum("bhrqk,bhkd->bhrqd", (scores - total[..., None]).exp(), v)


def _of_heads(x: Tensor, share: int) -> Tensor:
    """Heads of k or v for each query head."""
    return x.repeat_interleave(share, 1)
