"""Of which axes, and of which of their positions, are those along a dimension?

    y = x[:, 1:] * 2                  frames: positions 1, 2, ... of x's
    y = x[:, 1]                       position 1 of x's frames, everywhere
    y = torch.cat([given, x], 1)      frames: those of `given`, then those of x

A `Layout` says so of one dimension, segment by segment. A dimension that views made of several has one layout for each of
these factors, outermost first, as an axis has factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import sympy
import torch.fx

from .._sizes import whole_quotient
from .axes import (
    Atom,
    Axis,
    Size,
    axis_size,
    equal_groups,
    factor_size,
    resolve,
    same_size,
    segments_of,
)
from .mask_spans import at_most

# Numbers of a list, or a tensor of them that the graph has. Of any other operation: it is not known which positions.
Index: TypeAlias = tuple[int, ...] | torch.fx.Node


@dataclass(frozen=True)
class Piece:
    """Positions at, at + step, ... of an axis, or those that an index says."""

    whole: Axis
    at: Size | Index
    step: int = 1


Pieces = tuple[Piece, ...]  # the same positions of several axes


class Segment(NamedTuple):
    """Neighbouring positions that come from the same place."""

    size: Size
    pieces: Pieces = ()


Layout = tuple[Segment, ...]
Factors = tuple[Layout, ...]  # none along a dimension of size one


class Places(NamedTuple):
    """Of a tensor: its dimensions, and positions at which all of it is, of axes that it has no dimension for."""

    dims: tuple[Factors, ...]
    fixed: Pieces = ()

    def known(self) -> bool:
        """Is there anything that it was taken of?"""
        segments = (s for dim in self.dims for layout in dim for s in layout)
        return bool(self.fixed) or any(segment.pieces for segment in segments)


def whole(axis: Axis) -> Factors:
    """All positions of an axis; of each of its segments where it has several."""
    layout = tuple(Segment(axis_size(p), (Piece(p, 0),)) for p in segments_of(axis))
    return () if same_size(axis_size(axis), 1) else (layout,)


def empty(size: Size) -> Factors:
    """Positions of nothing that is known."""
    return () if same_size(size, 1) else ((Segment(size),),)


def size_of_layout(layout: Layout) -> Size:
    total: Size = 0
    for segment in layout:
        total = total + segment.size
    return total


def size_of_factors(factors: Factors) -> Size:
    total: Size = 1
    for layout in factors:
        total = total * size_of_layout(layout)
    return total


def is_whole(segment: Segment, piece: Piece) -> bool:
    return (
        is_number(piece.at, 0)
        and piece.step == 1
        and same_size(segment.size, axis_size(piece.whole))
    )


def line(places: Places, dim: int, node: torch.fx.Node) -> Layout:
    """One layout of a dimension; of one of size one, where all of the value is."""
    factors = places.dims[dim]
    return merged(factors, node) if factors else (Segment(1, places.fixed),)


def merged(factors: Factors, node: torch.fx.Node) -> Layout:
    """One layout of several; node: what needs it, which stands for positions that are in no row."""
    outer, *inner = factors or ((Segment(1),),)
    for layout in inner:
        outer = _product(outer, tuple(joined(layout)), node)
    return outer


def _product(outer: Layout, inner: Layout, node: torch.fx.Node) -> Layout:
    size = size_of_layout(inner)
    within = next((p for s in inner for p in s.pieces if is_whole(s, p)), None)
    if within is not None and len(inner) == 1:
        out = []
        for segment in outer:
            pieces = []
            for piece in segment.pieces:
                at: Size | Index = node
                if piece.step == 1 and not isinstance(piece.at, (tuple, torch.fx.Node)):
                    at = piece.at * size
                pieces.append(Piece((*piece.whole, *within.whole), at))
            out.append(Segment(segment.size * size, tuple(pieces)))
        return tuple(out)
    wholes = [
        (*a.whole, *b.whole)
        for s in outer[:1]
        for a in s.pieces[:1]
        for t in inner[:1]
        for b in t.pieces[:1]
    ]
    total = size_of_layout(outer) * size
    return (Segment(total, tuple(Piece(axis, node) for axis in wholes)),)


def split(layout: Layout, sizes: Sequence[Size], node: torch.fx.Node) -> Factors:
    """A layout as several factors of these sizes."""
    size: Size = 1
    for each in sizes[1:]:
        size = size * each
    within: Sequence[Axis] = ()
    outer: list[Segment] = []
    for segment in layout:
        rows, pieces = whole_quotient(segment.size, size), []
        for piece in segment.pieces:
            number = not isinstance(piece.at, (tuple, torch.fx.Node)) and piece.step == 1
            start = whole_quotient(piece.at, size) if number else None
            count = whole_quotient(axis_size(piece.whole), size)
            if start is None or count is None:
                pieces.append(Piece(piece.whole, node))
                continue
            first, *others = _cut(piece.whole, (count, *sizes[1:]))
            within = within or others
            pieces.append(Piece(first, start))
        if rows is None:
            return tuple(
                f for n in sizes for f in (empty(n) and ((Segment(n, _unknown(layout, node)),),))
            )
        outer.append(Segment(rows, tuple(pieces)))
    rest = [whole(axis) for axis in within] or [empty(n) for n in sizes[1:]]
    first_factor = () if same_size(sizes[0], 1) else (tuple(outer),)
    return (*first_factor, *(factor for factors in rest for factor in factors))


def _cut(axis: Axis, sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
    """An axis as axes of these sizes: its factors, or parts of it that nothing else in the graph has."""
    kept = [i for i, size in enumerate(sizes) if not same_size(size, 1)]
    out: list[Axis] = [()] * len(sizes)
    factors = resolve(axis)
    groups = equal_groups([factor_size(f) for f in factors], [sizes[i] for i in kept])
    for f0, f1, t0, t1 in groups or [(0, len(factors), 0, len(kept))]:
        cut = tuple(sizes[i] for i in kept[t0:t1])
        parts = (factors[f0:f1],) if len(cut) == 1 else _parts(factors[f0:f1], cut)
        for i, part in zip(kept[t0:t1], parts, strict=True):
            out[i] = part
    return tuple(out)


@lru_cache(maxsize=256)
def _parts(axis: Axis, sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
    return tuple((Atom(size, slice_of=(axis, 0, size)),) for size in sizes)


def taken(layout: Layout, start: Size, size: Size, step: int, node: torch.fx.Node) -> Layout:
    """A slice of a layout."""
    if len(layout) == 1:
        return (Segment(size, tuple(_from(p, start, size, step, node) for p in layout[0].pieces)),)
    if step != 1:
        return (Segment(size, _unknown(layout, node)),)
    out: list[Segment] = []
    place, stop = _zero(), start + size
    for segment in layout:
        end = place + segment.size
        if at_most(stop, place):  # as are all that follow, whatever their sizes are
            break
        if out or not at_most(end, start):  # it may be in the slice
            first = start if at_most(place, start) else place
            last = stop if at_most(stop, end) else end
            if not out and not at_most(start, first):
                return (Segment(size, _unknown(layout, node)),)
            pieces = tuple(_from(p, first - place, last - first, 1, node) for p in segment.pieces)
            out.append(Segment(last - first, pieces))
        place = end
    return tuple(out)


def picked(layout: Layout, index: Index, size: Size, node: torch.fx.Node) -> Layout:
    """Rows of a layout by an index."""
    if len(layout) > 1:
        return (Segment(size, _unknown(layout, node)),)
    (segment,), pieces = layout, []
    for piece in segment.pieces:
        at: Size | Index
        if isinstance(index, tuple) and isinstance(piece.at, int):
            at = rows_of([piece.at + piece.step * i for i in index])
        else:
            at = index if is_whole(segment, piece) else node
        pieces.append(Piece(piece.whole, at))
    return (Segment(size, tuple(pieces)),)


def rows_of(numbers: Sequence[int]) -> int | tuple[int, ...]:
    """Rows by their numbers, or by the first one if they follow each other."""
    first = numbers[0] if numbers else 0
    in_row = all(n == first + i for i, n in enumerate(numbers))
    return first if in_row else tuple(numbers)


def position(layout: Layout, at: Size, node: torch.fx.Node) -> Pieces:
    """A single position."""
    found = taken(layout, at, 1, 1, node)
    return found[0].pieces if len(found) == 1 else _unknown(layout, node)


def written_over(layout: Layout, start: Size, new: Layout, node: torch.fx.Node) -> Layout:
    """A layout of which a part was replaced."""
    end = start + size_of_layout(new)
    before = [] if same_size(start, 0) else taken(layout, 0, start, 1, node)
    left = size_of_layout(layout) - end
    behind = [] if same_size(left, 0) else taken(layout, end, left, 1, node)
    return tuple(joined([*before, *new, *behind]))


def joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Segments one behind the other; where they go on with the same rows they become one."""
    last: Segment | None = None
    for segment in segments:
        if same_size(segment.size, 0):
            continue
        together = None if last is None else _together(last, segment)
        if last is not None and together is None:
            yield last
        last = segment if together is None else together
    if last is not None:
        yield last


