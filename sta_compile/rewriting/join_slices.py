"""Turns work on slices of the tokens into work on all of them, of which each token takes its own.

A model that modulates the tokens of its first frame in another way cuts them by their place, which only raster order
has. The same in any order of tokens is a select, whose mask is reordered once for all layers:

    cat([x[:, :24] * a, x[:, 24:] * b], 1)        ->        where(rows < 24, x * a, x * b)

The slices have to be of values of the same tokens, and what is done to them has to be pointwise and defined everywhere, so
that what a token doesn't take does no harm. inductor fuses the branches, so they cost no traffic.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from ..analysis.axes import Axis, Size, axis_size, resolve, same_size, segments_of, size_of
from ..analysis.graph_view import argument, canonical_name, fake_value, is_inplace, is_tensor
from ..analysis.token_values import storage_of, written_storages
from ..analysis.trace_dims import DimTrace
from .fake_values import VALUE, add_call, fake_mode_of, run
from .size_nodes import Number

_DEFINED_EVERYWHERE = {
    "add", "sub", "mul", "neg", "addcmul", "lerp", "to", "type_as", "float", "half", "bfloat16", "double",
    "contiguous", "clone", "detach", "silu", "gelu", "relu", "tanh", "sigmoid",
}  # fmt: skip

Rows = tuple[Size, Size]  # the first, and the one after the last


@dataclass
class _Piece:
    """Pointwise work on slices with the same rows; `slices` holds the value that each is a slice of."""

    result: torch.fx.Node
    rows: Rows | None = None
    work: set[torch.fx.Node] = field(default_factory=set)
    slices: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)


def join_slices(trace: DimTrace, grids: Sequence[Axis]) -> int:
    """Edits the graph, bodies included, in place; returns how many concatenations became selects.

    grids: token axes whose attentions will be replaced. The trace is that of the graph before.
    """
    return _SliceJoiner(trace, grids).join()


class _SliceJoiner:
    def __init__(self, trace: DimTrace, grids: Sequence[Axis]) -> None:
        self.trace, self.view = trace, trace.view
        self.grids = [resolve(grid) for grid in grids]
        self.written = written_storages(self.view)
        self.masks: dict[tuple[torch.fx.Graph, Size, Size, int], torch.fx.Node] = {}

    def join(self) -> int:
        joined = 0
        for node in self.view.nodes:
            if canonical_name(node) != "cat":
                continue
            dim = _from_end(argument(node, 1, "dim", 0), node)
            pieces = self._pieces(node, dim)
            if pieces:
                self._replace(node, pieces, dim)
                joined += 1
        return joined

    def _pieces(self, node: torch.fx.Node, dim: int) -> list[_Piece]:
        """The pieces of a concatenation along dimension `dim`, counted from the end; none if it is not of that kind."""
        tensors = argument(node, 0, "tensors")
        if len(tensors) < 2 or not all(map(is_tensor, tensors)):
            return []
        pieces = []
        end: Size = 0
        for tensor in tensors:
            piece = _Piece(tensor)
            if fake_value(tensor).dtype != fake_value(node).dtype:
                return []
            if not self._is_unwritten(tensor) or not self._walk(tensor, dim, piece):
                return []
            if piece.rows is None or not same_size(piece.rows[0], end):
                return []
            end = piece.rows[1]
            pieces.append(piece)
        bases = {base for piece in pieces for base in piece.slices.values()}
        whole = all(same_size(size_of(fake_value(base).shape[dim]), end) for base in bases)
        cut = any(self._cuts_grid(base, dim, pieces) for base in bases)
        return pieces if whole and cut else []

    def _walk(self, node: torch.fx.Node, dim: int, piece: _Piece) -> bool:
        """Follows a piece back to the slices that it is made of; False where it is made of anything else."""
        if node in piece.work or node in piece.slices:
            return True
        cut = _slice(node, dim)
        if cut is not None:
            base, rows = cut
            if piece.rows is not None and not all(map(same_size, piece.rows, rows)):
                return False
            piece.rows = rows
            piece.slices[node] = base
            return True
        if canonical_name(node) not in _DEFINED_EVERYWHERE or is_inplace(node):
            return False
        piece.work.add(node)
        tokens = fake_value(node).shape[dim]
        return tokens != 1 and all(
            self._is_unwritten(operand)
            and (_size(operand, dim) == 1 or self._walk(operand, dim, piece))
            for operand in node.all_input_nodes
            if is_tensor(operand)
        )

    def _is_unwritten(self, node: torch.fx.Node) -> bool:
        """May a node be read later than it is?"""
        return all(storage not in self.written for storage in storage_of(node))

    def _cuts_grid(self, base: torch.fx.Node, dim: int, pieces: Sequence[_Piece]) -> bool:
        """Does a piece end inside of a grid? Where sizes are known at run time only, where nothing else ends."""
        dims = self.trace.dims(base)
        segments = segments_of(dims[dim]) if dims is not None else ()
        ends = list(itertools.accumulate(map(axis_size, segments), initial=0))
        for piece in pieces[:-1]:
            assert piece.rows is not None
            cut = piece.rows[1]
            if any(same_size(cut, end) for end in ends):
                continue
            for segment, start, stop in zip(segments, ends, ends[1:], strict=False):
                numbers = all(isinstance(size, int) for size in (start, cut, stop))
                if resolve(segment) in self.grids and (not numbers or start < cut < stop):
                    return True
        return False

    def _replace(self, node: torch.fx.Node, pieces: Sequence[_Piece], dim: int) -> None:
        with node.graph.inserting_before(node):
            wholes = [self._on_all(piece) for piece in pieces]
        result = wholes[-1]
        for piece, whole in zip(pieces[-2::-1], wholes[-2::-1], strict=True):
            mask = self._mask(node, pieces[: pieces.index(piece) + 1], dim)
            with node.graph.inserting_before(node):
                args = (mask, whole, result)
                result = add_call(node.graph, "call_function", torch.where, args, like=node)
        node.replace_all_uses_with(result)
        for unread in _unread(node):
            unread.graph.erase_node(unread)

    def _on_all(self, piece: _Piece) -> torch.fx.Node:
        """The work of a piece, done on all tokens."""
        copies = dict(piece.slices)

        def copied(node: torch.fx.Node) -> torch.fx.Node:
            return copies.get(node, node)

        for node in sorted(piece.work, key=self.view.position.__getitem__):
            args = torch.fx.node.map_arg(node.args, copied)
            kwargs = torch.fx.node.map_arg(node.kwargs, copied)
            copies[node] = add_call(node.graph, node.op, node.target, args, kwargs, like=node)
        return copies[piece.result]

    def _mask(self, node: torch.fx.Node, before: Sequence[_Piece], dim: int) -> torch.fx.Node:
        """bool [tokens, 1, ...], True for the tokens of the pieces `before`; made once for a graph."""
        rows, base = before[-1].rows, next(iter(before[-1].slices.values()))
        assert rows is not None
        graph = node.graph
        key = (graph, size_of(fake_value(base).shape[dim]), rows[1], dim)
        if key not in self.masks:
            with graph.inserting_before(node):
                total = _length(base, dim)
                stops = [_length(next(iter(piece.slices)), dim) for piece in before]
                stop = stops[0]
                for other in stops[1:]:
                    if isinstance(stop, int) and isinstance(other, int):
                        stop += other
                    else:
                        args: Any = (stop, other)
                        stop = add_call(graph, "call_function", operator.add, args, like=node)
                device = fake_value(node).device
                rows_of = graph.call_function(torch.arange, (total,), {"device": device})
                rows_of.meta[VALUE] = run(rows_of, fake_mode_of(graph))
                mine = add_call(graph, "call_method", "lt", (rows_of, stop), like=node)
                shape = (-1, *[1] * (-1 - dim))
                args = (mine, shape)
                self.masks[key] = add_call(graph, "call_method", "reshape", args, like=node)
        return self.masks[key]


def _length(node: torch.fx.Node, dim: int) -> Number:
    """The size of a dimension; at the graph's insertion point, if it is known at run time only."""
    size = fake_value(node).shape[dim]
    if isinstance(size, int):
        return size
    return add_call(node.graph, "call_method", "size", (node, dim), like=node)


