"""Which tier reads each pair of a row of queries and a key block: argmin over tiers of predicted error + price * cost.

Cost is a share of what reading all key blocks in the highest tier takes, error is relative (predict.py). So `price` is the
relative squared error that must go away for each dense attention's worth of time: with 0.01, a tenth of the time of dense
attention is spent where it takes at least 1e-3 off. Every pair decides for itself, so no pair moves to a cheaper tier as
the price falls, and the predicted error never rises. Price 0 refines all pairs that a window shows.

A pair outside of a window is always skipped: its means stand for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ir.trade import Trade
from .attention import Tier
from .calibrate import price_of_error, price_of_speedup
from .predict import Context, Predicted, predict
from .statistics import KeyStatistics, Partition, key_statistics, query_statistics

PADDING = 128  # key blocks that the kernel takes skipped ones in


@dataclass(frozen=True)
class Costs:
    """Time of a key block in each tier, relative to REFINE; of SKIP with what a row of means takes, shared by its blocks."""

    skip: float = 0.012
    skim: float = 0.67
    refine: float = 1.0


COSTS = Costs()


@dataclass(frozen=True)
class Routing:
    """What the kernel reads. order: int32 [batch, heads, rows, blocks], ids of refined blocks ascending, then those of
    skimmed blocks ascending, then -1. counts: int32 [batch, heads, rows, 2], refined and skimmed ones.

    bias: float32 [batch, heads, rows, blocks rounded up to 128]: what is added to scores q . mean_k of skipped blocks before
    they are scaled; -inf for all others. With the mass of all of them, the kernel adds mass * (q @ `KeyStatistics.slope`).
    """

    order: Tensor
    counts: Tensor
    bias: Tensor


def choose_tiers(
    predicted: Predicted, price: float | Tensor, costs: Costs, inside: Tensor | None = None
) -> Tensor:
    """uint8 of `Tier`, [batch, heads, rows, blocks]. inside: bool [1 or heads, rows, blocks], pairs that a window shows."""
    unit = price / predicted.skip.shape[-1]
    skip, skim = predicted.skip, predicted.skim
    # Differences of costs are taken first: the three comparisons are then monotone in the price, rounding included.
    skipped = (skip < unit * (costs.refine - costs.skip)) & (
        skip - skim < unit * (costs.skim - costs.skip)
    )
    skimmed = skim < unit * (costs.refine - costs.skim)
    tiers = torch.where(
        skipped, int(Tier.SKIP), torch.where(skimmed, int(Tier.SKIM), int(Tier.REFINE))
    )
    tiers = tiers.masked_fill(predicted.log_skipped == -torch.inf, int(Tier.SKIP))  # no keys
    if inside is not None:
        tiers = tiers.masked_fill(~inside, int(Tier.SKIP))
    return tiers.to(torch.uint8)


def lists_of(tiers: Tensor, predicted: Predicted, scale: float) -> Routing:
    """The lists of chosen tiers. scale: of the scores."""
    blocks = tiers.shape[-1]
    counts = torch.stack([(tiers == tier).sum(-1) for tier in (Tier.REFINE, Tier.SKIM)], -1)
    order = tiers.argsort(dim=-1, descending=True, stable=True)
    listed = torch.arange(blocks, device=tiers.device) < counts.sum(-1, keepdim=True)
    bias = predicted.log_skipped / scale
    bias = bias.masked_fill(tiers != Tier.SKIP, -torch.inf)
    padded = -(-blocks // PADDING) * PADDING
    return Routing(
        order.masked_fill(~listed, -1).int(),
        counts.int(),
        torch.nn.functional.pad(bias, (0, padded - blocks), value=-torch.inf),
    )


def route(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Partition,
    blocks: Partition,
    scale: float,
    trade: Trade,
    costs: Costs,
    context: Context | None = None,
    inside: Tensor | None = None,
) -> tuple[KeyStatistics, Predicted, Tensor]:
    """Statistics of the keys, predictions, and tiers. q, k, v: [batch, heads, tokens of the video, head_dim]"""
    keys = key_statistics(k, v, blocks)
    predicted = predict(query_statistics(q, rows), keys, rows, blocks, scale, context)
    price: float | Tensor = trade.price
    if trade.speedup is not None:
        price = price_of_speedup([predicted], trade.speedup, costs, inside)
    elif trade.max_error is not None:
        price = price_of_error([predicted], trade.max_error, costs, inside)
    return keys, predicted, choose_tiers(predicted, price, costs, inside)


def costs_of(tiers: Tensor, costs: Costs) -> Tensor:
    """float32 [batch, heads, rows]: what a row costs, as a share of refining all its key blocks."""
    table = torch.tensor([0.0, costs.skip, costs.skim, costs.refine], device=tiers.device)
    return table[tiers.long()].mean(-1)


def error_of(tiers: Tensor, predicted: Predicted) -> Tensor:
    """float32 [batch, heads, rows]: the predicted relative squared error of what each row has lost."""
    zero = torch.zeros_like(predicted.skip)
    skimmed = torch.where(tiers == Tier.SKIM, predicted.skim, zero)
    return torch.where(tiers == Tier.SKIP, predicted.skip, skimmed).sum(-1)