def interleaved(segments: Sequence[Segment]) -> Axis | None:
    """The axis of which each of n segments has every n-th position: the first one from 0 on, the next one from 1 on."""
    n = len(segments)
    axes = [
        {p.whole for p in segment.pieces if p.step == n and is_number(p.at, first)}
        for first, segment in enumerate(segments)
    ]
    size = size_of_layout(tuple(segments))
    found = (axis for axis in axes[0].intersection(*axes[1:]) if same_size(axis_size(axis), size))
    return next(found, None)


def _together(first: Segment, second: Segment) -> Segment | None:
    size = first.size + second.size
    if not first.pieces and not second.pieces:
        return Segment(size)
    pieces = [
        piece
        for piece in first.pieces
        if piece.step == 1
        and not isinstance(piece.at, (tuple, torch.fx.Node))
        and any(
            other.whole == piece.whole
            and other.step == 1
            and is_number(other.at, piece.at + first.size)
            for other in second.pieces
        )
    ]
    return Segment(size, tuple(pieces)) if pieces else None


def beside(layouts: Sequence[Layout], node: torch.fx.Node, *, sums: bool) -> Layout:
    """What positions have of which several values are combined. sums: they are there where any of them is."""
    out = []
    for stretch in _stretches(layouts):
        leading = max(stretch, key=len)
        place = _zero()
        for segment in leading:
            pieces: list[Piece] = []
            for layout in stretch:
                own = layout
                if layout is leading:
                    own = (segment,)
                elif len(leading) > 1:
                    own = taken(layout, place, segment.size, 1, node)
                pieces += own[0].pieces if len(own) == 1 else _unknown(own, node)
            out.append(Segment(segment.size, together(pieces, node, sums=sums)))
            place = place + segment.size
    return tuple(out)