def _from_end(dim: int, node: torch.fx.Node) -> int:
    return dim - fake_value(node).dim() if dim >= 0 else dim


def _size(node: torch.fx.Node, dim: int) -> Any:
    shape = fake_value(node).shape
    return shape[dim] if len(shape) >= -dim else 1


def _slice(node: torch.fx.Node, dim: int) -> tuple[torch.fx.Node, Rows] | None:
    """(value, rows) for `value[..., start:stop, ...]` that cuts dimension `dim` only, as a slice, narrow or split."""
    name = canonical_name(node)
    if name not in ("getitem", "narrow") or not isinstance(node.args[0], torch.fx.Node):
        return None
    base, start = node.args[0], None
    if canonical_name(base) in ("split", "chunk", "tensor_split", "split_with_sizes"):
        pieces, index = fake_value(base), node.args[1]
        along = argument(base, 2, "dim", 0)
        base = argument(base, 0, "input")
        if isinstance(index, int) and index >= 0 and _from_end(along, base) == dim:
            start = sum((size_of(piece.shape[dim]) for piece in pieces[:index]), start=0)
    elif name == "narrow" and is_tensor(base):
        if _from_end(argument(node, 1, "dim"), base) == dim:
            start = _place(argument(node, 2, "start"))
    elif is_tensor(base):
        start = _start(node, dim)
    if start is None or not is_tensor(node):
        return None
    return base, (start, start + size_of(fake_value(node).shape[dim]))


def _start(node: torch.fx.Node, dim: int) -> Size | None:
    """Where a slice begins; None for an index of any other kind."""
    base: torch.Tensor = fake_value(node.args[0])
    index: Any = node.args[1]
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (base.dim() - len(items) + 1)
    items += [slice(None)] * (base.dim() - len(items))
    if not all(isinstance(item, slice) for item in items) or len(items) != base.dim():
        return None
    cut = items.pop(dim)
    if any(item != slice(None) for item in items) or cut.step not in (None, 1):
        return None
    total = size_of(base.shape[dim])
    if cut.stop is None:
        return total - size_of(fake_value(node).shape[dim])
    if isinstance(cut.start, int) and cut.start < 0:
        return total + cut.start
    return 0 if cut.start is None else _place(cut.start)


def _place(value: Any) -> Size | None:
    """A number of rows as a size; None for one that may be negative."""
    value = fake_value(value)
    if not isinstance(value, (int, torch.SymInt)):
        return None
    place = size_of(value)
    known = place >= 0 if isinstance(place, int) else place.is_nonnegative
    return place if known else None


def _unread(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """A node without readers, then what only it read; to be erased in this order."""
    stack = [node]
    while stack:
        unread = stack.pop()
        if unread.users or unread.op not in ("call_function", "call_method") or is_inplace(unread):
            continue
        inputs = list(unread.all_input_nodes)
        yield unread
        stack += [n for n in inputs if n not in stack]
