"""What blocks of queries and keys are known by where tiers are chosen: means, means of compact groups, and spreads.

Blocks are tokens of the video in tile order. A block of 128 keys is known by its mean and by the means of a few compact
groups of its keys (ir/token_groups.py); what is left within the groups is one number. Kernels that read skipped blocks
multiply by `KeyStatistics.mean_k` and `mean_v`, so these are in the dtype of q. The keys farthest from the mean stand for
themselves: a single key may outweigh all others of its block, and no mean would say so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ir.runs import Run
from ..ir.tiling import Tiling
from ..ir.token_groups import groups_of_runs

QUERY_GROUPS, KEY_GROUPS = 4, 6  # compact groups of a row, and of a key block
STAND_OUT = 2  # keys of a block that are groups of their own: those farthest from its mean


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

    offsets: dtype of q [batch, kv_heads, groups, blocks, head_dim], means of the groups' keys less mean_k, 0 of empty ones;
    compact groups come first, then STAND_OUT keys. sizes: float32 [batch, kv_heads, groups, blocks], keys of each group.
    float32 [batch, kv_heads, blocks]: total, the mean of |k - mean_k|^2; rest, that of |k - mean of its group|^2; spread_v,
    the mean of |v - mean_v|^2; between_v, that of |mean of its group - mean_v|^2. cross: float32 [batch, kv_heads,
    head_dim, head_dim], the mean over all keys of (k - mean_k) (v - mean_v)^T, means being those of the key's block.
    """

    mean_k: Tensor
    mean_v: Tensor
    offsets: Tensor
    sizes: Tensor
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
    many, groups = rows.sizes.shape
    of_token = (block * groups + rows.groups[token].long()).expand(x.shape[:3])
    means, _ = _means(x, of_token, many * groups)
    spread, _ = _means((x - _at(means, of_token)).square(), of_token, many * groups)
    size, _ = _means(x.square().sum(-1, keepdim=True), block.expand(x.shape[:3]), many)
    means, spread = (y.unflatten(2, (many, groups)).to(q.dtype) for y in (means, spread))
    return QueryStatistics(means, spread, size[..., 0])


def key_statistics(k: Tensor, v: Tensor, blocks: Partition) -> KeyStatistics:
    """k, v: [batch, kv_heads, tokens of the video, head_dim]"""
    block, token = _members(blocks.runs)
    keys, values = k[:, :, token].float(), v[:, :, token].float()
    many, compact = blocks.sizes.shape
    groups = compact + STAND_OUT
    of_block = block.expand(keys.shape[:3])
    mean_k, mean_v = (_means(x, of_block, many)[0] for x in (keys, values))
    keys_off, values_off = keys - _at(mean_k, of_block), values - _at(mean_v, of_block)
    far = keys_off.square().sum(-1)
    group = blocks.groups[token].long().expand(far.shape).clone()
    left = far.clone()
    place = torch.arange(len(block), device=k.device).expand(far.shape)
    for index in range(STAND_OUT):
        best = _of_blocks(left, of_block, many, "amax")
        tied = torch.where((left == best) & (left >= 0), place, len(block))
        here = place == _of_blocks(tied, of_block, many, "amin")  # the first of equally far ones
        group[here] = compact + index
        left[here] = -1
    of_token = of_block * groups + group
    offsets, sizes = _means(keys_off, of_token, many * groups)
    between, _ = _means(values_off, of_token, many * groups)

    def spread(x: Tensor) -> Tensor:
        return _means(x.square().sum(-1, keepdim=True), of_block, many)[0][..., 0]

    return KeyStatistics(
        mean_k.to(k.dtype),
        mean_v.to(k.dtype),
        offsets.unflatten(2, (many, groups)).transpose(2, 3).contiguous().to(k.dtype),
        sizes.unflatten(2, (many, groups)).mT.contiguous(),
        spread(keys_off),
        spread(keys_off - _at(offsets, of_token)),
        spread(values_off),
        spread(_at(between, of_token)),
        keys_off.mT @ values_off / max(len(token), 1),
    )


def _members(runs: Tensor) -> tuple[Tensor, Tensor]:
    """(block, token) of each token of each run"""
    starts, lengths = runs.long().T
    block = torch.arange(len(runs), device=runs.device).repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    at = torch.arange(len(block), device=runs.device) - first[block]
    return block, starts[block] + at


def _means(x: Tensor, group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(means [batch, heads, groups, columns], 0 of empty ones; sizes [batch, heads, groups]) of x [batch, heads, members,
    columns]. group: [batch, heads, members]"""
    shape = (*x.shape[:2], groups)
    sizes = x.new_zeros(shape).scatter_add_(2, group, torch.ones_like(group, dtype=x.dtype))
    total = x.new_zeros((*shape, x.shape[-1])).scatter_add_(2, group[..., None].expand_as(x), x)
    return total / sizes.clamp(min=1)[..., None], sizes


def _of_blocks(x: Tensor, of_block: Tensor, many: int, reduce: str) -> Tensor:
    """Of each member, the largest or smallest x of its block."""
    found = x.new_zeros((*x.shape[:2], many))
    return found.scatter_reduce(2, of_block, x, reduce, include_self=False).gather(2, of_block)


def _at(means: Tensor, group: Tensor) -> Tensor:
    """Of each member, that of its group."""
    return means.gather(2, group[..., None].expand(*group.shape, means.shape[-1]))
