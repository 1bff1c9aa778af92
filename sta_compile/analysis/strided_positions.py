"""Where the positions of `x.as_strided(sizes, strides, offset)` are from.

x.as_strided((2, 3, 4, 8), (576, 64, 16, 1), 48), of [2, 36, 16]      tokens 3, 4, ..., and the first channels of each
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx

from .axes import same_size
from .graph_view import argument, fake_value
from .positions import Factors, Piece, Places, Segment, empty, line, split, taken
from .trace_dims import shape_of


def strided(node: torch.fx.Node, places: Places) -> Places:
    """Of dimensions that run along one of the value that it is a view of; of others no positions are known."""
    source = argument(node, 0, "input")
    value, view, sizes = fake_value(source), fake_value(node), shape_of(node)
    starts = _starts(view.storage_offset() - value.storage_offset(), value.stride(), value.shape)
    dims: list[Factors] = [empty(size) for size in sizes]
    for d, (step, length) in enumerate(zip(value.stride(), value.shape, strict=True)):
        along = [i for i, n in enumerate(view.stride()) if step <= n < step * length]
        along = [i for i in along if not same_size(sizes[i], 1)]
        if length == 1 or not along or not places.dims[d]:
            continue
        layout, count = line(places, d, node), 1
        in_turn = True
        for i in reversed(along):
            in_turn &= view.stride(i) == step * count
            count *= view.shape[i]
        if in_turn and starts[d] + count <= length:
            own = taken(layout, starts[d], count, 1, node)
            factors = split(own, [sizes[i] for i in along], node) if len(along) > 1 else (own,)
        else:
            wholes = dict.fromkeys(piece.whole for segment in layout for piece in segment.pieces)
            pieces = tuple(Piece(axis, node) for axis in wholes)
            factors = tuple((Segment(sizes[i], pieces),) for i in along)
        for i, factor in zip(along, factors, strict=True):
            dims[i] = (factor,)
    return Places(tuple(dims))


def _starts(offset: int, strides: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The position along each dimension at which an element stands, by its place in memory."""
    starts = [0] * len(strides)
    for d in sorted(range(len(strides)), key=lambda d: -strides[d]):
        if strides[d] and sizes[d] > 1:
            starts[d] = min(offset // strides[d], sizes[d] - 1)
            offset -= starts[d] * strides[d]
    return starts