def _stretches(layouts: Sequence[Layout]) -> Iterator[list[Layout]]:
    """Layouts of equal size in the shortest stretches at whose end each of them has a segment's end."""
    starts = [0] * len(layouts)
    ends = [list(itertools.accumulate(s.size for s in layout)) for layout in layouts]
    for n, end in enumerate(ends[0], 1):
        stops = [next((i for i, e in enumerate(own, 1) if same_size(e, end)), 0) for own in ends]
        if all(stops):
            stops[0] = n
            yield [layout[a:b] for layout, a, b in zip(layouts, starts, stops, strict=True)]
            starts = stops
    left = [layout[a:] for layout, a in zip(layouts, starts, strict=True) if layout[a:]]
    if left:  # sizes that are not known to be equal
        yield left


def together(pieces: Iterable[Piece], node: torch.fx.Node, *, sums: bool) -> Pieces:
    """Pieces of several values that are combined."""
    found = list(dict.fromkeys(pieces))
    if sums:
        return tuple(found)
    wholes = [piece.whole for piece in found]
    alike = (Piece(p.whole, node) if wholes.count(p.whole) > 1 else p for p in found)
    return tuple(dict.fromkeys(alike))


def _from(piece: Piece, start: Size, size: Size, step: int, node: torch.fx.Node) -> Piece:
    if isinstance(piece.at, tuple):
        known = isinstance(start, int) and isinstance(size, int)
        rows = piece.at[start : start + size * step : step] if known else None
        return Piece(piece.whole, node if rows is None else rows_of(rows))
    if isinstance(piece.at, torch.fx.Node):
        return piece if same_size(start, 0) and step == 1 else Piece(piece.whole, node)
    step = 1 if same_size(size, 1) else piece.step * step
    at = piece.at + start * piece.step
    return Piece(piece.whole, at if isinstance(at, int) else _normal(at), step)


def _unknown(layout: Iterable[Segment], node: torch.fx.Node) -> Pieces:
    return tuple(dict.fromkeys(Piece(p.whole, node) for s in layout for p in s.pieces))


def is_number(at: Size | Index, number: Size) -> bool:
    return not isinstance(at, (tuple, torch.fx.Node)) and same_size(at, number)


def _normal(size: sympy.Expr) -> Size:
    size = sympy.expand(size)
    return int(size) if size.is_Integer else size


def _zero() -> Size:
    return 0
