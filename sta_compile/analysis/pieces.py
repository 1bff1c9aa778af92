"""Pieces of a whole that are put together, or written, at other places than they had.

    torch.cat([y[:, 1:], y[:, :1]], 1)                        pieces of y's frames that began at 1 and 0
    torch.stack(y.unbind(1)[::-1], 1)                         its frames one by one, from the last
    F.pad(y, (0, 0, 1, 0))[:, :-1]                            a piece with something before it
    z[:, 1:] = y[:, :-1]                                      a piece that began at 0

Pieces are known by the value that they were cut out of or, where views hide it, by the axis that theirs is a slice of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch.fx

from .axes import Atom, Axis, Size, axis_size, resolve, same_size, segments_of, size_of
from .graph_view import argument, canonical_name, fake_value, is_tensor
from .index_order import index_of
from .mask_spans import at_most, index_items, position_of, written_region
from .orders import Named, Permutation, Turned, in_place, listed
from .token_parts import TokenParts
from .token_streams import before_casts

Cut = tuple[torch.fx.Node, int, Size]  # (value, dimension, start)


class Piece(NamedTuple):
    """Positions start, start + step, ... of an axis. by_value: of those that a value has, and not only by their axis."""

    whole: Axis
    start: Size
    size: Size
    step: int = 1
    by_value: bool = True


Placed = tuple[Size, Piece]  # where a piece was put


class Pieces:
    """Answers for the operations of one graph: (axis of the whole, its order), None for one that moves no piece."""

    def __init__(self, parts: TokenParts) -> None:
        self.parts, self.trace = parts, parts.trace

    def joined(self, node: torch.fx.Node, dim: int) -> tuple[Axis, Permutation] | None:
        """One behind the other."""
        tensors, length = argument(node, 0, "tensors"), _length(node, dim)
        if any(fake_value(t).dim() <= dim for t in tensors):
            return None
        placed: list[tuple[Size, list[Piece]]] = []
        place: Size = 0
        for tensor in tensors:
            placed.append((place, list(self._along(tensor, dim))))
            place = place + _length(tensor, dim)
        return self._order(node, placed, length)

    def padded(self, node: torch.fx.Node) -> tuple[Axis, Permutation] | None:
        """Behind what a padding puts before it."""
        source, amounts = argument(node, 0, "input"), argument(node, 1, "pad")
        for i, before in enumerate(amounts[::2]):
            dim = fake_value(node).dim() - 1 - i
            place = [(size_of(fake_value(before)), list(self._along(source, dim)))]
            if (found := self._order(node, place, _length(node, dim))) is not None:
                return found
        return None

    def stacked(self, node: torch.fx.Node) -> tuple[Axis, Permutation] | None:
        """Single positions one behind the other, or longer pieces beside each other."""
        tensors, rank = argument(node, 0, "tensors"), fake_value(node).dim()
        dim, count = argument(node, 1, "dim", 0) % rank, len(tensors)
        single = [(i, self._single(tensor, count)) for i, tensor in enumerate(tensors)]
        if any(pieces for _, pieces in single):
            return self._order(node, single, count)
        for along in range(rank - 1):
            placed = [
                (i * _length(tensor, along), list(self._along(tensor, along)))
                for i, tensor in enumerate(tensors)
            ]
            length = count * _length(tensors[0], along)
            whole = next(
                (p.whole for p in placed[0][1] if same_size(axis_size(p.whole), length)), None
            )
            if whole is not None and along != dim:  # a position of each piece in turn
                return whole, Named(node)
            if whole is not None:
                return self._order(node, placed, length)
        return None

    def written(self, node: torch.fx.Node) -> Iterator[tuple[Axis, Permutation]]:
        """By `setitem`, along each dimension of its target."""
        target, index, value = node.args
        assert isinstance(target, torch.fx.Node)
        assert isinstance(value, torch.fx.Node)
        sizes = [size_of(s) for s in fake_value(target).shape]
        region = written_region(index, tuple(sizes)) or []
        dim = fake_value(value).dim() - sum(kept for *_, kept in region)
        for size, (start, _, kept) in zip(sizes, region, strict=False):
            pieces = self._single(value, size)
            if kept:
                pieces = list(self._along(value, dim)) if dim >= 0 else []
            dim += kept
            if (found := self._order(node, [(start, pieces)], size)) is not None:
                yield found

    def cropped(self, node: torch.fx.Node) -> tuple[Axis, Permutation] | None:
        """As many positions as a value has, of that value between others, from another place on."""
        cut = self.parts.cut(node)
        if cut is None:
            return None
        source, dim, start = cut
        length = _length(node, dim)
        if (
            canonical_name(source) == "pad"
            and argument(source, 2, "mode", "constant") != "constant"
        ):
            return self._cropped_padding(node, cut)
        dims = self.trace.dims(source)
        place: Size = 0
        for segment in segments_of(dims[dim]) if dims is not None else ():
            meets = at_most(place + 1, start + length) and at_most(start + 1, place + length)
            shifted = meets and not same_size(place, start)
            if shifted and same_size(axis_size(segment), length):
                return segment, Named(node)
            place = place + axis_size(segment)
        return None

    def _cropped_padding(self, node: torch.fx.Node, cut: Cut) -> tuple[Axis, Permutation] | None:
        padding, dim, start = cut
        source, amounts = argument(padding, 0, "input"), argument(padding, 1, "pad")
        dims, behind = self.trace.dims(source), fake_value(padding).dim() - 1 - dim
        if dims is None or 2 * behind >= len(amounts):
            return None
        length, shift = axis_size(dims[dim]), start - size_of(fake_value(amounts[2 * behind]))
        if same_size(shift, 0) or not same_size(length, _length(node, dim)):
            return None
        around = argument(padding, 2, "mode") == "circular"
        return dims[dim], Turned(1, shift) if around else Named(node)

    def _order(
        self, node: torch.fx.Node, placed: Sequence[tuple[Size, list[Piece]]], length: Size
    ) -> tuple[Axis, Permutation] | None:
        """Of what has all positions of a whole, or as many, if it is not the whole's."""
        found = [
            p.whole for _, pieces in placed for p in pieces if same_size(axis_size(p.whole), length)
        ]
        for whole in dict.fromkeys(found):
            own = [
                (place, next(p for p in pieces if p.whole == whole))
                for place, pieces in placed
                if any(p.whole == whole for p in pieces)
            ]
            order = _order_of(own, length, node)
            return None if in_place(order, length) else (whole, order)
        return None

    def _along(self, node: torch.fx.Node, dim: int) -> Iterator[Piece]:
        """What a tensor has along a dimension: a piece of the value that it was cut out of, of that one's, ..."""
        dims = self.trace.dims(node)
        if dims is None:
            return
        axis, size = dims[dim], axis_size(dims[dim])
        value, start = node, 0
        while (cut := self.parts.cut(value)) is not None and cut[1] == dim:
            whole = self.trace.dims(cut[0])
            value, start = cut[0], start + cut[2]
            if whole is None or _is_segment(axis, whole[dim]):
                return
            yield Piece(whole[dim], start, size)
        if value is node and (strided := self._strided(node, dim)) is not None:
            yield strided
        sliced = axis[0].slice_of if axis and isinstance(axis[0], Atom) else None
        if sliced is not None:
            inner = axis_size(axis[1:])
            yield Piece((*resolve(sliced[0]), *axis[1:]), sliced[1] * inner, size, by_value=False)
        base = before_casts(_before_new_axes(node))
        cut = self._position(base)
        whole = None if cut is None else self.trace.dims(cut[0])
        if cut is None or whole is None:
            return
        behind = tuple(factor for other in whole[cut[1] + 1 :] for factor in other)
        if behind[: len(axis)] == axis:
            yield Piece((*whole[cut[1]], *axis), cut[2] * size, size)

    def _strided(self, node: torch.fx.Node, dim: int) -> Piece | None:
        """y[:, ::2]"""
        source = node.args[0] if node.args else None
        if canonical_name(node) != "getitem" or not is_tensor(source):
            return None
        assert isinstance(source, torch.fx.Node)
        dims, items = self.trace.dims(source), dict(index_of(node, source))
        item = items.get(dim)
        plain = all(isinstance(other, slice) for other in items.values())
        if dims is None or not plain or not isinstance(item, slice) or type(item.step) is not int:
            return None
        start = 0 if item.start is None else position_of(item.start, axis_size(dims[dim]))
        return Piece(dims[dim], start, _length(node, dim), item.step)

    def _single(self, node: torch.fx.Node, count: Size) -> list[Piece]:
        """One position of an axis of `count` positions."""
        cut = self._position(before_casts(node))
        whole = None if cut is None else self.trace.dims(cut[0])
        if cut is None or whole is None or not same_size(axis_size(whole[cut[1]]), count):
            return []
        return [Piece(whole[cut[1]], cut[2], 1)]

    def _position(self, node: torch.fx.Node) -> Cut | None:
        """Of a node that takes one position: x[:, 2], x[:, 2:3], x.select(1, 2), x.unbind(1)[2]."""
        source, name = node.args[0] if node.args else None, canonical_name(node)
        if not isinstance(source, torch.fx.Node):
            return None
        if name == "getitem" and canonical_name(source) == "unbind":
            value, dim = argument(source, 0, "input"), argument(source, 1, "dim", 0)
            return self._at(value, dim, node.args[1])
        if name == "select":
            return self._at(source, argument(node, 1, "dim"), argument(node, 2, "index"))
        cut = self.parts.cut(node)
        if cut is not None:
            return cut if same_size(_length(node, cut[1]), 1) else None
        items = (
            index_items(node.args[1], fake_value(source).dim())
            if name == "getitem" and is_tensor(source)
            else None
        )
        kept = [item for item in items or () if item is not None]
        numbers = [d for d, item in enumerate(kept) if not isinstance(item, slice)]
        return self._at(source, numbers[0], kept[numbers[0]]) if len(numbers) == 1 else None

    def _at(self, value: torch.fx.Node, dim: int, index: object) -> Cut:
        dim %= fake_value(value).dim()
        return value, dim, position_of(index, _length(value, dim))


