"""Which numbers does an integer tensor hold, if the graph says so by itself?

Attention over packed sequences is told where each begins: `arange(0, 3) * 60` is [0, 60, 120], two samples of 60 tokens.
Lengths that depend on data (a mask's sum) have no such answer.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from .axes import Size, same_size, size_of
from .graph_view import (
    argument,
    canonical_name,
    constant_of,
    fake_value,
    is_inplace,
    is_tensor,
)
from .token_values import storage_of

_ARITHMETIC: dict[str, Callable[[Size, Size], Size]] = {
    "mul": operator.mul,
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda a, b: b - a,
    "remainder": operator.mod,
}
_SAME = (
    "to", "int", "long", "contiguous", "clone", "detach", "cuda", "cpu", "type", "type_as", "_to_copy", "lift_fresh_copy",
)  # fmt: skip


def known_integers(node: Any) -> list[Size] | None:
    """The elements of a tensor of one dimension, or of none; None if they are not known."""
    if not is_tensor(node) or fake_value(node).dtype not in (torch.int32, torch.int64):
        return None
    if fake_value(node).dim() > 1 or _is_written(node, set()):
        return None
    constant = constant_of(node)
    if constant is not None:
        return list(constant.reshape(-1).tolist())
    name, length = canonical_name(node), fake_value(node).numel()
    first = node.args[0] if node.args else argument(node, 0, "input")
    if name in _SAME:
        return known_integers(first)
    if not isinstance(length, int):
        return None
    if name == "tensor":
        data = argument(node, 0, "data")
        return _numbers(data if fake_value(node).dim() else [data])
    if name in ("zeros", "ones"):
        return [int(name == "ones")] * length
    if name in ("full", "new_full", "new_zeros", "new_ones"):
        fill = {"new_zeros": 0, "new_ones": 1}.get(
            name, argument(node, 2 - (name == "full"), "fill_value")
        )
        value = _number(fill)
        return None if value is None else [value] * length
    if name == "arange":
        return _arange(node, length)
    if name == "cumsum":
        values = known_integers(first)
        return None if values is None else list(itertools.accumulate(values))
    if name in ("cat", "stack"):
        parts = [known_integers(part) for part in argument(node, 0, "tensors")]
        return None if None in parts else [x for part in parts for x in part or ()]
    if name == "pad":
        return _padded(node, known_integers(first))
    if name in ("flip", "roll"):
        return _turned(node, name, known_integers(first))
    return _combined(node, name) if name in _ARITHMETIC else None


def equal_steps(ends: Sequence[Size]) -> Size | None:
    """N for [0, N, 2 N, ...]."""
    if len(ends) < 2 or not same_size(ends[0], 0):
        return None
    step = ends[1]
    return step if all(same_size(end, i * step) for i, end in enumerate(ends)) else None


def _number(value: Any) -> Size | None:
    value = fake_value(value)
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return size_of(value)
    return None


def _numbers(values: Any) -> list[Size] | None:
    if not isinstance(values, (tuple, list)):
        return None
    found = [_number(value) for value in values]
    return None if None in found else found


def _arange(node: torch.fx.Node, length: int) -> list[Size] | None:
    given = list(node.args) + [node.kwargs[n] for n in ("start", "end", "step") if n in node.kwargs]
    numbers = _numbers(given)
    if numbers is None:
        return None
    start, step = (0, 1) if len(numbers) == 1 else (numbers[0], [*numbers, 1][2])
    return [start + i * step for i in range(length)]


def _padded(node: torch.fx.Node, values: list[Size] | None) -> list[Size] | None:
    amounts, fill = argument(node, 1, "pad"), argument(node, 3, "value", 0)
    plain = argument(node, 2, "mode", "constant") == "constant" and len(amounts) == 2
    if values is None or not plain or not all(isinstance(a, int) and a >= 0 for a in amounts):
        return None
    padding: Size = int(fill or 0)
    return [padding] * amounts[0] + values + [padding] * amounts[1]


def _turned(node: torch.fx.Node, name: str, values: list[Size] | None) -> list[Size] | None:
    shifts = argument(node, 1, "shifts")
    if values is None or name == "flip":
        return None if values is None else values[::-1]
    shift = _number(shifts[0] if isinstance(shifts, (tuple, list)) else shifts)
    if not isinstance(shift, int) or not values:
        return None
    at = -shift % len(values)
    return values[at:] + values[:at]


def _combined(node: torch.fx.Node, name: str) -> list[Size] | None:
    combine = _ARITHMETIC[name]
    left, right = node.args[0], argument(node, 1, "other")
    a, b = _number(left), _number(right)
    if node.kwargs.get("alpha", 1) != 1:
        return None
    if a is None:
        values = known_integers(left)
        return None if values is None or b is None else [combine(x, b) for x in values]
    values = known_integers(right)
    return None if values is None else [combine(a, x) for x in values]


def _is_written(node: torch.fx.Node, seen: set[torch.fx.Node]) -> bool:
    """Is a value written in place, by itself or through a view?"""
    seen.add(node)
    memory = set(storage_of(node))
    for user in node.users:
        if is_inplace(user) and user.args and user.args[0] is node:
            return True
        if user not in seen and not memory.isdisjoint(storage_of(user)) and _is_written(user, seen):
            return True
    return False
