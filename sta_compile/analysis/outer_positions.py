"""What stands at one position of outer axes: a frame of tokens, and the frame's place among all tokens.

x[:, 12:24], of [t3 h4 w3] tokens            frame 1, and all of its rows and columns
x[:, 1].flatten(1, 2), of t3, h4, w3         positions 12, 13, ... of (t3 h4 w3)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch.fx

from .._sizes import whole_quotient
from .axes import Size, atoms_of, axis_size, same_size
from .positions import Layout, Piece, Pieces, Segment

MOST = 6  # positions, or pieces, that are combined; more say the same in other words, and their products are too many
OUTER = 3  # outer axes that are looked at together


def rows_within(layout: Layout) -> tuple[Pieces, Layout]:
    """Where a slice of a merged axis is one position of its outer factors: (those positions, what it is of the others)."""
    fixed: list[Piece] = []
    out = []
    for segment in layout:
        pieces = list(segment.pieces)
        for piece in segment.pieces if len(layout) == 1 else ():
            for n in range(1, len(piece.whole)):
                inner = piece.whole[n:]
                row = piece.step == 1 and not isinstance(piece.at, (tuple, torch.fx.Node))
                if row and same_size(axis_size(inner), segment.size):
                    at = whole_quotient(piece.at, segment.size)
                    if at is not None:
                        fixed.append(Piece(piece.whole[:n], at))
                        pieces.append(Piece(inner, 0))
        out.append(Segment(segment.size, tuple(dict.fromkeys(pieces))))
    return tuple(fixed), tuple(out)


def within_outer(layout: Layout, fixed: Pieces) -> Layout:
    """A layout of which all is at these positions of other axes, as positions of both: either may be the outer one."""
    numbers = [piece for piece in fixed if _is_numbered(piece) and piece.step == 1]
    if not numbers or len(numbers) > MOST:
        return layout
    out = []
    for segment in layout:
        pieces, single = list(segment.pieces), same_size(segment.size, 1)
        own = [piece for piece in segment.pieces if _is_numbered(piece)]
        if len(own) > MOST:
            own = []
        for chosen in _orders(numbers):
            pieces += _product(chosen[:-1], chosen[-1], []) if single else ()
            for piece in own:
                for n in range(len(chosen) + 1):
                    pieces += _product(chosen[:n], piece, chosen[n:])
        out.append(Segment(segment.size, tuple(dict.fromkeys(pieces))))
    return tuple(out)


def _orders(fixed: list[Piece]) -> Iterator[list[Piece]]:
    """Some of them, in the order that they are given in, and in that in which their axes were made."""
    for count in range(1, OUTER + 1):
        for given in map(list, combinations(fixed, count)):
            made = sorted(given, key=lambda p: min(a.index for a in atoms_of(p.whole)))
            yield given
            if made != given:
                yield made


def _product(before: list[Piece], piece: Piece, after: list[Piece]) -> Iterator[Piece]:
    """Positions of the axis that several axes make, of which the pieces before and after are single positions."""
    pieces = [*before, piece, *after]
    atoms = [atom for each in pieces for atom in atoms_of(each.whole)]
    inner = axis_size(tuple(factor for each in after for factor in each.whole))
    if len(set(atoms)) < len(atoms) or not isinstance(inner, int):
        return
    at: Size = 0
    for each in pieces:
        at = at * axis_size(each.whole) + _number(each)
    yield Piece(tuple(factor for each in pieces for factor in each.whole), at, piece.step * inner)


def _is_numbered(piece: Piece) -> bool:
    return not isinstance(piece.at, (tuple, torch.fx.Node))


def _number(piece: Piece) -> Size:
    assert not isinstance(piece.at, (tuple, torch.fx.Node))
    return piece.at
