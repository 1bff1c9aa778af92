"""Sizes that depend on data, as expressions of a shape environment, and what was learnt of them."""

from __future__ import annotations

from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from . import _torch


def depends_on_data(size: Any) -> bool:
    """Is a size, as an expression, made of one that is known at run time only?"""
    return bool(free_unbacked_symbols(size))


def least(size: Any, shape_env: Any) -> Any:
    """A number that a size is never below: an int, or minus infinity."""
    return size if isinstance(size, int) else shape_env.bound_sympy(size).lower


def equate(left: Any, right: Any, shape_env: Any) -> None:
    """States that two sizes are the same number, from here on, for all that is asked of this environment by `simplified`.

    The youngest size that depends on data is given by the others; nothing is stated where none can be.
    """
    difference = sympy.expand(_torch.simplified(left - right, shape_env))
    if isinstance(difference, int):
        return
    factors = difference.as_coefficients_dict()
    symbols = [s for s in free_unbacked_symbols(difference) if factors.get(s) in (1, -1)]
    if not symbols:
        return
    symbol = max(symbols, key=lambda s: int(s.name.lstrip("u")))
    rest = difference - factors[symbol] * symbol
    if symbol in rest.free_symbols:
        return
    learnt, value = _learnt(shape_env), -rest * factors[symbol]
    for other in learnt:
        learnt[other] = learnt[other].xreplace({symbol: value})
    learnt[symbol] = value


def _learnt(shape_env: Any) -> dict[Any, Any]:
    """Sizes that depend on data, by what they were found to be."""
    if not hasattr(shape_env, "_sta_learnt"):
        shape_env._sta_learnt = {}
    learnt: dict[Any, Any] = shape_env._sta_learnt
    return learnt
