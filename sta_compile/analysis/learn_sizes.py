"""What sizes have to do with each other that have symbols of their own.

Keys, values and the mask of an attention are of as many tokens: a cache of keys and one of values, both inputs that grow,
have symbols that nothing relates until then. Of sizes that depend on data, `mask` has five Trues, whatever `u0` to `u8` are
called. Dynamo gives every such size a symbol of its own, though a model may ask for the same number again and again:

- `text[mask]`, `flags[mask]` and `nonzero(mask)` have a row for each True, and `text[~mask]` has the other rows;
- `x[:, -n:]` has n columns and `x[:, :-n]` has the others, unless n is 0: then Python takes all of them, or none. Where the
  graph asserts that `x[:, :-n]` has some size, n is not 0.

What is learnt is kept with the symbols, so that `size_of` gives numbers where they cancel out: [valid text, padding] has
as many tokens as the text.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.fx

from .. import _sizes, _torch
from .attention_calls import operands_of
from .axes import Size, same_size, size_of
from .graph_view import GraphView, argument, canonical_name, fake_value, is_inplace, is_tensor
from .lower_bound import outside
from .mask_spans import index_items, sizes_of
from .token_values import storage_of, written_storages

_SAME_TRUTH = ("bool", "clone", "contiguous", "detach", "alias")
_PURE = {
    "getitem", "select", "squeeze", "unsqueeze", "view", "reshape", "flatten", "to", "eq", "ne", "lt", "le", "gt", "ge",
    "logical_and", "logical_or", "logical_not",
}  # fmt: skip


def learn_sizes(view: GraphView) -> None:
    """States what the graph says of its sizes: what its attentions need with a guard, and what is so of those that depend
    on data."""
    env = _torch.shape_env_of(view.gm)
    if env is None:
        return
    for node in view.nodes:
        for left, right in _needed(node):
            if not same_size(left, right):
                _torch.equate(left, right, env)
                _suppose_marked(left - right, env)
    if not any(map(_depends_on_data, view.nodes)):
        return
    _Picks(view, env).learn()
    cuts = [cut for node in view.nodes for cut in _cuts(node)]
    positive = [cut.back for cut in cuts if cut.front and _sizes.least(cut.size, env) > 0]
    for cut in cuts:
        back = _sizes.simplified(cut.back, env)
        known = _sizes.least(back, env) > 0
        known = known or any(back == _sizes.simplified(other, env) for other in positive)
        if known and _sizes.least(_sizes.simplified(cut.whole - back, env), env) >= 0:
            _sizes.equate(cut.size, cut.whole - back if cut.front else back, env)


def _suppose_marked(difference: Size, env: Any) -> None:
    """That a length which the user marked dynamic is the number that it has to be; a guard on that would raise.

    Keys are 48, values have the dynamic length s0: a call with others raises in eager, and in the operator.
    """
    if isinstance(difference, int) or len(difference.free_symbols) != 1:
        return
    (symbol,) = difference.free_symbols
    value = _torch.known_value(symbol, env)
    fits = value is not None and difference.subs(symbol, value) == 0
    if fits and difference.diff(symbol).is_number and _torch.must_stay_dynamic(symbol, env):
        _sizes.suppose({symbol: value}, env)


def _needed(node: torch.fx.Node) -> Iterator[tuple[Size, Size]]:
    """Sizes that a call of attention needs to be equal; eager raises where they are not."""
    call = operands_of(node)
    if call is None:
        return
    queries, keys, values = (sizes_of(n)[call.order.tokens] for n in (call.q, call.k, call.v))
    yield keys, values
    mask = () if call.mask is None else sizes_of(call.mask)
    for size, tokens in zip(reversed(mask), (keys, queries), strict=False):
        if not same_size(size, 1):
            yield size, tokens


def _depends_on_data(node: torch.fx.Node) -> bool:
    value = fake_value(node)
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(s, torch.SymInt) and _sizes.depends_on_data(s.node.expr) for s in sizes)


@dataclass(frozen=True)
class _Cut:
    """`x[:-back]` (front) or `x[-back:]` of a dimension of `whole`, which is as long as `size`."""

    front: bool
    back: Size
    whole: Size
    size: Size


def _cuts(node: torch.fx.Node) -> Iterator[_Cut]:
    """The dimensions that a slice cuts at a place that is counted from the end and depends on data."""
    source = node.args[0] if canonical_name(node) == "getitem" else None
    if not is_tensor(source) or not is_tensor(node):
        return
    whole, left = sizes_of(source), iter(sizes_of(node))
    items = iter(index_items(node.args[1], len(whole)) or ())
    dim = 0
    for item in items:
        if isinstance(item, slice):
            size = next(left)
            for front, bound in ((True, item.stop), (False, item.start)):
                other = item.start if front else item.stop
                at = fake_value(bound)
                if other in (None, 0) and isinstance(at, torch.SymInt):
                    back = -size_of(at)
                    if _sizes.least(back, at.node.shape_env) >= 0:
                        yield _Cut(front, back, whole[dim], size)
        elif item is None:
            next(left)
            continue
        dim += 1


class _Picks:
    """How many elements of each mask of a graph are true."""

    def __init__(self, view: GraphView, env: Any) -> None:
        self.view, self.env = view, env
        self._written = written_storages(view)
        self._counts: dict[Hashable, Size] = {}

    def learn(self) -> None:
        for node in self.view.nodes:
            for mask, count in self._picked(node):
                value, negated = self._truth(mask)
                if value is None:
                    continue
                total = prod(sizes_of(mask))
                trues = total - count if negated else count
                known = self._counts.setdefault(value, trues)
                _sizes.equate(count, total - known if negated else known, self.env)

    def _picked(self, node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, Size]]:
        """(mask, number of its true elements) where an operation says so."""
        name, value = canonical_name(node), fake_value(node)
        first: Any = node.args[0] if node.args else None
        if not is_tensor(first) or value is None:
            return
        if name in ("nonzero", "argwhere") or (name == "where" and len(node.args) == 1):
            rows = value[0] if isinstance(value, (tuple, list)) else value
            yield first, size_of(rows.shape[0])
        elif name == "masked_select":
            mask = argument(node, 1, "mask")
            if sizes_of(first) == sizes_of(mask):
                yield mask, size_of(value.shape[0])
        elif name == "getitem":
            index: Any = node.args[1]
            items = list(index) if isinstance(index, (tuple, list)) else [index]
            tensors = [i for i, item in enumerate(items) if is_tensor(item)]
            at = tensors[0] if len(tensors) == 1 else len(items)
            rest = [item for i, item in enumerate(items) if i != at]
            plain = all(item == slice(None) for item in rest)
            if at < len(items) and plain and fake_value(items[at]).dtype == torch.bool:
                yield items[at], size_of(value.shape[at])
        elif name == "item" and canonical_name(first) in ("sum", "count_nonzero"):
            mask = first.args[0]
            counted = is_tensor(mask) and fake_value(mask).dtype == torch.bool
            if counted and fake_value(first).dim() == 0 and isinstance(value, torch.SymInt):
                yield mask, size_of(value)

    def _truth(self, node: torch.fx.Node) -> tuple[Hashable, bool]:
        """What a mask's truth values are, and whether they are negated; None if it can't be told."""
        negated = False
        while is_tensor(node) and not is_inplace(node) and node.args:
            name = canonical_name(node)
            if name == "logical_not" and fake_value(node.args[0]).dtype == torch.bool:
                negated = not negated
            elif name not in _SAME_TRUTH:
                break
            if self._is_written(node):
                return None, False
            node = node.args[0]  # type: ignore[assignment]
        return self._value(node), negated

    def _value(self, node: Any) -> Hashable:
        """Equal for values that are computed in the same way from the same; None for memory that is written in place."""
        if isinstance(node, (tuple, list)):
            return tuple(map(self._value, node))
        if isinstance(node, slice):
            return tuple(map(self._value, (node.start, node.stop, node.step)))
        node = outside(self.view, node)
        if not isinstance(node, torch.fx.Node):
            return ("constant", str(node))
        number = fake_value(node)
        if isinstance(number, torch.SymInt):
            return ("size", str(size_of(number)))
        if is_tensor(node) and self._is_written(node):
            return None
        if canonical_name(node) not in _PURE or is_inplace(node):
            return node
        parts = tuple(map(self._value, (*node.args, *sorted(node.kwargs.items()))))
        return None if None in parts else (canonical_name(node), parts)

    def _is_written(self, node: torch.fx.Node) -> bool:
        return any(storage in self._written for storage in storage_of(node))
