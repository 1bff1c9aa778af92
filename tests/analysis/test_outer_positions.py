"""Positions of several axes at once, as those of one that is made of them; and that these are never too many."""

from __future__ import annotations

import time

from sta_compile.analysis.axes import axis_size, fresh
from sta_compile.analysis.outer_positions import MOST, within_outer
from sta_compile.analysis.positions import Piece, Segment


def test_a_row_of_a_frame_is_a_part_of_all_tokens():
    frames, rows = fresh(3), fresh(4)
    (segment,) = within_outer((Segment(4, (Piece(rows, 0),)),), (Piece(frames, 1),))
    found = {(axis_size(piece.whole), piece.at, piece.step) for piece in segment.pieces}
    assert (12, 4, 1) in found  # frames outside: tokens 4 to 7
    assert (12, 1, 3) in found  # rows outside: tokens 1, 4, 7, 10


def test_many_positions_are_not_combined():
    """A model with dynamic shapes gave hundreds of them, and compiling it did not end."""
    many = tuple(Piece(fresh(2), 1) for _ in range(200))
    layout = (Segment(4, (Piece(fresh(4), 0),)),)
    start = time.monotonic()
    assert within_outer(layout, many) == layout
    own = (Segment(4, tuple(Piece(fresh(4), 0) for _ in range(200))),)
    (segment,) = within_outer(own, many[:MOST])
    assert len(segment.pieces) == 200
    assert time.monotonic() - start < 5
