"""Which price makes attention so many times faster, or keeps its error below a bound? By the router's own predictions.

As the price rises each pair of a row and a key block changes its tier at most twice, at prices that its predicted errors
say. Sorted, with sums of what changes, these are cost and error as functions of the price, exactly. Predictions of several
layers, steps or prompts go in together: the price is one for all of them. Nothing waits for a GPU, and sums are those of
integers, so each run finds the same price.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import StaError
from .predict import Predicted

if TYPE_CHECKING:
    from .router import Costs

_LOWEST = 1e-30  # a price at which what makes no error is skipped
_HIGHEST = 1e30  # a price at which nothing is worth reading
_STEPS = 2**20  # of a row's cost, and of an error bound
_MOST = 2**42  # a sum of that many steps is out of any bound


def price_of_speedup(
    predictions: Sequence[Predicted], speedup: float, costs: Costs, inside: Tensor | None = None
) -> Tensor:
    """float32 [1]: the lowest price at which key blocks take 1 / speedup of the time of refining all of them.

    inside: bool [1 or heads, rows, blocks], pairs that a window shows. Raises StaError if skipping all isn't that fast.
    """
    if speedup * costs.skip > 1:
        raise StaError(
            f"speedup={speedup} is out of reach: skipping every block is {1 / costs.skip:.1f} times as fast as reading "
            "all of them; pass less"
        )
    prices, saved, _, total = _changes(predictions, costs, inside, [1.0] * len(predictions))
    pairs = sum(each.skip.numel() for each in predictions)
    bound = round(pairs * _STEPS * (costs.refine - 1 / speedup))
    enough = total + saved.cumsum(0) >= bound
    first = (~enough).sum().clamp(max=len(prices) - 1)
    # Beyond it, by more than the rounding of its product with a cost.
    price = (prices[first] * (1 + 1e-5)).clamp(min=_LOWEST)
    return torch.where(total >= bound, 0.0, torch.where(enough[-1], price, _HIGHEST))[None].float()


def price_of_error(
    predictions: Sequence[Predicted],
    max_error: float,
    costs: Costs,
    inside: Tensor | None = None,
    excesses: Sequence[float] | None = None,
) -> Tensor:
    """float32 [1]: the highest price at which the relative error (root mean square) is at most max_error, as predicted.

    excesses: of each prediction, what squared errors of whole outputs are over predicted ones (measure.py); 1 by default.
    0 where skipping what a window hides already errs by more. Raises StaError if max_error isn't positive.
    """
    if not max_error > 0:
        raise StaError(f"max_error={max_error} allows no error; pass a positive one")
    factors = excesses or [1.0] * len(predictions)
    rows = sum(each.skip[..., 0].numel() for each in predictions)
    unit = _STEPS / (rows * max_error**2)
    prices, _, added, hidden = _changes(predictions, costs, inside, [f * unit for f in factors])
    fits = hidden + added.cumsum(0) <= _STEPS
    count = fits.sum()
    price = prices[count.clamp(max=len(prices) - 1)] * (1 - 1e-5)
    price = torch.where(count < len(prices), price, _HIGHEST)
    return torch.where(hidden <= _STEPS, price, 0.0)[None].float()


def _changes(
    predictions: Sequence[Predicted], costs: Costs, inside: Tensor | None, units: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(prices ascending, cost that each change saves, error that it adds, both of pairs that a window hides).

    Integers: of cost in steps of _STEPS for a block in the highest tier, of errors times `units`. The last is the cost
    saved if units are 1, else the error.
    """
    skip_refine, skim_refine = costs.refine - costs.skip, costs.refine - costs.skim
    prices, saved, added, hidden = [], [], [], []
    counts_cost = all(unit == 1.0 for unit in units)
    for each, unit in zip(predictions, units, strict=True):
        blocks = each.skip.shape[-1]
        shown = torch.ones_like(each.skip, dtype=torch.bool)
        if inside is not None:
            shown &= inside
        skip, skim = each.skip, each.skim
        first, second = skim / skim_refine, (skip - skim) / (costs.skim - costs.skip)
        twice = second > first
        of_skip = (skip * unit).clamp(max=_MOST).round().long()
        of_skim = (skim * unit).clamp(max=_MOST).round().long()
        none = torch.zeros_like(of_skip)
        # First changes, to SKIM or at once to SKIP, then those from SKIM to SKIP.
        at = torch.stack([torch.where(twice, first, skip / skip_refine), second]) * blocks
        whole, part = round(skip_refine * _STEPS), round(skim_refine * _STEPS)
        saves = torch.stack([torch.where(twice, part, whole), torch.where(twice, whole - part, 0)])
        adds = torch.stack(
            [torch.where(twice, of_skim, of_skip), torch.where(twice, of_skip - of_skim, none)]
        )
        change = shown & torch.stack([shown, twice])
        prices.append(torch.where(change, at, torch.inf).flatten())
        saved.append(torch.where(change, saves, 0).flatten())
        added.append(torch.where(change, adds, none).flatten())
        outside = ~shown
        hidden.append(outside.sum() * whole if counts_cost else (of_skip * outside).sum())
    at, order = torch.cat(prices).nan_to_num(torch.inf).sort(stable=True)
    return (
        at.clamp(max=_HIGHEST),
        torch.cat(saved)[order],
        torch.cat(added)[order],
        torch.stack(hidden).sum(),
    )
