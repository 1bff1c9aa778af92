"""Axes through indexing: slices, splits, selections, and writes into slices."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.fx

from .._torch import inside_vmap
from .axes import Axis, Dims, Size, axis_size, fresh, part_of, same_size, size_of
from .graph_view import argument, canonical_name, fake_value, is_tensor
from .trace_dims import DimTrace, Traced, shape_of


def slices(trace: DimTrace, x: Any, dim: int, pieces: Any) -> Traced | None:
    """Axes of consecutive pieces of `x` along `dim`, whose sizes are those of the fake values `pieces`."""
    dims = trace.dims(x)
    if dims is None or not isinstance(pieces, (tuple, list)):
        return None
    dim %= len(dims)
    out: list[Any] = []
    start: Size = 0
    for piece in pieces:
        stop = start + size_of(piece.shape[dim])
        out.append((*dims[:dim], part_of(dims[dim], start, stop), *dims[dim + 1 :]))
        start = stop
    return out


SPLIT_DIMS = {"vsplit": 0, "hsplit": 1, "dsplit": 2}


def split_dim(node: torch.fx.Node) -> int:
    """The dimension along which a `split`, `chunk`, `hsplit`, ... cuts."""
    rank, name = int(fake_value(argument(node, 0, "input")).dim()), canonical_name(node)
    if name in SPLIT_DIMS:
        return min(SPLIT_DIMS[name], rank - 1)
    return int(argument(node, 2, "dim", 0)) % rank


def _bound(value: Any, total: Size, default: Size) -> Size | None:
    """A slice bound as a size counted from the start; None when it can't be known."""
    if value is None:
        return default
    fake = fake_value(value)
    if not isinstance(fake, (int, torch.SymInt)):
        return None
    size = size_of(fake)
    if isinstance(size, int) and size < 0:
        return total + size
    if isinstance(size, int) and isinstance(total, int):
        return min(size, total)
    return size


def _slice_axis(axis: Axis, item: slice, size: Size) -> Axis:
    """`size` is the slice's length, which tells a clamped or negative symbolic bound from a plain one."""
    total = axis_size(axis)
    if item.step not in (None, 1):
        return fresh(size)
    start, stop = _bound(item.start, total, 0), _bound(item.stop, total, total)
    if isinstance(start, int) and start == 0:
        return part_of(axis, 0, size)
    if item.stop is None:
        return part_of(axis, total - size, total)
    if start is None or stop is None:
        return fresh(size)
    return part_of(axis, start, start + size)


def indexed(
    trace: DimTrace, x: torch.fx.Node, index: Any, shape: tuple[Size, ...]
) -> Traced | None:
    """Axes of `x[index]`, which has the given shape; None for indices that hold lists, masks or several tensors."""
    dims = trace.dims(x)
    if dims is None:
        return None
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(i, (list, bool)) for i in items) or not one_row_index(items):
        return None
    used = sum(1 for i in items if i is not None and i is not Ellipsis)
    full = [slice(None)] * (len(dims) - used)
    ellipses = [i for i, item in enumerate(items) if item is Ellipsis]
    if ellipses:
        at = ellipses[0]
        items[at : at + 1] = full
    else:
        items += full
    out: list[Axis] = []
    source = iter(dims)
    for item in items:
        if item is None:
            out.append(())
        elif isinstance(item, slice):
            out.append(_slice_axis(next(source), item, shape[len(out)]))
        elif is_tensor(item):
            next(source)
            rows = trace.dims(item)
            if rows is None:
                return None
            out.extend(rows)
        else:
            next(source)
    return tuple(out)


def one_row_index(items: list[Any]) -> bool:
    """At most one tensor, of row numbers, and no plain number beside it, which would move its axes."""
    tensors = [i for i in items if is_tensor(i)]
    if not tensors:
        return True
    rows = fake_value(tensors[0])
    plain = any(isinstance(i, int) or isinstance(fake_value(i), torch.SymInt) for i in items)
    return len(tensors) == 1 and rows.dtype not in (torch.bool, torch.uint8) and not plain


