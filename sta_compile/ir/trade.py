"""How much error may attention in tiers trade for time? One number says it: a price, a speedup, or a largest error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from ..errors import StaError

MOST_SPEEDUP = 50.0  # reading nothing but means is not much faster


@dataclass(frozen=True)
class Trade:
    """price: the relative squared error that a dense attention's worth of time must take off (tiers/router.py).

    speedup: of key blocks against reading all of them; max_error: relative, root mean square, as predicted. At most one of
    the two; if there is one, each call finds its price from it.
    """

    price: float = 0.0
    speedup: float | None = None
    max_error: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.price < math.inf:
            raise StaError(f"price {self.price!r} is not a number of 0 or more; pass one")
        if self.speedup is not None and not 1 <= self.speedup <= MOST_SPEEDUP:
            raise StaError(
                f"speedup {self.speedup!r} is not in 1 to {MOST_SPEEDUP:g}; pass one that is"
            )
        if self.max_error is not None and not 0 < self.max_error < math.inf:
            raise StaError(f"max_error {self.max_error!r} is not a positive number; pass one")
        if self.speedup is not None and self.max_error is not None:
            raise StaError("a speedup and a largest error can't both be kept; pass one of the two")

    @staticmethod
    def parse(values: Mapping[str, str]) -> Trade:
        """Of fields of a text, by name; those of others are left alone."""
        names = [field.name for field in fields(Trade) if field.name in values]
        return Trade(**{name: float(values[name]) for name in names})

    def __str__(self) -> str:
        """ "price=0.01", as in the text of an AttentionSpec."""
        if self.speedup is not None:
            return f"speedup={self.speedup!r}"
        if self.max_error is not None:
            return f"max_error={self.max_error!r}"
        return f"price={self.price!r}"


EXACT = Trade()
