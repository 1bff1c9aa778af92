"""Where the positions of `x.as_strided(sizes, strides, offset)` are from.

x.as_strided((2, 12, 8), (576, 16, 1), 48), of [2, 36, 16]      tokens 3, 4, ..., and the first channels of each
"""

from __future__ import annotations

import torch.fx

from .axes import same_size
from .graph_view import argument, fake_value
from .positions import Factors, Piece, Places, Segment, empty, line, taken
from .trace_dims import shape_of


def strided(node: torch.fx.Node, places: Places) -> Places:
    """Of the dimensions that have the stride of one of the value that it is a view of; others have no known positions."""
    source = argument(node, 0, "input")
    value, view, sizes = fake_value(source), fake_value(node), shape_of(source)
    starts = _starts(view.storage_offset() - value.storage_offset(), value.stride(), value.shape)
    dims: list[Factors] = []
    for size, stride in zip(shape_of(node), view.stride(), strict=True):
        along = [
            d for d, n in enumerate(value.stride()) if n == stride and not same_size(sizes[d], 1)
        ]
        if len(along) != 1 or not places.dims[along[0]]:
            dims.append(empty(size))
            continue
        layout = line(places, along[0], node)
        whole, start = sizes[along[0]], starts[along[0]]
        known = isinstance(size, int) and isinstance(whole, int) and start + size <= whole
        wholes = dict.fromkeys(piece.whole for segment in layout for piece in segment.pieces)
        unknown = (Segment(size, tuple(Piece(axis, node) for axis in wholes)),)
        dims.append((taken(layout, start, size, 1, node) if known else unknown,))
    return Places(tuple(dims))


def _starts(offset: int, strides: tuple[int, ...], sizes: tuple[int, ...]) -> list[int]:
    """The position along each dimension at which an element stands, by its place in memory."""
    starts = [0] * len(strides)
    for d in sorted(range(len(strides)), key=lambda d: -strides[d]):
        if strides[d] and sizes[d] > 1:
            starts[d] = min(offset // strides[d], sizes[d] - 1)
            offset -= starts[d] * strides[d]
    return starts
