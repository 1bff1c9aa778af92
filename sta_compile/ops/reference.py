"""Attention over windows of tiles in plain PyTorch: the CPU path, the oracle and the backward.

Query tiles with the same window are one group. Windows shift inward at borders, so a 5x6x10 tiling
with a 3x3x3 window has 3x4x8 = 96 groups for 300 tiles. A group gathers its keys once and goes over
blocks of query rows and keys with an online softmax: memory is linear in the number of tokens.

Scores, softmax and sums are in float32 (float64 for float64 inputs). Hidden keys are replaced by
zeros before any product, since a weight of 0 times NaN would be NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

import torch
from torch import Tensor

from ..ir.geometry import Geometry
from ..ir.runs import Run, key_runs
from ..ir.tiling import Tiling
from ..ir.visibility import Visibility
from ..ir.window import Window

# Scores that exist at a time over batch and heads (32 MB in float32), and keys of one block.
BLOCK_SCORES = 1 << 23
BLOCK_KEYS = 4096


@dataclass(frozen=True)
class Group:
    """Query rows that read the same keys: runs (start, length) of q, and of k and v."""

    rows: tuple[Run, ...]
    keys: tuple[Run, ...]  # video keys; every group reads all valid context keys as well


def _merge(runs: list[Run]) -> tuple[Run, ...]:
    merged: list[Run] = []
    for start, length in sorted(run for run in runs if run[1]):
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return tuple(merged)


def _equal_windows(tiling: Tiling, window: Window, axis: int) -> list[range]:
    """Intervals of query tiles on an axis that start their window at the same tile."""
    firsts = [window.first(tiling, (i, i, i))[axis] for i in range(tiling.tiles[axis])]
    cuts = [i for i in range(1, len(firsts)) if firsts[i] != firsts[i - 1]]
    return [range(a, b) for a, b in pairwise([0, *cuts, len(firsts)])]


@lru_cache(maxsize=256)
def groups(geometry: Geometry) -> tuple[Group, ...]:
    """All query rows of the sequence, each in one group."""
    query, key = geometry.video_query, geometry.video_key
    tiling, window = geometry.tiling, geometry.window
    everything = ((key, tiling.tokens),)
    if window.is_full(tiling):
        return (Group(((0, geometry.queries),), everything),)
    found = [Group(_merge(list(geometry.context_queries)), everything)]
    for box in product(*(_equal_windows(tiling, window, axis) for axis in range(3))):
        rows = [(query + tiling.start(*tile), tiling.count(*tile)) for tile in product(*box)]
        first = (box[0][0], box[1][0], box[2][0])
        keys = tuple((key + at, length) for at, length in key_runs(tiling, window, first))
        found.append(Group(_merge(rows), keys))
    return tuple(group for group in found if group.rows)


def _gather(x: Tensor, runs: tuple[Run, ...], dtype: torch.dtype) -> Tensor:
    """[batch, heads, rows of all runs, head_dim]"""
    return torch.cat([x[:, :, start : start + length] for start, length in runs], 2).to(dtype)


def _scatter(x: Tensor, runs: tuple[Run, ...], values: Tensor, add: bool = False) -> None:
    for (start, length), part in zip(
        runs, values.split([length for _, length in runs], 2), strict=True
    ):
        target = x[:, :, start : start + length]
        target.add_(part) if add else target.copy_(part)


def _valid(visible: Visibility) -> Tensor | None:
    """bool [batch, context keys]; None if all are valid."""
    lengths, mask, contexts = visible.key_lengths, visible.key_mask, visible.geometry.contexts
    if lengths is None or not contexts:
        return mask if contexts else None
    columns = [
        torch.arange(length, device=lengths.device) < lengths[:, index, None]
        for index, (_, length) in enumerate(contexts)
    ]
    valid = torch.cat(columns, 1)
    return valid if mask is None else valid & mask


class _Keys:
    """Keys and values of a group: its video runs, then all context keys, invalid ones zeroed.

    valid: bool [batch, context keys], or of all keys if keys of the video are hidden too; first: the first key it is about.
    """

    def __init__(
        self, k: Tensor, v: Tensor, visible: Visibility, group: Group, valid: Tensor | None
    ) -> None:
        dtype, geometry = _compute_dtype(k), visible.geometry
        self.runs = (*group.keys, *geometry.contexts)
        self.k, self.v = (_gather(x, self.runs, dtype) for x in (k, v))
        self.first, self.valid = sum(length for _, length in group.keys), valid
        shown = visible.video_mask
        if shown is not None:
            start = geometry.video_key
            parts = [shown[:, at - start : at - start + n] for at, n in group.keys]
            others = shown.new_ones((len(shown), geometry.context_keys))
            self.first, self.valid = 0, torch.cat([*parts, others if valid is None else valid], 1)
        if self.valid is not None:
            hidden = ~self.valid[:, None, :, None]
            for x in (self.k, self.v):
                x[:, :, self.first :].masked_fill_(hidden, 0)

    def blocks(self) -> Iterator[slice]:
        count = self.k.shape[2]
        for start in range(0, count, BLOCK_KEYS):
            yield slice(start, min(start + BLOCK_KEYS, count))

    def mask(self, scores: Tensor, keys: slice) -> Tensor:
        """Scores [batch, kv_heads, rows, keys] with invalid keys at -inf, in place."""
        if self.valid is None or keys.stop <= self.first:
            return scores
        inside = max(keys.start, self.first)
        valid = self.valid[:, inside - self.first : keys.stop - self.first]
        scores[..., inside - keys.start :].masked_fill_(~valid[:, None, None], -torch.inf)
        return scores


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _row_blocks(heads: int, batch: int, rows: int, keys: int) -> Iterator[slice]:
    step = max(1, BLOCK_SCORES // max(1, batch * heads * min(keys, BLOCK_KEYS)))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[batch, heads, rows, ...] -> [batch, kv_heads, heads / kv_heads * rows, ...]"""
    folded: Tensor = x.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    return folded


