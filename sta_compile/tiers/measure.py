"""What tiers really cost in error, on given activations: of pairs alone, and of whole outputs.

A router predicts errors of pairs as if they were independent. Those of skipped blocks are not quite: where keys and values
depend on each other alike in many blocks they add up, so a whole output errs by more than the root of the summed squares.
By how much is nearly one number for a layer and step, whatever the price: `excess` measures it on a few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .arithmetic import Fp8, Operand
from .attention import Tier
from .predict import Context, Predicted
from .router import error_of
from .statistics import KeyStatistics, Partition


class Row:
    """One row of queries of one head: its attention exactly, and what each key block becomes in each tier.

    exact: [queries, head_dim]. skipped, skimmed, refined: numerator [queries, blocks, head_dim] and mass [queries, blocks]
    relative to the exact denominator.
    """

    def __init__(self, head: _Head, start: int, length: int, log_skipped: Tensor) -> None:
        q = head.q[start : start + length]
        scores, beside = (head.scale * (q @ x.mT) for x in (head.k, head.context[0]))
        top = torch.cat([scores, beside], -1).amax(-1, keepdim=True)
        total = (scores - top).exp().sum(-1, keepdim=True)
        total = total + (beside - top).exp().sum(-1, keepdim=True)
        weights, of_context = (scores - top).exp() / total, (beside - top).exp() / total
        self.context = of_context @ head.context[1], of_context.sum(-1)
        self.exact = weights @ head.v + self.context[0]
        p = head.of_blocks(weights)
        self.refined = torch.einsum("qbk,bkd->qbd", p, head.v_blocks), p.sum(-1)

        q8 = head.arithmetic.query(q[None, None, None]).value[0, 0, 0]
        shift = head.scale * (q @ head.mean)[:, None]
        low = head.of_blocks(head.scale * (q8 @ head.k8.mT) + shift, -torch.inf)
        best = low.amax(-1, keepdim=True)
        p8 = head.arithmetic.weights((low - best).exp()).value * (best - top[..., None]).exp()
        p8 = p8 / total[..., None]
        self.skimmed = torch.einsum("qbk,bkd->qbd", p8, head.v8_blocks), p8.sum(-1)

        mass = (head.scale * (q @ head.mean_k.mT) + log_skipped - top).exp() / total
        linear = q @ head.slope
        self.skipped = mass[..., None] * (head.mean_v + linear[:, None]), mass

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Squared errors [blocks] of skipping and of skimming each block alone, summed over the queries."""
        found = []
        for numerator, mass in (self.skipped, self.skimmed):
            wrong = numerator - self.refined[0]
            wrong = wrong - (mass - self.refined[1])[..., None] * self.exact[:, None]
            found.append(wrong.square().sum((0, 2)))
        return found[0], found[1]

    def read(self, tiers: Tensor) -> Tensor:
        """The output [queries, head_dim] with a tier for each block."""
        numerator, mass = self.context
        for tier, (of_tier, weight) in (
            (Tier.SKIP, self.skipped),
            (Tier.SKIM, self.skimmed),
            (Tier.REFINE, self.refined),
        ):
            chosen = (tiers == tier).float()
            numerator = numerator + torch.einsum("b,qbd->qd", chosen, of_tier)
            mass = mass + weight @ chosen
        return numerator / mass[:, None].clamp(min=1e-30)


class _Head:
    """One query head and its key head. context: keys and values beside the video that are seen, [keys, head_dim]."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        means: tuple[Tensor, Tensor, Tensor],
        blocks: Partition,
        scale: float,
        context: tuple[Tensor, Tensor],
    ) -> None:
        self.q, self.k, self.v = q, k, v
        self.scale, self.context, self.arithmetic = scale, context, Fp8()
        starts, lengths = blocks.runs.long().T[..., None]
        at = torch.arange(blocks.longest, device=q.device)
        self.inside = at < lengths
        self.index = torch.where(self.inside, starts + at, 0)
        self.mean = k.mean(0)
        self.k8 = _rounded(self.arithmetic.key, k - self.mean)
        self.v_blocks = self._blocks(v)
        self.v8_blocks = self._blocks(_rounded(self.arithmetic.value, v))
        self.mean_k, self.mean_v, self.slope = means

    def of_blocks(self, x: Tensor, padding: float = 0.0) -> Tensor:
        """[queries, blocks, keys] of x [queries, tokens]"""
        found: Tensor = x[:, self.index].masked_fill(~self.inside, padding)
        return found

    def _blocks(self, x: Tensor) -> Tensor:
        found: Tensor = x[self.index] * self.inside[..., None]
        return found


def _rounded(rounded: Callable[[Tensor], Operand], x: Tensor) -> Tensor:
    return rounded(x[None, None, None]).value[0, 0, 0]


def rows_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: KeyStatistics,
    rows: Partition,
    blocks: Partition,
    scale: float,
    log_skipped: Tensor,
    context: Context | None = None,
) -> Iterator[tuple[tuple[int, int, int], Row]]:
    """((sample, head, row), Row) of each row that has queries. q, k, v: [batch, heads, tokens of the video, head_dim].

    log_skipped: of `Predicted`.
    """
    share = q.shape[1] // k.shape[1]
    slope = keys.slope(scale)
    for sample in range(q.shape[0]):
        for head in range(q.shape[1]):
            at = sample, head // share
            means = keys.mean_k[at].float(), keys.mean_v[at].float(), slope[at].float()
            none = k.new_zeros((0, k.shape[-1])).float()
            beside = none, none
            if context is not None:
                seen = slice(None) if context.shown is None else context.shown[sample]
                beside = context.k[at][seen].float(), context.v[at][seen].float()
            sides = q[sample, head].float(), k[at].float(), v[at].float()
            of_head = _Head(*sides, means, blocks, scale, beside)
            for index, (start, length) in enumerate(rows.runs.tolist()):
                if length:
                    place = sample, head, index
                    yield place, Row(of_head, start, length, log_skipped[place])


def excess(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: KeyStatistics,
    rows: Partition,
    blocks: Partition,
    scale: float,
    tiers: Tensor,
    predicted: Predicted,
    context: Context | None = None,
) -> float:
    """The squared error of whole outputs over the predicted one; 1 without any. tiers: [batch, heads, rows, blocks]"""
    wrong, size = torch.zeros((), device=q.device), torch.zeros((), device=q.device)
    for place, row in rows_of(q, k, v, keys, rows, blocks, scale, predicted.log_skipped, context):
        wrong += (row.read(tiers[place]) - row.exact).square().sum()
        size += row.exact.square().sum()
    part = rows.lengths / rows.lengths.sum() * (rows.longest / rows.lengths.clamp(min=1))
    expected = (error_of(tiers, predicted) * part).sum(-1).mean()
    return float(wrong / size / expected) if float(expected) > 0 and float(size) > 0 else 1.0
