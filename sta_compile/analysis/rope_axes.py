"""Which axes does a graph make positions for? Rope tables that it builds from the grid's numbers tell rows from columns.

Two factors of a token axis may be frames and places within a frame; these are rows and columns, or frames, rows and columns:

    meshgrid(arange(1), arange(9), arange(11))                                         LTX and LTX-2, of one frame
    cat([f.view(1, 1, 1, 8).expand(1, 9, 11, 8), h.view(1, 9, 1, 8).expand(1, 9, 11, 8),
         w.view(1, 1, 11, 8).expand(1, 9, 11, 8)], -1).reshape(99, 24)                  Wan, Qwen-Image
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx

from .axes import Axis, resolve
from .graph_view import argument, canonical_name
from .trace_dims import DimTrace

Axes = tuple[Axis, ...]


def position_axes(trace: DimTrace) -> list[Axis]:
    """Products (frames, rows, columns) or (rows, columns) that positions are made for; axes of one are left out."""
    found: list[Axis] = []
    for node in trace.view.nodes:
        for axes in _of_node(trace, node):
            if all(len(resolve(axis)) <= 1 for axis in axes):
                found.append(tuple(factor for axis in axes for factor in resolve(axis)))
    return found


def _of_node(trace: DimTrace, node: torch.fx.Node) -> Iterator[Axes]:
    name = canonical_name(node)
    if name == "meshgrid":
        traced = trace.values.get(node)
        if isinstance(traced, list) and traced and traced[0] is not None and len(traced) in (2, 3):
            yield traced[0]
    elif name == "cat":
        dims, pieces = trace.dims(node) or (), argument(node, 0, "tensors")
        along_last = argument(node, 1, "dim", 0) in (-1, len(dims) - 1)
        if len(dims) < 4 or len(pieces) != 3 or not along_last:
            return
        if all(_spread_from(trace, piece, axis) for axis, piece in enumerate(pieces)):
            yield dims[-4:-1]


def _spread_from(trace: DimTrace, piece: object, axis: int) -> bool:
    """Is a table [..., frames, rows, columns, channels] the same along all of the three axes but one?"""
    if not isinstance(piece, torch.fx.Node) or canonical_name(piece) not in (
        "expand",
        "broadcast_to",
    ):
        return False
    dims = trace.dims(piece.args[0])
    return (
        dims is not None
        and len(dims) >= 4
        and not any(a for i, a in enumerate(dims[-4:-1]) if i != axis)
    )
