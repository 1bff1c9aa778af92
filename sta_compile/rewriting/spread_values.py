"""Gives each token its own row of a value that is the same along some axes of the grid.

    scale                     [b, t, 1, d]
    numbers                   [t * h * w], the frame of each token, in tile order; made once for a graph
    scale[:, numbers]         [b, t, h * w, d], which inductor reads in the operation that asked for it

The size of a grid that is known only at run time is read from values that have it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial, reduce
from itertools import combinations
from math import prod
from typing import Any

import torch
import torch.fx

from .. import _torch
from .._sizes import simplified
from ..analysis.axes import Size, same_size, size_of
from ..analysis.graph_view import GraphView, fake_value
from ..analysis.partial_values import Pattern, Spread
from .fake_values import VALUE, add_call, fake_mode_of, run
from .size_nodes import Number, SizeNodes
from .tile_order import emit_tile


def spread_values(
    view: GraphView,
    sizes: SizeNodes,
    found: Sequence[Spread],
    shift: Number,
    grid: Sequence[Number],
    spec: str,
) -> None:
    """Edits the readers of partial values, which are in tile order, in place. Arguments as of `insert_layout`."""
    rows = _RowNumbers(view, sizes, shift, grid, spec)
    for spread in sorted(found, key=lambda s: view.position[s.reader]):
        numbers = rows.of(spread)
        reader, (first, last) = spread.reader, spread.dims
        lengths = [rows.number(size, reader) for _, size in spread.pattern]
        shape = [rows.number(size, reader) for size in spread.run]
        with reader.graph.inserting_before(reader):
            table, at = spread.value, first
            if spread.lead != 1:
                table = _method(reader, "unflatten", table, first, (-1, lengths[0]))
                at, last = first + 1, last + 1
            if last > at:
                table = _method(reader, "flatten", table, at, last)
            picked = _call(reader, torch.index_select, table, at, numbers)
            if len(shape) > 1:
                picked = _method(reader, "unflatten", picked, at, tuple(shape))
            if spread.lead != 1:
                picked = _method(reader, "flatten", picked, first, first + 1)
            if (
                spread.copies
            ):  # the operation becomes the copies, and stays the node that others read
                reader.op, reader.target = "call_method", "contiguous"
                reader.args, reader.kwargs = (picked,), {}
            else:
                reader.replace_input_with(spread.value, picked)


class _RowNumbers:
    """int64 [tokens]: which row each token takes, in tile order; one node of the root graph for each pattern."""

    def __init__(
        self,
        view: GraphView,
        sizes: SizeNodes,
        shift: Number,
        grid: Sequence[Number],
        spec: str,
    ) -> None:
        self.view, self.sizes = view, sizes
        self.shift, self.grid, self.spec = shift, grid, spec
        self._env = _torch.shape_env_of(view.gm)
        self._made: dict[Pattern, torch.fx.Node] = {}

    def of(self, spread: Spread) -> torch.fx.Node:
        """The row numbers in the graph of a spread; the first that is asked for has to be the first that reads them."""
        if spread.pattern not in self._made:
            reader = self.view.in_root(spread.reader)
            device = fake_value(spread.value).device
            self._made[spread.pattern] = self._make(spread.pattern, reader, device)
        numbers, owner = self._made[spread.pattern], self.view.owner[spread.reader]
        return self.sizes.threads.reach(numbers, owner)

    def number(self, size: Size, reader: torch.fx.Node) -> Number:
        """A size as a number, or as a node before a reader: a product of the grid's sizes, or of another value."""
        size, owner = simplified(size, self._env), self.view.owner[reader]
        if isinstance(size, int):
            return size
        sizes = [size_of(fake_value(g)) for g in self.grid]
        for first, last in combinations(range(4), 2):
            product = prod(sizes[first:last])
            if same_size(simplified(product, self._env), size):
                local = [
                    g if isinstance(g, int) else self.sizes.threads.reach(g, owner)
                    for g in self.grid[first:last]
                ]
                with reader.graph.inserting_before(reader):
                    return reduce(partial(_product, reader), local)
        return self.sizes.of_size(size, owner, reader)

    def _make(self, pattern: Pattern, reader: torch.fx.Node, device: torch.device) -> torch.fx.Node:
        lengths = [self.number(size, reader) for _, size in pattern]
        kept = tuple(
            n if has_rows else 1 for n, (has_rows, _) in zip(lengths, pattern, strict=True)
        )
        with reader.graph.inserting_before(reader):
            total = reduce(partial(_product, reader), kept)
            rows = reader.graph.call_function(torch.arange, (total,), {"device": device})
            rows.meta[VALUE] = run(rows, fake_mode_of(reader.graph))
            rows = _method(reader, "reshape", rows, kept)
            rows = _method(reader, "expand", rows, tuple(lengths))
            rows = _method(reader, "reshape", rows, (-1,))
            return emit_tile(
                reader.graph, rows, 0, self.shift, self.grid, self.spec, to_tile=True, like=reader
            )


def _product(reader: torch.fx.Node, a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if a == 1 or b == 1:
        return b if a == 1 else a
    return _call(reader, operator.mul, a, b)


def _method(reader: torch.fx.Node, name: str, *args: Any) -> torch.fx.Node:
    return add_call(reader.graph, "call_method", name, args, like=reader)


def _call(reader: torch.fx.Node, target: Any, *args: Any) -> torch.fx.Node:
    return add_call(reader.graph, "call_function", target, args, like=reader)
