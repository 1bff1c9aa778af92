"""Pieces of a whole that are put together at other places than they had.

    torch.cat([y[:, 1:], y[:, :1]], 1)                        pieces of y's frames that began at 1 and 0
    torch.stack(y.unbind(1)[::-1], 1)                         its frames one by one, from the last
    F.pad(y, (0, 0, 1, 0))[:, :-1]                            a piece with something before it

They are in order if all pieces of an axis are where they were, where what they make is as long as the axis; with others
before, between and behind them, if they follow each other as they did. Where a piece is from is told by `TracedPositions`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.fx

from .axes import Axis, Size, atoms_of, axis_size, same_size
from .graph_view import argument, canonical_name, fake_value, is_tensor
from .joins import JOINS, joined_dim
from .mask_spans import at_most
from .orders import Named, Permutation, Turned, in_place, listed
from .padded_positions import PADS
from .positions import (
    Layout,
    Piece,
    Segment,
    interleaved,
    is_number,
    is_whole,
    line,
    size_of_layout,
)
from .token_parts import before_picking
from .trace_dims import shape_of
from .trace_positions import TracedPositions

Found = tuple[Axis, Permutation]  # the axis of the whole, and its order
_CUTS = ("getitem", "narrow", "as_strided")
_TOGETHER = ("stack", *_CUTS, *PADS, *JOINS)
_Own = list[tuple[Size, Segment, list[Piece]]]  # (place, segment, its pieces of one axis)


def put_together(positions: TracedPositions, node: torch.fx.Node) -> tuple[int, Found] | None:
    """(dimension, what moved along it) in a value that an operation puts together, or cuts out of such a one."""
    name = canonical_name(node)
    if name not in _TOGETHER or not is_tensor(node):
        return None
    changed = _changed_dims(positions, node)
    in_turn = _in_turn(positions, node) if name == "stack" else None
    if in_turn is not None:
        return in_turn
    places = positions.of(node)
    for dim, factors in enumerate(() if places is None else places.dims):
        if places is not None and factors and (changed is None or dim in changed):
            found = order_of(line(places, dim, node), node, parts=name not in _CUTS)
            if found is not None:
                return dim, found
    return None


def _changed_dims(positions: TracedPositions, node: torch.fx.Node) -> Collection[int] | None:
    """The dimensions along which an operation puts together or cuts; along others it leaves a value as it was."""
    joined, cut = joined_dim(node), positions.parts.cut(node)
    if joined is not None:
        return (joined,)
    if cut is not None:
        source, dim, _ = cut
        return () if same_size(shape_of(source)[dim], shape_of(node)[dim]) else (dim,)
    if canonical_name(node) in PADS:
        rank, amounts = fake_value(node).dim(), argument(node, 1, "pad")
        return range(rank - len(amounts) // 2, rank)
    return () if canonical_name(before_picking(node)) == "unbind" else None


def order_of(layout: Layout, node: torch.fx.Node, *, parts: bool = True) -> Found | None:
    """The axis of which a dimension has pieces that are in another order than the axis.

    node: what put them together. parts: count pieces of an axis that is longer, or shorter, than the dimension.
    """
    length = size_of_layout(layout)
    moved: list[tuple[Found, set[int]]] = []
    in_order: list[tuple[Axis, set[int]]] = []  # axes, and which segments have them
    for axis in dict.fromkeys(piece.whole for segment in layout for piece in segment.pieces):
        own, all_of = _pieces_of(layout, axis), same_size(axis_size(axis), length)
        alone = any(is_whole(segment, piece) for _, segment, pieces in own for piece in pieces)
        if alone or not (all_of or (parts and len(own) > 1)) or _is_one_position(own):
            continue
        where = {id(segment) for _, segment, _ in own}
        if _in_place(own) if all_of else _follow(own):
            in_order.append((axis, where))
        elif all_of or not _is_mixed(own):
            order = _order(own, length, node) if all_of else Named(node)
            moved += [] if in_place(order, length) else [((axis, order), where)]
    return next(
        (found for found, where in moved if not _is_within(found[0], where, in_order)), None
    )


def _is_within(axis: Axis, where: set[int], in_order: list[tuple[Axis, set[int]]]) -> bool:
    """Is an axis a part of another one that is in order? Rows of several frames begin anew with each frame."""
    atoms = set(atoms_of(axis))
    return any(atoms.issubset(atoms_of(other)) and where <= there for other, there in in_order)


def _pieces_of(layout: Layout, axis: Axis) -> _Own:
    own, place = [], 0 * size_of_layout(layout)
    for segment in layout:
        pieces = [piece for piece in segment.pieces if piece.whole == axis]
        if pieces:
            own.append((place, segment, pieces))
        place = place + segment.size
    return own


def _is_one_position(own: _Own) -> bool:
    """Are all pieces the same single position? They are beside each other along another axis."""
    first = own[0][2][0]
    return len(own) > 1 and all(
        same_size(segment.size, 1) and first in pieces for _, segment, pieces in own
    )


def _is_mixed(own: _Own) -> bool:
    """Are they single values that were computed of several positions each? They are components, and no rows."""
    return all(
        same_size(segment.size, 1) and all(isinstance(p.at, torch.fx.Node) for p in pieces)
        for _, segment, pieces in own
    )


def _in_place(own: _Own) -> bool:
    return all(
        any(is_number(p.at, at) and (p.step == 1 or same_size(segment.size, 1)) for p in pieces)
        for at, segment, pieces in own
    )


def _follow(own: _Own) -> bool:
    """Does each piece begin where the one before it does, or behind that?"""
    last: Size = 0
    for _, segment, pieces in own:
        starts = [
            p.at
            for p in pieces
            if not isinstance(p.at, (tuple, torch.fx.Node))
            and (p.step == 1 or same_size(segment.size, 1))
            and at_most(last, p.at)
        ]
        if not starts:
            return False
        last = starts[0]
    return True


def _order(own: _Own, length: Size, node: torch.fx.Node) -> Permutation:
    """The order of an axis whose pieces these are."""
    rows = [pieces[0] for _, _, pieces in own]
    sizes = [segment.size for _, segment, _ in own]
    if any(len(pieces) > 1 for *_, pieces in own):
        return Named(node)
    if (
        len(rows) == 2
        and all(piece.step == 1 for piece in rows)
        and is_number(rows[1].at, 0)
        and is_number(rows[0].at, sizes[1])
    ):
        return Turned(1, sizes[1])
    numbers: list[int | None] = [None] * length if isinstance(length, int) else []
    for (place, segment, _), piece in zip(own, rows, strict=True):
        size, at = segment.size, piece.at
        if not numbers or not isinstance(place, int) or not isinstance(size, int):
            return Named(node)
        if isinstance(at, int):
            at = tuple(range(at, at + size * piece.step, piece.step))
        if not isinstance(at, tuple):
            return Named(node)
        numbers[place : place + size] = at
    return listed(numbers)


def _in_turn(positions: TracedPositions, node: torch.fx.Node) -> tuple[int, Found] | None:
    """Of pieces of more than one position that are stacked: a position of each, or one behind the other."""
    tensors, rank = argument(node, 0, "tensors"), fake_value(node).dim()
    dim = argument(node, 1, "dim", 0) % rank
    for along in range(rank - 1):
        segments = [s for tensor in tensors for s in positions.layout(tensor, along)]
        first, *others = (dict.fromkeys(p.whole for p in s.pieces) for s in segments)
        parts = [axis for axis in first if all(axis in other for other in others)]
        length = size_of_layout(tuple(segments))
        axis = next((axis for axis in parts if same_size(axis_size(axis), length)), None)
        if axis is None or len(tensors) == 1 or same_size(segments[0].size, 1):
            continue
        if along + 1 == dim and interleaved(segments) is not None:
            continue
        found = (axis, Named(node)) if along != dim else order_of(tuple(segments), node)
        if found is not None:
            return dim, found
    return None
