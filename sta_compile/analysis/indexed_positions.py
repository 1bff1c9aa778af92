"""Where the positions of `x[index]` are from, for those of x."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from .axes import Size, same_size, size_of
from .graph_view import fake_value, is_tensor
from .index_order import picked_index
from .mask_spans import position_of
from .outer_positions import rows_within
from .positions import Factors, Layout, Places, Segment, line, picked, position, taken
from .trace_dims import shape_of


def indexed(
    node: torch.fx.Node, source: torch.fx.Node, places: Places, asked: Any
) -> Places | None:
    """Of `source[index]`, or of {dimension: item} of it; (start, size) is a slice. None for several tensors."""
    rank, sizes = len(places.dims), shape_of(source)
    if isinstance(asked, dict):
        at = {dim % rank: item for dim, item in asked.items()}
        items: list[Any] = [at.get(dim, slice(None)) for dim in range(rank)]
    else:
        items = list(asked) if isinstance(asked, tuple) else [asked]
        used = sum(1 for item in items if item is not None and item is not Ellipsis)
        where = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
        items = [*items[:where], *[slice(None)] * (rank - used), *items[where + 1 :]]
    dims: list[Factors] = []
    fixed, numbers, by_index, dim = list(places.fixed), 0, 0, 0
    for item in items:
        if item is None:
            dims.append(())
            continue
        if dim >= rank:
            return None
        factors, size = places.dims[dim], sizes[dim]
        layout, dim = line(places, dim, node) if factors else (), dim + 1
        bounds = _bounds(item, size)
        if bounds is not None:
            start, n, step = bounds
            everything = same_size(n, size) and step == 1
            new: Layout = () if not factors else taken(layout, start, n, step, node)
            if not everything:
                row, new = rows_within(new)
                fixed += row
        elif isinstance(fake_value(item), (int, torch.SymInt)) and not isinstance(item, bool):
            fixed += position(layout, position_of(item, size), node) if factors else ()
            numbers += 1
            continue
        else:
            rows = picked_index(item)
            if rows is None:
                return None
            index, count = rows
            if isinstance(index, tuple):
                counted = isinstance(size, int) and all(-size <= i < size for i in index)
                index = tuple(i % size for i in index) if counted else node
            out = shape_of(node) if is_tensor(node) else ()
            n = size if count is None and len(out) <= len(dims) else count or out[len(dims)]
            by_index, everything = by_index + 1, False
            new = picked(layout, index, n, node) if factors else ()
        if factors and same_size(n, 1):
            fixed += [p for s in new for p in s.pieces]
        new = new or (Segment(n),)  # of no positions
        dims.append(factors if everything else () if same_size(n, 1) or not factors else (new,))
    if by_index > 1 or (by_index and numbers):
        return None
    return Places(tuple(dims), tuple(dict.fromkeys(fixed)))


def _bounds(item: Any, size: Size) -> tuple[Size, Size, int] | None:
    """(start, size, step) of a slice; None for any other item."""
    if isinstance(item, tuple) and len(item) == 2:
        return item[0], item[1], 1
    if not isinstance(item, slice):
        return None
    start, stop, step = (
        None if v is None else size_of(fake_value(v)) for v in (item.start, item.stop, item.step)
    )
    plain = all(v is None or isinstance(v, int) for v in (start, stop, step))
    if plain and isinstance(size, int):
        rows = range(size)[slice(start, stop, step)]
        return rows.start, len(rows), rows.step
    first = 0 if item.start is None else position_of(item.start, size)
    last = size if item.stop is None else position_of(item.stop, size)
    return first, last - first, 1
