"""What a kernel with precision tiers computes, block by block, in PyTorch: the reference of all such kernels.

Every pair of a query block and a key block has a tier. One online softmax goes over the key blocks of a row of query
blocks, those of the highest tier first, as the fused kernels do. A skipped block is its means: n * exp(q . mean_k) to the
denominator, and that times mean_v to the numerator. Numerator and denominator sum the same rounded weights, so that an
output stays a mean of values. A router may know better what a skipped block weighs, and by how much values lean with their
keys' scores: both can be given (router.py, statistics.py).

Quantized keys have their mean over the sequence taken off, which shifts all scores of a row by one constant
(SageAttention, arXiv 2410.02367, section 4.2); the constant is added again, so that tiers of one row fit each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from ..errors import StaError
from ..ir.runs import Run
from ..ir.token_blocks import TokenBlocks
from .arithmetic import Arithmetic, Native, Operand, multiply


class Tier(IntEnum):
    """How a key block is read, cheapest first."""

    DROP = 0  # not at all, as outside of a window
    SKIP = 1  # its means stand for it
    SKIM = 2  # low precision
    REFINE = 3  # high precision


@dataclass(frozen=True)
class _Rounded:
    """Operands of one tier: q, k, v [batch, heads, blocks, size, head_dim]."""

    arithmetic: Arithmetic
    q: Operand
    k: Operand
    v: Operand
    smooth: bool  # k had its mean taken off


def tiered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiers: Tensor,
    blocks: TokenBlocks,
    scale: float,
    skim: Arithmetic,
    refine: Arithmetic,
    valid: Tensor | None = None,
    log_skipped: Tensor | None = None,
    slope: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out like q, lse float32 [batch, heads, queries]) of attention with a tier for each pair of blocks.

    q: [batch, heads, queries, head_dim]. k, v: [batch, kv_heads, keys, head_dim]. tiers: integers of `Tier`
    [batch, heads, query blocks, key blocks]. scale: of the scores. valid: bool [batch, keys], False hides a key.
    log_skipped: float32 like tiers, added to the scaled scores of skipped blocks' means instead of ln of their keys. slope:
    [batch, kv_heads, head_dim, head_dim]; for a query q the mean values of skipped blocks are off by q @ slope.
    A row without a key has out 0 and lse -inf. Raises StaError if `tiers` is of another shape.
    """
    batch, heads = q.shape[:2]
    expected = (batch, heads, len(blocks.queries), len(blocks.keys))
    if tuple(tiers.shape) != expected:
        raise StaError(
            f"tiers of shape {tuple(tiers.shape)} don't fit; pass one for each pair of blocks: "
            f"[batch, heads, query blocks, key blocks] = {expected}"
        )
    share = heads // k.shape[1]
    shown = _padded(_shown(k, valid)[:, None, :, None], blocks.keys)[..., 0] > 0
    rows = _padded(q, blocks.queries)
    hidden = ~shown[..., None]
    columns, values = (_padded(x, blocks.keys).masked_fill(hidden, 0) for x in (k, v))
    count = shown.sum(-1)  # [batch, 1, key blocks]
    mean = columns.sum((2, 3), keepdim=True) / count.sum(-1)[..., None, None, None].clamp(min=1)
    smoothed = (columns - mean).masked_fill(hidden, 0)
    sides = [
        _round(arithmetic, rows, columns, smoothed, values, share) for arithmetic in (skim, refine)
    ]
    shift = scale * (rows @ _repeat(mean, share).mT)[..., 0]  # [batch, heads, query blocks, rows]
    means = _Means(smoothed, values, count, scale, share)
    linear = None if slope is None else rows @ _repeat(slope.float(), share)[:, :, None]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    for index, (start, length) in enumerate(blocks.queries):
        row = _Row(shift[:, :, index], q.shape[-1])
        row.read(sides, index, tiers[:, :, index], shown, scale)
        row.skip(
            means,
            rows[:, :, index],
            tiers[:, :, index],
            means.log_count if log_skipped is None else log_skipped[:, :, index],
            None if linear is None else linear[:, :, index],
        )
        found, found_lse = row.finish()
        out[:, :, start : start + length] = found[:, :, :length].to(q.dtype)
        lse[:, :, start : start + length] = found_lse[:, :, :length]
    return out, lse


class _Means:
    """Key blocks as single keys: k [batch, heads, blocks, head_dim], of k without its mean; v alike; in bfloat16."""

    def __init__(self, k: Tensor, v: Tensor, count: Tensor, scale: float, share: int) -> None:
        n = count.clamp(min=1)[..., None]
        rounded = Native(torch.bfloat16)
        self.k, self.v = (_repeat(rounded.key(x.sum(3) / n).value, share) for x in (k, v))
        self.log_count = count.float().log()  # -inf where nothing is left
        self.scale = scale