def _unfold(x: Tensor, heads: int) -> Tensor:
    unfolded: Tensor = x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)
    return unfolded


def _attend(q: Tensor, keys: _Keys, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse of folded query rows [batch, kv_heads, rows, head_dim] over all of `keys`."""
    top = q.new_full(q.shape[:-1], -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for block in keys.blocks():
        scores = keys.mask(q @ keys.k[:, :, block].mT * scale, block)
        new = torch.maximum(top, scores.amax(-1))
        base = new.masked_fill(new == -torch.inf, 0)  # no valid key yet: exp(-inf - 0) = 0
        weights = scores.sub_(base[..., None]).exp_()
        decay = torch.exp(top - base)
        total = total * decay + weights.sum(-1)
        out = out * decay[..., None] + weights @ keys.v[:, :, block]
        top = new
    return out / total.masked_fill(total == 0, 1)[..., None], top + total.log()


def _by_window(
    visible: Visibility, share: int
) -> Iterator[tuple[Visibility, list[int], list[int]]]:
    """(what they see, query heads, key heads) of heads with one window. share: query heads of a key head."""
    for window, heads in visible.geometry.by_window().items():
        case = replace(visible, geometry=visible.geometry.with_window(window))
        yield case, list(heads), [head // share for head in heads]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, visible: Visibility, scale: float
) -> tuple[Tensor, Tensor]:
    """As if no sample were dense."""
    batch, heads, tokens, _ = q.shape
    out = torch.empty_like(q)
    lse = q.new_empty((batch, heads, tokens), dtype=torch.float32)
    geometry, valid = visible.geometry, _valid(visible)
    if geometry.head_windows:
        for case, of_q, of_k in _by_window(visible, heads // k.shape[1]):
            found = _forward(q[:, of_q], k[:, of_k], v[:, of_k], case, scale)
            out[:, of_q], lse[:, of_q] = found
        return out, lse
    for group in groups(geometry):
        keys = _Keys(k, v, visible, group, valid)
        rows = _gather(q, group.rows, keys.k.dtype)
        parts = []
        for block in _row_blocks(heads, batch, rows.shape[2], keys.k.shape[2]):
            part, part_lse = _attend(_fold(rows[:, :, block], k.shape[1]), keys, scale)
            parts.append((_unfold(part, heads).to(q.dtype), _unfold(part_lse, heads)))
        _scatter(out, group.rows, torch.cat([part for part, _ in parts], 2))
        _scatter(lse, group.rows, torch.cat([part for _, part in parts], 2))
    return out, lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Visibility,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, kv_heads = _compute_dtype(q), k.shape[1]
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
    geometry, valid = visible.geometry, _valid(visible)
    if geometry.head_windows:
        for case, of_q, of_k in _by_window(visible, q.shape[1] // kv_heads):
            dout_h, q_h, out_h, lse_h = (x[:, of_q] for x in (dout, q, out, lse))
            k_h, v_h = (x[:, of_k].to(dtype) for x in (k, v))  # sums over heads are rounded once
            found = _backward(dout_h, q_h, k_h, v_h, out_h, lse_h, case, scale)
            dq[:, of_q], part_dk, part_dv = found
            at = torch.tensor(of_k, device=k.device)
            dk.index_add_(1, at, part_dk)
            dv.index_add_(1, at, part_dv)
        return dq, dk.to(k.dtype), dv.to(v.dtype)
    for group in groups(geometry):
        keys = _Keys(k, v, visible, group, valid)
        rows, drows, orows = (_gather(x, group.rows, dtype) for x in (q, dout, out))
        row_lse = _gather(lse, group.rows, dtype)
        delta = (drows * orows).sum(-1)
        group_dk, group_dv = torch.zeros_like(keys.k), torch.zeros_like(keys.v)
        parts = []
        for block in _row_blocks(q.shape[1], q.shape[0], rows.shape[2], keys.k.shape[2]):
            q_b, do_b, lse_b, delta_b = (
                _fold(x[:, :, block], kv_heads) for x in (rows, drows, row_lse, delta)
            )
            lse_b = lse_b.masked_fill(lse_b == -torch.inf, 0)  # no valid key: all weights are 0
            part = torch.zeros_like(q_b)
            for columns in keys.blocks():
                k_c, v_c = keys.k[:, :, columns], keys.v[:, :, columns]
                weights = keys.mask(q_b @ k_c.mT * scale, columns).sub_(lse_b[..., None]).exp_()
                group_dv[:, :, columns] += weights.mT @ do_b
                dscores = weights.mul_((do_b @ v_c.mT).sub_(delta_b[..., None])).mul_(scale)
                group_dk[:, :, columns] += dscores.mT @ q_b
                part += dscores @ k_c
            parts.append(_unfold(part, q.shape[1]).to(q.dtype))
        _scatter(dq, group.rows, torch.cat(parts, 2))
        _scatter(dk, keys.runs, group_dk, add=True)
        _scatter(dv, keys.runs, group_dv, add=True)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def forward(
    q: Tensor, k: Tensor, v: Tensor, visible: Visibility, scale: float
) -> tuple[Tensor, Tensor]:
    """(out like q, lse float32 [batch, heads, queries]); all of q, k, v [batch, heads, tokens, d]."""
    dense = visible.whole
    if dense is None:
        return _forward(q, k, v, visible, scale)
    if _capturing(q):  # flags can't be read now: compute both and select
        out, lse = _forward(q, k, v, visible.sparse(), scale)
        full_out, full_lse = _forward(q, k, v, visible.full(), scale)
        out.copy_(torch.where(dense[:, None, None, None], full_out, out))
        lse.copy_(torch.where(dense[:, None, None], full_lse, lse))
        return out, lse
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    for case, samples in _split(visible, dense):
        out[samples], lse[samples] = _forward(q[samples], k[samples], v[samples], case, scale)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Visibility,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each with the strides of `empty_like` of q, k, v."""
    dense = visible.whole
    if dense is None:
        return _backward(dout, q, k, v, out, lse, visible, scale)
    if _capturing(q):  # a sample of the other case gets lse = inf: all its weights are 0
        drop = ~dense[:, None, None], dense[:, None, None]
        cases = zip((visible.full(), visible.sparse()), drop, strict=True)
        parts = [
            _backward(dout, q, k, v, out, lse.masked_fill(other, torch.inf), case, scale)
            for case, other in cases
        ]
        dq, dk, dv = (full.add_(other) for full, other in zip(*parts, strict=True))
        return dq, dk, dv
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for case, samples in _split(visible, dense):
        dout_s, q_s, k_s, v_s, out_s, lse_s = (x[samples] for x in (dout, q, k, v, out, lse))
        dq[samples], dk[samples], dv[samples] = _backward(
            dout_s, q_s, k_s, v_s, out_s, lse_s, case, scale
        )
    return dq, dk, dv


def _split(visible: Visibility, dense: Tensor) -> Iterator[tuple[Visibility, Tensor]]:
    """(what they see, samples) of the dense and of the other samples; reads the flags on the host."""
    for case, flags in ((visible.full(), dense), (visible.sparse(), ~dense)):
        samples = flags.nonzero()[:, 0]
        if len(samples):
            yield case.of(samples), samples
