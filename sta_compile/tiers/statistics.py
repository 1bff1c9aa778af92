"""What blocks of queries and keys are known by where tiers are chosen: means, means of compact groups, and spreads.

Blocks are tokens of the video in tile order. A block of 128 keys is known by its mean and by the means of a few compact
groups of its keys (ir/token_groups.py); what is left within the groups is one number. Kernels that read skipped blocks
multiply by `KeyStatistics.mean_k` and `mean_v`, so these are in the dtype of q.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ir.runs import Run
from ..ir.tiling import Tiling
from ..ir.token_groups import groups_of_runs

QUERY_GROUPS, KEY_GROUPS = 4, 8  # compact groups of a row, and of a key block


@dataclass(frozen=True)
class Partition:
    """Blocks of the tokens of a video, in compact groups.

    runs: int32 [blocks, 2], (start, length) in tokens of the video; a length may be 0. groups: uint8 [tokens], the group of
    each token within its block. sizes: float32 [blocks, groups], tokens of each group. longest: tokens of the longest block;
    tokens: of all of them.
    """

    runs: Tensor
    groups: Tensor
    sizes: Tensor
    longest: int
    tokens: int

    @staticmethod
    def of(
        tiling: Tiling, runs: tuple[Run, ...], groups: int, device: str | torch.device = "cpu"
    ) -> Partition:
        """runs: each within a tile."""
        of_tokens = torch.frombuffer(
            bytearray(groups_of_runs(tiling, runs, groups)), dtype=torch.uint8
        )
        table = torch.tensor(runs, dtype=torch.int32)
        block, token = _members(table)
        sizes = torch.zeros(len(runs), groups)
        sizes.index_put_((block, of_tokens[token].long()), torch.ones(len(block)), accumulate=True)
        longest = max(length for _, length in runs)
        return Partition(
            table.to(device), of_tokens.to(device), sizes.to(device), longest, len(token)
        )

    def every(self, step: int) -> Partition:
        """Of these blocks every `step`-th."""
        return replace(
            self, runs=self.runs[::step].contiguous(), sizes=self.sizes[::step].contiguous()
        )

    @property
    def lengths(self) -> Tensor:
        """float32 [blocks]"""
        return self.runs[:, 1].float()


@dataclass(frozen=True)
class QueryStatistics:
    """Of rows of queries. groups, spread: dtype of q [batch, heads, rows, groups, head_dim], means and variances of the
    groups' queries in each channel, 0 of empty groups. size: float32 [batch, heads, rows], the mean of |q|^2."""

    groups: Tensor
    spread: Tensor
    size: Tensor


@dataclass(frozen=True)
class KeyStatistics:
    """Of key blocks. mean_k, mean_v: dtype of q [batch, kv_heads, blocks, head_dim].

    offsets: dtype of q [batch, kv_heads, groups, blocks, head_dim], means of the groups' keys less mean_k, 0 of empty ones.
    float32 [batch, kv_heads, blocks]: total, the mean of |k - mean_k|^2; rest, that of |k - mean of its group|^2; spread_v,
    the mean of |v - mean_v|^2; between_v, that of |mean of its group - mean_v|^2. cross: float32 [batch, kv_heads,
    head_dim, head_dim], the mean over all keys of (k - mean_k) (v - mean_v)^T, means being those of the key's block.
    """

    mean_k: Tensor
    mean_v: Tensor
    offsets: Tensor
    total: Tensor
    rest: Tensor
    spread_v: Tensor
    between_v: Tensor
    cross: Tensor

    def slope(self, scale: float) -> Tensor:
        """What the values of skipped blocks are off their means by, for a query q: q @ slope. scale: of the scores.

        dtype of q [batch, kv_heads, head_dim, head_dim]
        """
        return (scale * self.cross).to(self.mean_k.dtype)


def query_statistics(q: Tensor, rows: Partition) -> QueryStatistics:
    """q: [batch, heads, tokens of the video, head_dim]"""
    block, token = _members(rows.runs)
    x = q[:, :, token].float()
    of_token = rows.groups[token].long()
    groups = _means(x, block, of_token, rows.sizes)
    spread = _means((x - groups[:, :, block, of_token]).square(), block, of_token, rows.sizes)
    size = x.new_zeros((*q.shape[:2], len(rows.runs)))
    size.index_add_(2, block, x.square().sum(-1))
    size = size / rows.lengths.clamp(min=1)
    return QueryStatistics(groups.to(q.dtype), spread.to(q.dtype), size)


def key_statistics(k: Tensor, v: Tensor, blocks: Partition) -> KeyStatistics:
    """k, v: [batch, kv_heads, tokens of the video, head_dim]"""
    block, token = _members(blocks.runs)
    of_token = blocks.groups[token].long()
    n = blocks.lengths.clamp(min=1)
    all_of_block = torch.zeros_like(of_token), n[:, None]
    keys, values = k[:, :, token].float(), v[:, :, token].float()
    groups = _means(keys, block, of_token, blocks.sizes)
    mean_k, mean_v = (_means(x, block, *all_of_block)[:, :, :, 0] for x in (keys, values))

    mean_groups = _means(values, block, of_token, blocks.sizes)
    offsets = (groups - mean_k[:, :, :, None]) * (blocks.sizes > 0)[..., None]
    keys_off, values_off = keys - mean_k[:, :, block], values - mean_v[:, :, block]

    def spread(x: Tensor) -> Tensor:
        total = x.new_zeros((*k.shape[:2], len(n)))
        return total.index_add_(2, block, x.square().sum(-1)) / n

    return KeyStatistics(
        mean_k.to(k.dtype),
        mean_v.to(k.dtype),
        offsets.transpose(2, 3).contiguous().to(k.dtype),
        spread(keys_off),
        spread(keys - groups[:, :, block, of_token]),
        spread(values_off),
        spread(mean_groups[:, :, block, of_token] - mean_v[:, :, block]),
        keys_off.mT @ values_off / max(len(token), 1),
    )


def _members(runs: Tensor) -> tuple[Tensor, Tensor]:
    """(block, token) of each token of each run"""
    starts, lengths = runs.long().T
    block = torch.arange(len(runs), device=runs.device).repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    at = torch.arange(len(block), device=runs.device) - first[block]
    return block, starts[block] + at


def _means(x: Tensor, block: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    """[batch, heads, blocks, groups, head_dim] of x [batch, heads, members, head_dim]"""
    blocks, groups = sizes.shape
    total = x.new_zeros((*x.shape[:2], blocks * groups, x.shape[-1]))
    total.index_add_(2, block * groups + group, x)
    means: Tensor = total.unflatten(2, (blocks, groups)) / sizes.clamp(min=1)[..., None]
    return means