class _Row:
    """The online softmax of one block of query rows: top and total [batch, heads, rows], out [..., head_dim]."""

    def __init__(self, shift: Tensor, head_dim: int) -> None:
        self.shift = shift
        self.top = torch.full_like(shift, -torch.inf)
        self.total = torch.zeros_like(shift)
        self.out = shift.new_zeros((*shift.shape, head_dim))

    def read(
        self, sides: list[_Rounded], index: int, tiers: Tensor, shown: Tensor, scale: float
    ) -> None:
        """Skimmed and refined blocks, the refined ones first."""
        order = tiers.argsort(dim=-1, descending=True, stable=True)
        for position in range(tiers.shape[-1]):
            block = order[..., position]
            tier = tiers.gather(-1, block[..., None])
            if int(tier.max()) < Tier.SKIM:
                return
            visible = _pick(shown.expand(*tiers.shape, -1), block)
            for side, of_tier in zip(sides, (Tier.SKIM, Tier.REFINE), strict=True):
                here = (tier == of_tier)[..., None]
                if not bool(here.any()):
                    continue
                scores = scale * multiply(
                    side.q.map(lambda x: x[:, :, index]), side.k.map(partial(_pick, block=block)).mT
                )
                if side.smooth:
                    scores = scores + self.shift[..., None]
                scores = scores.masked_fill(~(visible[:, :, None] & here), -torch.inf)
                self._add(scores, side.arithmetic, side.v.map(partial(_pick, block=block)))

    def skip(
        self, means: _Means, q: Tensor, tiers: Tensor, log_count: Tensor, linear: Tensor | None
    ) -> None:
        """All skipped blocks at once: keys that count as often as they have tokens. linear: like out, added to values."""
        scores = means.scale * (q @ means.k.mT) + self.shift[..., None] + log_count[:, :, None]
        scores = scores.masked_fill((tiers != Tier.SKIP)[:, :, None], -torch.inf)
        self._add(scores, Native(torch.bfloat16), Operand(means.v), linear)

    def _add(
        self, scores: Tensor, arithmetic: Arithmetic, v: Operand, linear: Tensor | None = None
    ) -> None:
        """A block's weights are rounded below its own maximum, so that a large one elsewhere takes no range from them."""
        best = scores.amax(-1)
        weights = arithmetic.weights((scores - _finite(best)[..., None]).exp())
        new = torch.maximum(self.top, best)
        decay, share = ((x - _finite(new)).exp() for x in (self.top, best))
        mass, found = weights.value.sum(-1), multiply(weights, v)
        if linear is not None:
            found = found + mass[..., None] * linear
        self.total = self.total * decay + mass * share
        self.out = self.out * decay[..., None] + found * share[..., None]
        self.top = new

    def finish(self) -> tuple[Tensor, Tensor]:
        total = self.total.masked_fill(self.total == 0, 1)
        return self.out / total[..., None], self.top + self.total.log()


def _finite(top: Tensor) -> Tensor:
    """0 for rows that have seen no key: exp(-inf - 0) is 0, and exp(-inf + inf) would be NaN."""
    return top.masked_fill(top == -torch.inf, 0)


def _round(
    arithmetic: Arithmetic, q: Tensor, k: Tensor, smoothed: Tensor, v: Tensor, share: int
) -> _Rounded:
    smooth = not isinstance(arithmetic, Native)
    key, value = arithmetic.key(smoothed if smooth else k), arithmetic.value(v)
    query = arithmetic.query(q)
    return _Rounded(
        arithmetic,
        query,
        key.map(lambda x: _repeat(x, share)),
        value.map(lambda x: _repeat(x, share)),
        smooth,
    )


def _shown(k: Tensor, valid: Tensor | None) -> Tensor:
    """float32 [batch, keys]: 1 for a key that is seen"""
    batch, _, keys, _ = k.shape
    return torch.ones((batch, keys), device=k.device) if valid is None else valid.float()


def _padded(x: Tensor, runs: tuple[Run, ...]) -> Tensor:
    """float32 [batch, heads, blocks, size, head_dim] of x [batch, heads, tokens, head_dim], zero behind short blocks."""
    size = max(length for _, length in runs)
    at = torch.arange(size, device=x.device)
    starts, lengths = torch.tensor(runs, device=x.device).T[..., None]
    inside = at < lengths
    index = torch.where(inside, starts + at, 0)
    return x[:, :, index].float().masked_fill(~inside[..., None], 0)


def _repeat(x: Tensor, share: int) -> Tensor:
    """Heads of k or v for each query head."""
    return x.repeat_interleave(share, 1)


def _pick(x: Tensor, block: Tensor) -> Tensor:
    """x[b, h, block[b, h]] of x [batch, heads, blocks, ...]"""
    batch, heads = block.shape
    rows = torch.arange(batch, device=x.device)[:, None]
    return x[rows, torch.arange(heads, device=x.device), block]
