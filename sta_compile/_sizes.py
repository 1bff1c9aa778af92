"""Sizes of a graph as expressions of its shape environment: what guards say of them, and what was learnt besides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from math import lcm
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import Max


def simplified(size: Any, shape_env: Any) -> Any:
    """A size with what guards have made known of it: constants, and symbols that are equal to an expression."""
    if isinstance(size, int):
        return size
    expr = shape_env.simplify(size)
    replaced = expr.xreplace(_equalities(shape_env)).xreplace(_learnt(shape_env))
    if replaced != expr:
        expr = shape_env.simplify(replaced)
    return int(expr) if expr.is_Integer else expr


def whole_quotient(size: Any, divisor: Any) -> Any | None:
    """size / divisor, if that is a whole number whatever the symbols are: s0 * s1 / s1 = s0; None if it may be none."""
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if divisor and size % divisor == 0 else None
    quotient = sympy.cancel(sympy.sympify(size) / divisor)
    if not quotient.is_integer:
        return None
    return int(quotient) if quotient.is_Integer else quotient


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
    difference = sympy.expand(simplified(left - right, shape_env))
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


class Combinations:
    """Which sizes are sums of given ones, each times a number, and of a constant.

    sums = Combinations()
    sums.add(s0 + 216)        True: it says something that those before it don't
    sums.of(s0)               (-216, {0: 1}, 1): -216, and once the size that was added first, divided by 1
    """

    def __init__(self) -> None:
        self._count = 0
        # Each with the term that it removes from those after it, and what it is made of; -1 stands for the number 1.
        self._rows: list[tuple[Any, dict[Any, Any], dict[int, Any]]] = []
        self._keep(*self._reduced({sympy.S.One: sympy.S.One}, {-1: sympy.S.One}))

    def add(self, size: Any) -> bool:
        """Adds a size; False if it is a combination of those before."""
        made_of = {self._count: sympy.S.One}
        self._count += 1
        return self._keep(*self._reduced(_terms(size), made_of))

    def of(self, size: Any) -> tuple[int, dict[int, int], int] | None:
        """(constant, {number of an added size: factor}, divisor of all that); None for a size that is no combination."""
        rest, made_of = self._reduced(_terms(size), {})
        if rest:
            return None
        divisor = lcm(*(int(n.q) for n in made_of.values()))
        factors = {i: int(-n * divisor) for i, n in made_of.items() if n}
        return factors.pop(-1, 0), factors, divisor

    def _reduced(
        self, terms: dict[Any, Any], made_of: dict[int, Any]
    ) -> tuple[dict[Any, Any], dict[int, Any]]:
        for term, row, of_row in self._rows:
            factor = terms.get(term, 0)
            if factor:
                terms, made_of = _minus(terms, row, factor), _minus(made_of, of_row, factor)
        return terms, made_of

    def _keep(self, terms: dict[Any, Any], made_of: dict[int, Any]) -> bool:
        if not terms:
            return False
        term, factor = next(iter(terms.items()))
        row = {t: n / factor for t, n in terms.items()}
        self._rows.append((term, row, {i: n / factor for i, n in made_of.items()}))
        return True


def _terms(size: Any) -> dict[Any, Any]:
    """2 * s0 * s1 + 8 -> {s0 * s1: 2, 1: 8}."""
    return {
        term: n for term, n in sympy.expand(sympy.sympify(size)).as_coefficients_dict().items() if n
    }


def _minus(a: dict[Any, Any], b: dict[Any, Any], factor: Any) -> dict[Any, Any]:
    """a - factor * b, without zeros."""
    out = {key: a.get(key, 0) - factor * b.get(key, 0) for key in {**a, **b}}
    return {key: n for key, n in out.items() if n}


def known_as_products(shape_env: Any) -> set[Any]:
    """Symbols of which guards know a product and no more: 5 * s0 * s1 = 495, or s0 * s1 = s2 * s3.

    Dynamo guards so where a call has as many tokens as the one before it, in other rows and columns.
    """
    found: set[Any] = set()
    for left, right in _equations(shape_env):
        difference = sympy.expand(simplified(left, shape_env) - simplified(right, shape_env))
        factors = [
            [f for f in sympy.Mul.make_args(term) if not f.is_number]
            for term in sympy.Add.make_args(difference)
        ]
        # A guard with a maximum is one on strides.
        if any(len(term) > 1 for term in factors) and not difference.has(Max):
            found |= difference.free_symbols
    return {symbol for symbol in found if not depends_on_data(symbol)}


def suppose(values: Mapping[Any, Any], shape_env: Any) -> Callable[[], None]:
    """Makes symbols numbers, or other sizes, to all that is asked by `simplified`, without a guard; returns what takes it
    back, with all that was learnt since."""
    before = dict(_learnt(shape_env))
    _learnt(shape_env).update({symbol: sympy.sympify(n) for symbol, n in values.items()})

    def take_back() -> None:
        shape_env._sta_learnt = before

    return take_back


def _learnt(shape_env: Any) -> dict[Any, Any]:
    """Symbols, by what they were found to be."""
    if not hasattr(shape_env, "_sta_learnt"):
        shape_env._sta_learnt = {}
    learnt: dict[Any, Any] = shape_env._sta_learnt
    return learnt


def _equalities(shape_env: Any) -> dict[Any, Any]:
    """What guards equate: a quotient with a number (a model that makes positions for 9 = s0 // 2 rows), then symbols with
    an expression (a rope table's length with the product of the grid's axes)."""
    count, equal = getattr(shape_env, "_sta_equalities", (0, {}))
    now = len(shape_env.guards) + shape_env.num_deferred_runtime_asserts
    if count == now:
        return equal
    equations = _equations(shape_env)
    equal = dict(filter(None, (_number_of(left - right) for left, right in equations)))
    for left, right in equations:
        for symbol, side in ((left, right), (right, left)):
            other = side.xreplace(equal)
            known = symbol in equal or symbol in other.free_symbols
            if symbol.is_Symbol and not known:
                equal[symbol] = other
    shape_env._sta_equalities = (now, equal)
    return equal


def _equations(shape_env: Any) -> list[tuple[Any, Any]]:
    """The sides of all guards and assertions that are equations, without what both have as a factor."""
    asserted = itertools.chain(*shape_env.deferred_runtime_asserts.values())
    facts = [known.expr for known in (*shape_env.guards, *asserted)]
    return [_without_common_factors(*e.args) for e in facts if isinstance(e, sympy.Eq)]


def _without_common_factors(left: Any, right: Any) -> tuple[Any, Any]:
    """Sides of an equation divided by the sizes that both have: s0 * s1 * s2 = s0 * s1 * s3 says that s2 = s3."""
    both = set(left.args if left.is_Mul else ()) & set(right.args if right.is_Mul else ())
    for size in both:
        if size.is_Symbol and size.is_positive:
            left, right = left / size, right / size
    return left, right


def _number_of(difference: Any) -> tuple[Any, Any] | None:
    """(quotient, number) where an equation says no more than that: s0 // 2 + 1 - 10 = 0 -> (s0 // 2, 9)."""
    constant, rest = difference.as_coeff_Add()
    factor, term = rest.as_coeff_Mul()
    if term.is_Symbol or not term.is_Function or factor not in (1, -1):
        return None
    return term, -constant * factor
