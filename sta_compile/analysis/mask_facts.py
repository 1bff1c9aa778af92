"""What is known of truth values along the keys of an attention, and how such facts combine.

A mask says for each (query, key) whether the key is seen. What can be stated here is a product: a fact of the query and a
fact of the key, `m[:, :, None] & m[:, None, :]` for example. Over a range of keys a fact is one of: the same everywhere; a
prefix whose length is data; or data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias

import torch.fx

from .axes import Size, same_size

# An additive mask of at most this hides a key: exp of it is 0 in every dtype.
HIDDEN = -1e4


@dataclass(frozen=True)
class Everywhere:
    """The same truth value for all."""

    value: bool


@dataclass(frozen=True)
class Below:
    """True for element i of the range iff start + i < limit, a tensor with one element per sample (or not, if negated)."""

    limit: torch.fx.Node
    start: Size
    negated: bool = False


@dataclass(frozen=True)
class Data:
    """Known at run time only. of: what tells that two such facts are the same, if it is known."""

    of: Hashable | None = None


Fact: TypeAlias = Everywhere | Below | Data
TRUE, FALSE, DATA = Everywhere(True), Everywhere(False), Data()


@dataclass(frozen=True)
class Seen:
    """True where both the fact of the query and the fact of the key are.

    loose: for queries of which the fact is not true it may be true or not, as `ids[:, :, None] == ids[:, None]` is.
    """

    queries: Fact
    keys: Fact
    loose: bool = False


ALL, NOTHING = Seen(TRUE, TRUE), Seen(TRUE, FALSE)


def _and(a: Fact, b: Fact) -> Fact:
    if FALSE in (a, b):
        return FALSE
    if a == TRUE or same_fact(a, b):
        return b
    if b == TRUE:
        return a
    return DATA if DATA in (a, b) else Data(("and", frozenset((a, b))))


def same_fact(a: Fact, b: Fact) -> bool:
    """Are they known to say the same, element by element?"""
    if isinstance(a, Below) and isinstance(b, Below):
        return a.limit is b.limit and a.negated == b.negated and bool(same_size(a.start, b.start))
    return a != DATA and a == b


def _not(fact: Fact) -> Fact:
    if isinstance(fact, Everywhere):
        return Everywhere(not fact.value)
    if isinstance(fact, Below):
        return Below(fact.limit, fact.start, not fact.negated)
    return DATA if fact == DATA else Data(("not", fact))


def conjunction(a: Seen | None, b: Seen | None) -> Seen | None:
    if NOTHING in (a, b):
        return NOTHING
    if a is None or b is None:
        return None
    if ALL in (a, b):
        return b if a == ALL else a
    both = Seen(_and(a.queries, b.queries), _and(a.keys, b.keys), a.loose or b.loose)
    if both.loose:
        return None if both.queries == FALSE else both
    return NOTHING if FALSE in (both.queries, both.keys) else both


def negation(a: Seen | None) -> Seen | None:
    """None if it depends on both query and key: `not (a and b)` is no product."""
    if a is None or a.loose or TRUE not in (a.queries, a.keys):
        return None
    return _product(a.queries == TRUE, _not(a.keys if a.queries == TRUE else a.queries))


def _product(of_keys: bool, fact: Fact) -> Seen:
    if fact == FALSE:
        return NOTHING
    return Seen(TRUE, fact) if of_keys else Seen(fact, TRUE)


def disjunction(a: Seen | None, b: Seen | None) -> Seen | None:
    if ALL in (a, b):
        return ALL
    return negation(conjunction(negation(a), negation(b)))


def chosen(condition: Seen | None, a: Seen | None, b: Seen | None) -> Seen | None:
    """`a` where the condition holds, `b` elsewhere."""
    if a is not None and a == b and a in (ALL, NOTHING):
        return a
    if b == NOTHING:
        return conjunction(condition, a)
    if a == NOTHING:
        return conjunction(negation(condition), b)
    return disjunction(conjunction(condition, a), conjunction(negation(condition), b))


def equality(a: Seen | None, b: Seen | None) -> Seen | None:
    """True where both are, or neither is."""
    for one, other in ((a, b), (b, a)):
        if one == ALL:
            return other
        if one == NOTHING:
            return negation(other)
    if a is None or b is None or a.loose or b.loose:
        return None
    queries, keys = (a, b) if a.keys == TRUE else (b, a)
    products = queries.keys == TRUE and keys.queries == TRUE
    return Seen(queries.queries, keys.keys, loose=True) if products else None


def with_itself(seen: Seen | None) -> Seen | None:
    """Of queries and keys of the same tokens, where each query sees its own key as well."""
    if seen is None or seen == ALL:
        return seen
    return replace(seen, loose=True) if same_fact(seen.queries, seen.keys) else None


def along(label: str, fact: Fact) -> Seen | None:
    """A fact of the queries ("q") or of the keys ("k")."""
    return _product(label == "k", fact) if label in ("q", "k") else None


def either_of(facts: Sequence[Seen | None], mixed: set[str]) -> Seen | None:
    """Of a range whose parts have these facts. mixed: along what the parts lie side by side ("b", "h", "q", "k")."""
    first = facts[0]
    if len(facts) == 1 or (first in (ALL, NOTHING) and all(fact == first for fact in facts)):
        return first
    if mixed <= {"b", "k"} and all(fact is not None and fact.queries == TRUE for fact in facts):
        return Seen(TRUE, DATA)
    if mixed <= {"b", "q"} and all(
        fact is not None and (fact == NOTHING or fact.keys == TRUE) for fact in facts
    ):
        return Seen(DATA, TRUE, any(fact is not None and fact.loose for fact in facts))
    return _some_keys_to_all(facts) if mixed <= {"b", "k"} else None


def _some_keys_to_all(facts: Sequence[Seen | None]) -> Seen | None:
    """Of parts along the keys, some of which all queries see: those of which the fact of the others is true see the keys of
    each part, and what the others see is not stated."""
    asking = {fact.queries for fact in facts if fact is not None and fact.queries != TRUE}
    if None in facts or len(asking) != 1 or FALSE in asking:
        return None
    (queries,) = asking
    if queries == DATA and sum(f is not None and f.queries != TRUE for f in facts) > 1:
        return None
    every = all(fact is not None and fact.keys == TRUE for fact in facts)
    return Seen(queries, TRUE if every else DATA, loose=True)


_STEPS: dict[str, Callable[[float, float], float]] = {
    "mul": operator.mul,
    "truediv": operator.truediv,
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda value, constant: constant - value,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")


@dataclass(frozen=True)
class Test:
    """Does a value, after some arithmetic with numbers, show a key? Boolean masks by truth, additive ones by 0 or HIDDEN.

    Example: `(1 - m) * -1e4` asks of m: steps (("rsub", 1), ("mul", -1e4)), so 1 shows the key, 0 hides it, and of any
    other value nothing can be said.
    """

    additive: bool
    steps: tuple[tuple[str, float], ...] = ()

    def __call__(self, value: float) -> bool | None:
        value = reduce(lambda x, step: float(_STEPS[step[0]](x, step[1])), self.steps, value)
        if not self.additive:
            return value != 0
        return True if value == 0 else False if value <= HIDDEN else None

    def before(self, step: str, constant: float) -> Test:
        """What is asked of x in `x <step> constant`."""
        return Test(self.additive, ((step, constant), *self.steps))

    @property
    def total(self) -> bool:
        """Is there an answer for every value?"""
        if not self.additive:
            return True
        comparisons = [i for i, (step, _) in enumerate(self.steps) if step in _COMPARISONS]
        rests = [Test(True, self.steps[i + 1 :]) for i in comparisons]
        return any(None not in (rest(0.0), rest(1.0)) for rest in rests)

    def of_constant(self, value: float) -> Seen | None:
        answer = self(value)
        return None if answer is None else ALL if answer else NOTHING

    def of_truth(self, seen: Seen | None) -> Seen | None:
        """The answer for values that are 1 where `seen` holds and 0 elsewhere."""
        return chosen(seen, self.of_constant(1.0), self.of_constant(0.0))


TRUTH, ADDITIVE = Test(False), Test(True)
