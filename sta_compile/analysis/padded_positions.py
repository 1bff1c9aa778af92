"""Where the positions of a padded value are from. Padding by a negative number crops.

F.pad(y, (0, 0, 1, -1))                           something else, then y's frames 0, 1, ... but the last one
F.pad(y, (0, 0, 1, 1), mode="circular")           its last frame, all of them, and its first one
"""

from __future__ import annotations

import torch.fx

from .axes import Size, same_size, size_of
from .graph_view import argument, canonical_name, fake_value
from .positions import Layout, Piece, Places, Segment, joined, line, size_of_layout, taken
from .trace_dims import shape_of

PADS = ("pad", "constant_pad_nd")


def padded(node: torch.fx.Node, places: Places) -> Places:
    """Of a padding, for those of what it pads."""
    dims, amounts = list(places.dims), argument(node, 1, "pad")
    mode = argument(node, 2, "mode", "constant") if canonical_name(node) == "pad" else "constant"
    for i in range(len(amounts) // 2):
        before, after = (size_of(fake_value(a)) for a in amounts[2 * i : 2 * i + 2])
        dim = len(dims) - 1 - i
        if same_size(before, 0) and same_size(after, 0):
            continue
        all_of = line(places, dim, node)
        left = all_of
        if crops(before) or crops(after):
            start = -before if crops(before) else 0
            stop = shape_of(argument(node, 0, "input"))[dim] + (after if crops(after) else 0)
            left = taken(all_of, start, stop - start, 1, node)
        sides = [_side(left, n, mode, first, node) for n, first in ((before, True), (after, False))]
        dims[dim] = (tuple(joined([*sides[0], *left, *sides[1]])),)
    return Places(tuple(dims), places.fixed)


def crops(amount: Size) -> bool:
    """Is so much padding known to leave positions out?"""
    return amount < 0 if isinstance(amount, int) else bool(amount.is_negative)


def _side(layout: Layout, amount: Size, mode: str, first: bool, node: torch.fx.Node) -> Layout:
    """What is put before a layout (first), or behind it."""
    if same_size(amount, 0) or crops(amount):
        return ()
    if mode == "constant":
        return (Segment(amount),)
    start: Size = 0
    if first:
        start = size_of_layout(layout) - amount
    if mode == "circular" and len(layout) == 1:
        return taken(layout, start, amount, 1, node)
    wholes = dict.fromkeys(piece.whole for segment in layout for piece in segment.pieces)
    return (Segment(amount, tuple(Piece(axis, node) for axis in wholes)),)
