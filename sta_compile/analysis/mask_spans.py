"""Which part of its operand does a part of a mask come from? Shapes only: views, broadcasts, slices.

A part of a value is one `Span` per dimension. Of a mask [2, 1, 1, 67] the last 7 keys are spans b 0..2, h 0..1, q 0..1,
k 60..67; through `m[:, None, None]` they are spans b 0..2, k 60..67 of m.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
import torch.fx

from .._sizes import least
from .axes import Size, same_size, size_of
from .graph_view import argument, canonical_name, fake_value, is_tensor

_SAME = {
    "contiguous", "clone", "detach", "to", "bool", "float", "int", "long", "half", "bfloat16", "double", "type_as", "type",
    "logical_not", "neg", "zeros_like", "ones_like", "full_like", "alias", "requires_grad",
}  # fmt: skip
_RESHAPED = {"view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as"}
_EXPANDED = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}


@dataclass(frozen=True)
class Span:
    """Positions start .. stop of a dimension. label: "b", "h", "q" or "k" of the mask, "" for a position that is fixed."""

    label: str
    start: Size
    stop: Size

    def shifted(self, by: Size) -> Span:
        return replace(self, start=self.start + by, stop=self.stop + by)


Spans: TypeAlias = tuple[Span, ...]
ONE = Span("", 0, 1)


def sizes_of(node: Any) -> tuple[Size, ...]:
    return tuple(size_of(s) for s in fake_value(node).shape)


def is_one(size: Size) -> bool:
    return same_size(size, 1)


def labels(node: torch.fx.Node, spans: Spans) -> set[str]:
    """Along what the values of a part may differ."""
    sizes = zip(spans, sizes_of(node), strict=True)
    return {span.label for span, size in sizes if not is_one(size)} - {""}


def of_operand(operand: torch.fx.Node, spans: Spans) -> Spans:
    """Of an operand that is broadcast to the shape that `spans` are of."""
    sizes = sizes_of(operand)
    last = spans[len(spans) - len(sizes) :]
    return tuple(ONE if is_one(n) else span for span, n in zip(last, sizes, strict=True))


def moved(node: torch.fx.Node, spans: Spans) -> Spans | None:
    """Spans of the first operand; None for operations that do more than to arrange elements, or that are not known."""
    name = canonical_name(node)
    source = node.args[0] if node.args else None
    if not is_tensor(source):
        return None
    assert isinstance(source, torch.fx.Node)
    if name in _SAME:
        return spans
    if name in _RESHAPED:
        return _reshaped(node, source, spans)
    if name in _EXPANDED:
        return _expanded(source, spans)
    if name in ("transpose", "t", "T", "mT"):
        rank = len(spans)
        a, b = (rank - 2, rank - 1) if name != "transpose" else _pair(node, rank)
        order = list(spans)
        order[a], order[b] = order[b], order[a]
        return tuple(order)
    if name == "permute":
        return _permuted(node, spans)
    if name == "narrow":
        start = size_of(fake_value(argument(node, 2, "start")))
        return _at(spans, argument(node, 1, "dim"), lambda span: span.shifted(start))
    if name == "select":
        dim = argument(node, 1, "dim") % (len(spans) + 1)
        index = position_of(argument(node, 2, "index"), sizes_of(source)[dim])
        return (*spans[:dim], Span("", index, index + 1), *spans[dim:])
    if name == "getitem":
        return _indexed(node.args[1], sizes_of(source), spans)
    return None


def _pair(node: torch.fx.Node, rank: int) -> tuple[int, int]:
    return argument(node, 1, "dim0") % rank, argument(node, 2, "dim1") % rank


def _at(spans: Spans, dim: int, change: Any) -> Spans:
    dim %= len(spans)
    return (*spans[:dim], change(spans[dim]), *spans[dim + 1 :])


def _reshaped(node: torch.fx.Node, source: torch.fx.Node, spans: Spans) -> Spans | None:
    """Where only dimensions of size one come or go."""
    kept = [(s, n) for s, n in zip(spans, sizes_of(node), strict=True) if not is_one(n)]
    sizes = sizes_of(source)
    own = [n for n in sizes if not is_one(n)]
    if len(own) != len(kept) or not all(
        same_size(n, m) for n, (_, m) in zip(own, kept, strict=True)
    ):
        return None
    rest = iter(span for span, _ in kept)
    return tuple(ONE if is_one(n) else next(rest) for n in sizes)


def _expanded(source: torch.fx.Node, spans: Spans) -> Spans | None:
    """Dimensions of size one are copied; samples may be repeated as a whole."""
    sizes = sizes_of(source)
    last = spans[len(spans) - len(sizes) :]
    out = []
    for span, size in zip(last, sizes, strict=True):
        if is_one(size):
            out.append(ONE)
        elif span.label in ("b", "h"):
            out.append(Span(span.label, 0, size))
        else:
            out.append(span)
    return tuple(out)


def _permuted(node: torch.fx.Node, spans: Spans) -> Spans | None:
    dims: Any = node.kwargs.get("dims", node.args[1:])
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    out = [ONE] * len(spans)
    for span, dim in zip(spans, dims, strict=True):
        out[dim % len(spans)] = span
    return tuple(out)


def position_of(index: Any, size: Size) -> Size:
    """A number or SymInt that indexes a dimension, counted from its start: -n stands for size - n, of a length n too."""
    value = fake_value(index)
    at = size_of(value)
    if isinstance(at, int):
        return size + at if at < 0 else at
    return size + at if least(-at, value.node.shape_env) >= 0 else at


def index_items(index: Any, rank: int) -> list[Any] | None:
    """One item per dimension of x in `x[index]`, and None for new ones; None for indices with steps, lists or tensors."""
    items = list(index) if isinstance(index, tuple) else [index]
    for item in items:
        plain = (
            item is None or item is Ellipsis or isinstance(fake_value(item), (int, torch.SymInt))
        )
        if isinstance(item, bool) or not (
            plain or (isinstance(item, slice) and item.step in (None, 1))
        ):
            return None
    used = sum(1 for i in items if i is not None and i is not Ellipsis)
    at = next((n for n, i in enumerate(items) if i is Ellipsis), len(items))
    return [*items[:at], *[slice(None)] * (rank - used), *items[at + 1 :]]


def _indexed(index: Any, sizes: tuple[Size, ...], spans: Spans) -> Spans | None:
    """Spans of x, of these sizes, for spans of `x[index]`."""
    items = index_items(index, len(sizes))
    if items is None:
        return None
    out: list[Span] = []
    left, remaining = iter(spans), iter(sizes)
    for item in items:
        if item is None:
            next(left)
        elif isinstance(item, slice):
            size = next(remaining)
            start = 0 if item.start is None else position_of(item.start, size)
            out.append(next(left).shifted(start))
        else:
            at = position_of(item, next(remaining))
            out.append(Span("", at, at + 1))
    return tuple(out)


def at_most(a: Size, b: Size) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a <= b
    return bool(sympy.expand(b - a).is_nonnegative)


def written_region(index: Any, sizes: tuple[Size, ...]) -> list[tuple[Size, Size, bool]] | None:
    """What `x[index] = ...` writes of x: (start, stop, is it a dimension of the value?) per dimension."""
    items = index_items(index, len(sizes))
    if items is None or None in items:
        return None
    out: list[tuple[Size, Size, bool]] = []
    for item, size in zip(items, sizes, strict=True):
        if isinstance(item, slice):
            stop = size if item.stop is None else position_of(item.stop, size)
            if isinstance(stop, int) and isinstance(size, int):
                stop = min(stop, size)
            out.append((0 if item.start is None else position_of(item.start, size), stop, True))
        else:
            at = position_of(item, size)
            out.append((at, at + 1, False))
    return out


def concatenated(node: torch.fx.Node) -> tuple[int, list[tuple[Size, Size, Any]]] | None:
    """Of a `cat`: its dimension, and (start, stop, operand) of each part."""
    tensors = argument(node, 0, "tensors")
    dim = argument(node, 1, "dim", 0)
    if not isinstance(tensors, (tuple, list)) or not all(map(is_tensor, tensors)):
        return None
    dim %= fake_value(node).dim()
    if any(fake_value(t).dim() != fake_value(node).dim() for t in tensors):
        return None
    parts: list[tuple[Size, Size, Any]] = []
    start: Size = 0
    for tensor in tensors:
        stop = start + sizes_of(tensor)[dim]
        parts.append((start, stop, tensor))
        start = stop
    return dim, parts


def padded(node: torch.fx.Node) -> tuple[int, list[tuple[Size, Size, Any]]] | None:
    """Of a padding of one dimension with a number, like `concatenated`."""
    source, amounts = argument(node, 0, "input"), argument(node, 1, "pad")
    value = argument(node, 3 if canonical_name(node) == "pad" else 2, "value", 0)
    if argument(node, 2, "mode", "constant") != "constant" and canonical_name(node) == "pad":
        return None
    sides = [size_of(fake_value(a)) for a in amounts]
    dims = [i // 2 for i, side in enumerate(sides) if not same_size(side, 0)]
    if len(set(dims)) != 1 or any(not at_most(0, side) for side in sides):
        return None
    dim = fake_value(node).dim() - 1 - dims[0]
    before, after = sides[2 * dims[0] : 2 * dims[0] + 2]
    end = before + sizes_of(source)[dim]
    value = 0 if value is None else value
    return dim, [(0, before, value), (before, end, source), (end, end + after, value)]
