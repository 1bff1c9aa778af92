"""Orders in which the positions of an axis are taken, one after the other, until the last one undoes the first.

An order says which position stands at each place:

    y = x.roll(1, 1)            Turned(1, -1)          place 0 has the last position
    y = x.flip(1)               Turned(-1, -1)         place 0 has the last one, and place 1 the one before it
    y = x[:, [2, 0, 1]]         Listed((2, 0, 1))
    y = x[:, order]             Named(order)           `order` is a tensor of the graph: its numbers are not known
    y[:, order] = x             Named(order, inverse)  position i stands at place order[i]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch.fx

from .axes import Size, same_size


@dataclass(frozen=True)
class Turned:
    """Place i has position sign * i + shift, counted around the end. sign: 1 or -1."""

    sign: int
    shift: Size


@dataclass(frozen=True)
class Listed:
    """Place i has position numbers[i]; None where it has something else, such as padding."""

    numbers: tuple[int | None, ...]


@dataclass(frozen=True)
class Named:
    """Place i has position by[i], or inverse: place by[i] has position i. Of an operation it is not known at all."""

    by: torch.fx.Node
    inverse: bool = False


Permutation: TypeAlias = Turned | Listed | Named
FLIPPED = Turned(-1, -1)


def listed(numbers: Sequence[int | None]) -> Permutation:
    """The order of these numbers."""
    first, length = numbers[0], len(numbers)
    if first is None:
        return Listed(tuple(numbers))
    for sign in (1, -1):
        if all(n == (sign * i + first) % length for i, n in enumerate(numbers)):
            return Turned(sign, first)
    return Listed(tuple(numbers))


def inverse(order: Permutation) -> Permutation | None:
    """What puts every position back in its place; None if nothing does."""
    if isinstance(order, Named):
        return Named(order.by, not order.inverse)
    if isinstance(order, Turned):
        return Turned(order.sign, -order.sign * order.shift)
    places = {number: place for place, number in enumerate(order.numbers)}
    whole = None not in places and len(places) == len(order.numbers)
    return Listed(tuple(places[i] for i in range(len(places)))) if whole else None


def both(first: Permutation, second: Permutation, length: Size) -> Permutation | None:
    """One order for two, the second one of places that the first one filled; None if they make none that is known."""
    if isinstance(first, Turned) and isinstance(second, Turned):
        return Turned(first.sign * second.sign, first.sign * second.shift + first.shift)
    if isinstance(first, Named) or isinstance(second, Named):
        return Turned(1, 0) if second == inverse(first) else None
    if not isinstance(length, int):
        return None
    before, after = _numbers(first, length), _numbers(second, length)
    if before is None or after is None or not len(before) == len(after) == length:
        return None
    return listed([None if place is None else before[place] for place in after])


def in_place(order: Permutation, length: Size) -> bool:
    """Does every position stand where it was?"""
    if isinstance(order, Turned):
        shift = order.shift % length if isinstance(length, int) else order.shift
        same = order.sign == 1 or length in (1, 2)
        return same and (same_size(shift, 0) or same_size(shift, length))
    return isinstance(order, Listed) and all(n in (i, None) for i, n in enumerate(order.numbers))


def _numbers(order: Turned | Listed, length: int) -> Sequence[int | None] | None:
    if isinstance(order, Listed):
        return order.numbers
    sign, shift = order.sign, order.shift
    return [(sign * i + shift) % length for i in range(length)] if isinstance(shift, int) else None