def getitem(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    x, index = node.args
    traced = trace.values.get(x) if isinstance(x, torch.fx.Node) else None
    if isinstance(traced, list):
        return traced[index] if isinstance(index, int) else None
    if not is_tensor(x):
        return None
    return indexed(trace, x, index, shape_of(node))  # type: ignore[arg-type]


def relate_setitem(trace: DimTrace, node: torch.fx.Node) -> bool:
    """States that a written value has the axes of the slice that it is written to; False if that can't be told."""
    x, _, value = node.args
    if not is_tensor(x):
        return False
    if not is_tensor(value):
        return True
    dims, written = written_axes(trace, node), trace.dims(value)
    if dims is None or written is None:
        return False
    for axis, other in zip(reversed(dims), reversed(written), strict=False):
        if axis and other:
            trace.relate(node, axis, other)
    return True


def written_axes(trace: DimTrace, node: torch.fx.Node) -> Dims | None:
    """Axes of the slice that a `setitem` writes; None for rows that a mask picks, whose number depends on data."""
    x, index = node.args[:2]
    whole, items = fake_value(x), list(index) if isinstance(index, tuple) else [index]
    if inside_vmap(whole) or not one_row_index(items):
        return None
    with getattr(whole, "fake_mode", None) or nullcontext():  # a list becomes a tensor
        region = whole[fake_value_index(index)]
    dims = indexed(trace, x, index, tuple(size_of(s) for s in region.shape))  # type: ignore[arg-type]
    return dims if isinstance(dims, tuple) else None


def fake_value_index(index: Any) -> Any:
    """An index with its nodes replaced by their fake values."""
    if isinstance(index, slice):
        return slice(*(fake_value(v) for v in (index.start, index.stop, index.step)))
    if isinstance(index, tuple):
        return tuple(fake_value_index(i) for i in index)
    return fake_value(index)


# Rows by an index tensor, along a dimension that is their second argument.
_PICKING = ("index_select", "gather", "take_along_dim")
_WRITING = ("index_copy", "index_add", "index_fill", "scatter", "scatter_add", "scatter_reduce")


def rows_by_index(trace: DimTrace, node: torch.fx.Node) -> Axis | None:
    """The axis of which an operation reads or writes rows by their numbers; None for any other operation.

    What is read has the order of the index, whatever that of the rows: tables of few rows, picked for each token.
    """
    name = canonical_name(node)
    if name in ("getitem", "setitem"):
        source, index = node.args[:2]
        items = list(index) if isinstance(index, (tuple, list)) else [index]
        dims = trace.dims(source)
        if not any(map(is_tensor, items)) or dims is None or not one_row_index(items):
            return None
        at = next(i for i, item in enumerate(items) if is_tensor(item))
        if Ellipsis in (item for item in items if not is_tensor(item)):
            before = next(i for i, item in enumerate(items) if item is Ellipsis)
            if before < at:
                return dims[-sum(1 for item in items[at:] if item is not None)]
        return dims[sum(1 for item in items[:at] if item is not None)]
    if name in _PICKING + _WRITING:
        dims, dim = trace.dims(argument(node, 0, "input")), argument(node, 1, "dim")
        if name == "take_along_dim":
            dim = argument(node, 2, "dim")
        return dims[dim] if dims is not None and isinstance(dim, int) else None
    if name == "embedding":
        table = next((n for n in node.all_input_nodes if not is_index(n)), None)
        dims = trace.dims(table)
        return dims[0] if dims else None
    return None


def is_index(node: torch.fx.Node) -> bool:
    return not fake_value(node).is_floating_point()


def index_select(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims, dim = trace.dims(argument(node, 0, "input")), argument(node, 1, "dim")
    rows = trace.dims(argument(node, 2, "index"))
    if dims is None or rows is None or len(rows) != 1:
        return None
    dim %= len(dims)
    return (*dims[:dim], rows[0], *dims[dim + 1 :])


def gather(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """One element for each element of the index, from the same place along all axes but one."""
    along = canonical_name(node) == "take_along_dim"
    dims, dim = trace.dims(argument(node, 0, "input")), argument(node, 2 if along else 1, "dim")
    rows = trace.dims(argument(node, 1, "indices") if along else argument(node, 2, "index"))
    if dims is None or rows is None or dim is None or len(rows) != len(dims):
        return None
    out = list(rows)
    for position, (axis, other) in enumerate(zip(dims, rows, strict=True)):
        if position == dim % len(dims):
            continue
        if not other:  # take_along_dim broadcasts
            out[position] = axis
        elif axis and same_size(axis_size(axis), axis_size(other)):
            trace.relate(node, axis, other)
        elif axis:
            return None
    return tuple(out)


def write_rows(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """Rows written by their numbers: a list of numbers along one axis, or a number for each element (scatter)."""
    dims, dim = trace.dims(argument(node, 0, "input")), argument(node, 1, "dim")
    rows = trace.dims(argument(node, 2, "index"))
    written = trace.dims(argument(node, 3, "source", node.kwargs.get("src")))
    if dims is None or rows is None or not isinstance(dim, int):
        return None
    dim %= len(dims)
    for other in (written, rows if len(rows) == len(dims) else None):
        for position, axis in enumerate(other or ()):
            into = dims[position] if position != dim else axis
            if not same_size(axis_size(axis), axis_size(into)):
                return None
            trace.relate(node, axis, into)
    if written:
        trace.relate(node, written[dim], rows[dim if len(rows) == len(dims) else 0])
    return dims


def narrow(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims = trace.dims(node.args[0])
    dim, start = argument(node, 1, "dim"), fake_value(argument(node, 2, "start"))
    if dims is None or not isinstance(start, (int, torch.SymInt)):
        return None
    dim %= len(dims)
    first, size = size_of(start), shape_of(node)[dim]
    return (*dims[:dim], part_of(dims[dim], first, first + size), *dims[dim + 1 :])


def select(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims, dim = trace.dims(node.args[0]), argument(node, 1, "dim")
    if dims is None:
        return None
    dim %= len(dims)
    return (*dims[:dim], *dims[dim + 1 :])
