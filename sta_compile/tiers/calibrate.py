"""Which price makes attention so many times faster, or keeps its error below a bound? By the router's own predictions.

Cost falls and error grows with the price, both in steps, so the price is found by bisection. Predictions of several layers,
steps or prompts go in together: the price is one for all of them, and cost and error are their means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import StaError
from .predict import Predicted
from .router import Costs, choose_tiers, costs_of, error_of

_LEAST, _MOST = 1e-12, 1e12  # prices
_STEPS = 60


def price_of_speedup(
    predictions: Sequence[Predicted], speedup: float, costs: Costs, inside: Tensor | None = None
) -> float:
    """The lowest price at which key blocks take 1 / speedup of the time of refining all of them.

    Raises StaError if skipping everything isn't that fast.
    """
    if speedup * costs.skip > 1:
        raise StaError(
            f"speedup={speedup} is out of reach: skipping every block is {1 / costs.skip:.1f} times as fast as reading "
            "all of them; pass less"
        )

    def is_fast(price: float) -> bool:
        tiers = [choose_tiers(each, price, costs, inside) for each in predictions]
        spent = torch.stack([costs_of(each, costs).mean() for each in tiers]).mean()
        return bool(spent * speedup <= 1 + 1e-6)

    return 0.0 if is_fast(0.0) else _turn(is_fast)[1]


def price_of_error(
    predictions: Sequence[Predicted],
    max_error: float,
    costs: Costs,
    inside: Tensor | None = None,
    excesses: Sequence[float] | None = None,
) -> float:
    """The highest price at which the relative error (root mean square) is at most max_error, as predicted.

    excesses: of each prediction, what squared errors of whole outputs are over predicted ones (measure.py); 1 by default.
    0 where skipping what a window hides already errs by more. Raises StaError if max_error isn't positive.
    """
    if not max_error > 0:
        raise StaError(f"max_error={max_error} allows no error; pass a positive one")

    def is_wrong(price: float) -> bool:
        tiers = [choose_tiers(each, price, costs, inside) for each in predictions]
        factors = excesses or [1.0] * len(tiers)
        errors = [
            error_of(chosen, predicted).mean() * factor
            for chosen, predicted, factor in zip(tiers, predictions, factors, strict=True)
        ]
        return bool(torch.stack(errors).mean() > max_error**2)

    return 0.0 if is_wrong(0.0) else _turn(is_wrong)[0]


def _turn(holds: Callable[[float], bool]) -> tuple[float, float]:
    """Neighbouring prices: `holds` is False for the lower one and True for the higher one, if it ever is."""
    low, high = _LEAST, _MOST
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high