def _length(node: torch.fx.Node, dim: int) -> Size:
    return size_of(fake_value(node).shape[dim])


def _is_segment(axis: Axis, whole: Axis) -> bool:
    """Is a piece all of the text, or all of the video, of a sequence that holds both?"""
    segments, own = segments_of(whole), segments_of(axis)
    sliced = any(isinstance(f, Atom) and f.slice_of is not None for part in own for f in part)
    return len(segments) > 1 and not sliced and set(own) <= set(segments)


def _order_of(placed: Sequence[Placed], length: Size, node: torch.fx.Node) -> Permutation:
    """The order of a whole whose pieces begin at these places."""
    if all(same_size(place, piece.start) and piece.step == 1 for place, piece in placed):
        return Turned(1, 0)
    if not all(piece.by_value for _, piece in placed):  # what was done to that value is not known
        return Named(node)
    first, *rest = (piece for _, piece in placed)
    if (
        len(rest) == 1
        and first.step == rest[0].step == 1
        and same_size(first.start, rest[0].size)
        and same_size(rest[0].start, 0)
    ):
        return Turned(1, first.start)
    numbers: list[int | None] = [None] * length if isinstance(length, int) else []
    for place, (_, start, size, step, _) in placed:
        known = isinstance(place, int) and isinstance(start, int) and isinstance(size, int)
        if not numbers or not known:
            return Named(node)
        numbers[place : place + size] = range(start, start + size * step, step)
    return listed(numbers)


def _before_new_axes(node: torch.fx.Node) -> torch.fx.Node:
    """The value before axes of size one were added: x[:, -1][:, None], x[:, -1].unsqueeze(1)."""
    while True:
        source, name = node.args[0] if node.args else None, canonical_name(node)
        if not is_tensor(source):
            return node
        assert isinstance(source, torch.fx.Node)
        items = node.args[1] if name == "getitem" else None
        items = items if isinstance(items, tuple) else (items,)
        plain = all(item is None or item is Ellipsis or item == slice(None) for item in items)
        if name != "unsqueeze" and not (name == "getitem" and plain):
            return node
        node = source
