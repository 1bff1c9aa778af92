"""Follows positions of tokens from where they were taken to where they are put (see `positions`).

Pointwise operations, norms, and products over channels leave a token where it is; slices, joins, paddings, stacks and views
say where it goes; what else makes a dimension of another size makes positions of its own. Tensors that are made of no
input, as tables of numbers, have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.fx

from .axes import Atom, Axis, Size, axis_size, equal_groups, resolve, same_size
from .graph_view import argument, canonical_name, fake_value, is_parameter, is_pointwise, is_tensor
from .index_order import index_of
from .indexed_positions import indexed
from .joins import JOINS, joined_dim
from .outer_positions import within_outer
from .padded_positions import PADS, padded
from .positions import (
    Factors,
    Layout,
    Piece,
    Places,
    Segment,
    beside,
    empty,
    interleaved,
    is_whole,
    joined,
    line,
    merged,
    size_of_factors,
    size_of_layout,
    split,
    together,
    whole,
)
from .strided_positions import strided
from .token_parts import TokenParts, before_picking
from .token_streams import passed_on
from .token_values import CONSTANT, storage_of
from .trace_dims import shape_of
from .trace_index import is_index

SUMS = ("add", "sub", "rsub", "addcmul", "addcdiv", "lerp")
_RESHAPED = (
    "view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "unsqueeze", "squeeze",
)  # fmt: skip
_VIEWS = (
    *_RESHAPED, "getitem", "narrow", "select", "permute", "transpose", "t", "T", "mT", "movedim", "expand", "expand_as",
    "detach", "alias",
)  # fmt: skip
_READ = {
    "to": slice(1),
    "type_as": slice(1),
    "copy": slice(1, 2),
}  # the other gives a type, or memory
_BY_INDEX = ("index_select", "gather", "take_along_dim", "embedding", "index")
_TOKEN_RANK = 2  # an input of fewer dimensions has no tokens

Table = Callable[[torch.fx.Node], Places | None]


class TracedPositions:
    """Places of the values of one graph, as far as `follow` was called."""

    def __init__(self, parts: TokenParts) -> None:
        self.parts, self.trace = parts, parts.trace
        self.values: dict[torch.fx.Node, Places] = {}
        self._views: dict[torch.fx.Node, tuple[torch.fx.Node, Places]] = {}
        self._views_of: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self._marks: dict[torch.fx.Node, Places] = {}
        self._embedded = parts.streams.embedded()

    def follow(self, node: torch.fx.Node, moved: Callable[[Axis], bool] | None) -> None:
        """States where a value's positions are from. moved: are those of an axis in another order in it?"""
        if not is_tensor(node) or canonical_name(node) == "setitem":
            return
        if canonical_name(node) in _VIEWS:
            self.view(node)
        places = self.of(node)
        if places is not None and moved:
            places = self._reordered(node, places, moved)
        if places is not None and places.known():
            self.values[node] = places
            if is_tensor(node.kwargs.get("out")):
                self.values[self.view(node.kwargs["out"])[0]] = places  # type: ignore[arg-type]

    def of(self, node: torch.fx.Node) -> Places | None:
        """Where the positions of an operation's result are from, as far as those of what it reads are stated."""
        return self._of(node, self.values.get)

    def layout(self, node: torch.fx.Node, dim: int) -> Layout:
        """Of a dimension of a value."""
        places, size = self.values.get(node), shape_of(node)[dim]
        if places is None:
            return (Segment(size),)
        return line(places, dim, node)

    def view(self, node: torch.fx.Node) -> tuple[torch.fx.Node, Places]:
        """(the value that a node is a view of, where the view's positions are in it), by the axes of its `marks`."""
        if node not in self._views:
            name, made = canonical_name(node), before_picking(node)
            source: Any = argument(made, 0, "input")
            shares = is_tensor(source) and set(storage_of(node)) == set(storage_of(source))
            found = None
            if shares and (name in _VIEWS or made is not node):
                root, _ = self.view(source)
                places = self._of(node, lambda n: self.view(n)[1])
                found = None if places is None else (root, places)
            self._views[node] = found or (node, self.marks(node))
            if found is not None:
                self._views_of.setdefault(found[0], []).append(node)
        return self._views[node]

    def views_of(self, root: torch.fx.Node) -> list[torch.fx.Node]:
        """Views of a value so far, in their order."""
        return list(self._views_of.get(root, ()))

    def marks(self, node: torch.fx.Node) -> Places:
        """Of a value that has axes of its own."""
        if node not in self._marks:
            axes = (() if same_size(size, 1) else (Atom(size),) for size in shape_of(node))
            self._marks[node] = Places(tuple(map(whole, axes)))
        return self._marks[node]

    def _of(self, node: torch.fx.Node, table: Table) -> Places | None:
        view, name = self.trace.view, canonical_name(node)
        if view.is_root_input(node):
            value = fake_value(node)
            tokens = value.is_floating_point() and value.dim() >= _TOKEN_RANK
            return self._own(node) if tokens and not is_parameter(node) else None
        picked = view.picks(node)
        if node in view.sources or picked is not None:
            given = set(view.sources[node]) if picked is None else {picked}
            own = table(next(iter(given))) if len(given) == 1 else None
            return own or self._own(node)
        if name in CONSTANT or name.endswith("_like"):
            return None
        if name in ("getitem", "narrow", "select"):
            return self._part(node, name, table)
        if name in _BY_INDEX:
            return self._picked(node, name, table)
        tensors = argument(node, 0, "tensors")
        if name in JOINS and isinstance(tensors, (tuple, list)):
            return self._joined(node, tensors, table)
        if name == "stack":
            return self._stacked(node, table)
        if name in PADS:
            places = table(argument(node, 0, "input"))
            return None if places is None else padded(node, places)
        if name in _RESHAPED or name == "as_strided":
            places = table(argument(node, 0, "input"))
            if places is None:
                return None
            return self._reshaped(node, places) if name in _RESHAPED else strided(node, places)
        if is_pointwise(name):
            read = view.producers(node)[_READ.get(name, slice(None))]
            return self._combined(node, [n for n in read if is_tensor(n)], name in SUMS, table)
        return self._passed(node, table)

    def _own(self, node: torch.fx.Node) -> Places:
        dims = self.trace.dims(node)
        sizes = shape_of(node)
        return Places(tuple(map(whole, dims)) if dims is not None else tuple(map(empty, sizes)))

    def _reordered(
        self, node: torch.fx.Node, places: Places, moved: Callable[[Axis], bool]
    ) -> Places:
        """A value in another order has positions of its own; of those of a part it is not known which they are."""
        dims = []
        for axis, factors in zip(self.trace.dims(node) or (), places.dims, strict=False):
            layout = merged(factors, node)
            touched = [any(moved(p.whole) for p in segment.pieces) for segment in layout]
            if not factors or not any(touched):
                dims.append(factors)
                continue
            size = size_of_layout(layout)
            part = {
                s: tuple(
                    Piece(p.whole, node)
                    for p in s.pieces
                    if not same_size(axis_size(p.whole), size) and not is_whole(s, p)
                )
                for s in layout
            }
            if all(touched):  # else there are segments that nothing moved
                all_parts = tuple(dict.fromkeys(p for pieces in part.values() for p in pieces))
                dims.append(((Segment(size, all_parts or (Piece(axis, 0),)),),))
                continue
            left = (
                Segment(s.size, part[s]) if moves else s
                for s, moves in zip(layout, touched, strict=True)
            )
            dims.append((tuple(left),))
        return Places(tuple(dims), places.fixed)

    def _part(self, node: torch.fx.Node, name: str, table: Table) -> Places | None:
        """A slice, a position, rows by an index, or a piece of a split."""
        source: Any = argument(node, 0, "input")
        made = before_picking(node)
        if canonical_name(made) == "unbind":
            source = argument(made, 0, "input")
            places = table(source)
            dim = argument(made, 1, "dim", 0)
            return None if places is None else indexed(node, source, places, {dim: node.args[1]})
        cut = self.parts.cut(node)
        if cut is not None:
            places, (source, dim, start) = table(cut[0]), cut
            if places is None:
                return None
            size = shape_of(node)[dim]
            return indexed(node, source, places, {dim: (start, size)})
        if not is_tensor(source):
            return self._passed(node, table)
        places = table(source)
        if places is None:
            return None
        if name == "select":
            at = {argument(node, 1, "dim"): argument(node, 2, "index")}
            return indexed(node, source, places, at)
        return indexed(node, source, places, node.args[1]) or self._own(node)

    def _picked(self, node: torch.fx.Node, name: str, table: Table) -> Places | None:
        """Rows by an index, by another spelling than `x[index]`."""
        source = argument(node, 0, "input")
        if name == "embedding":
            source = next((n for n in node.all_input_nodes if not is_index(n)), source)
        places = table(source)
        if places is None:
            return None
        found = indexed(node, source, places, dict(index_of(node, source)))
        fits = found is not None and len(found.dims) == fake_value(node).dim()
        return found if fits else self._own(node)

    def _joined(
        self, node: torch.fx.Node, tensors: Sequence[torch.fx.Node], table: Table
    ) -> Places | None:
        dim = joined_dim(node)
        assert dim is not None
        tensors = [t for t in tensors if fake_value(t).dim() > dim]
        places = self._combined(node, tensors, False, table, without=dim)
        if places is None:
            return None
        segments: list[Segment] = []
        for tensor in tensors:
            own = table(tensor)
            size = shape_of(tensor)[dim]
            segments += (
                [Segment(size)] if own is None else within_outer(line(own, dim, node), own.fixed)
            )
        return self._with(places, dim, joined(segments))

    def _with(self, places: Places, dim: int, segments: Iterable[Segment]) -> Places:
        """With another layout of a dimension, which says where the value is along it."""
        layout = tuple(segments)
        along = {p.whole for s in layout for p in s.pieces}
        fixed = tuple(p for p in places.fixed if p.whole not in along)
        return Places((*places.dims[:dim], (layout,), *places.dims[dim + 1 :]), fixed)

    def _stacked(self, node: torch.fx.Node, table: Table) -> Places | None:
        tensors, dim = argument(node, 0, "tensors"), joined_dim(node)
        assert dim is not None
        found = [table(t) for t in tensors]
        places = self._combined(node, tensors, False, table, shape=shape_of(tensors[0]))
        if places is None:
            return None
        dims = (*places.dims[:dim], (), *places.dims[dim:])
        known = (Places(()) if p is None else p for p in found)
        singles = joined(s for p in known for s in within_outer((Segment(1, p.fixed),), p.fixed))
        if len(tensors) == 1:
            return Places(dims, places.fixed)
        places = self._with(Places(dims, places.fixed), dim, singles)
        if dim == len(dims) - 1:
            return places
        axis = interleaved([s for p in found if p is not None for s in line(p, dim - 1, node)])
        if dim and axis is not None:
            each = size_of_factors(places.dims[dim - 1])
            rows = split(whole(axis)[0], [each, len(tensors)], node)
            if len(rows) == 2:
                dims = (*places.dims[: dim - 1], (rows[0],), (rows[1],), *places.dims[dim + 1 :])
                return Places(dims, places.fixed)
        lines = [line(p, dim, node) for p in found if p is not None and p.dims[dim]]
        layout = tuple(joined(segment for each in lines for segment in each))
        alike = len(lines) == len(tensors) and len(layout) == 1
        if alike and any(is_whole(layout[0], p) for p in layout[0].pieces):
            # pieces of an axis one behind the other
            rows = split(layout, [len(tensors), size_of_layout(lines[0])], node)
            dims = (*places.dims[:dim], *((row,) for row in rows), *places.dims[dim + 2 :])
            return Places(dims, places.fixed)
        return places

    def _reshaped(self, node: torch.fx.Node, places: Places) -> Places:
        """Of a view: dimensions are merged and split, in row-major order."""
        sizes, factors = shape_of(node), [f for dim in places.dims for f in dim]
        targets = [(i, s) for i, s in enumerate(sizes) if not same_size(s, 1)]
        dims: list[Factors] = [()] * len(sizes)
        had = [size_of_factors((f,)) for f in factors]
        groups = equal_groups(had, [s for _, s in targets])
        if groups is None:
            return self._own(node)
        for f0, f1, t0, t1 in groups:
            group, cut = factors[f0:f1], targets[t0:t1]
            if len(cut) > 1:  # [a b] as [c d], too
                parts = split(merged(tuple(group), node), [s for _, s in cut], node)
                if len(parts) != len(cut):
                    return self._own(node)
                group = list(parts)
            for i, (target, _) in enumerate(cut):
                dims[target] = (group[i],) if len(cut) > 1 else tuple(group)
        return Places(tuple(dims), places.fixed)

    def _combined(
        self,
        node: torch.fx.Node,
        tensors: Sequence[torch.fx.Node],
        sums: bool,
        table: Table,
        *,
        without: int | None = None,
        shape: Sequence[Size] | None = None,
    ) -> Places | None:
        """Of values that are combined position by position, but along one dimension."""
        found = [(t, p) for t in tensors if (p := table(t)) is not None]
        tokens = [p for t, p in found if t in self._embedded] or [p for _, p in found]
        if not tokens:
            return None
        sizes = shape_of(node) if shape is None else shape
        dims: list[Factors] = []
        for dim in range(-len(sizes), 0):
            if dim + len(sizes) == without:
                dims.append(())
                continue
            given = [p.dims[dim] for p in tokens if len(p.dims) >= -dim and p.dims[dim]]
            if all(factors == given[0] for factors in given):
                dims.append(given[0] if given else empty(sizes[dim]))
            else:
                layouts = [merged(factors, node) for factors in given]
                dims.append((beside(layouts, node, sums=sums),))
        along = {p.whole for factors in dims for f in factors for s in f for p in s.pieces}
        fixed = [p for places in tokens for p in places.fixed if p.whole not in along]
        return Places(tuple(dims), together(fixed, node, sums=sums))

    def _passed(self, node: torch.fx.Node, table: Table) -> Places | None:
        """Of any other operation: dimensions that it keeps, by their axes or else by their place and size."""
        producers = [n for n in self.trace.view.producers(before_picking(node)) if is_tensor(n)]
        sources = [n for n in passed_on(node, producers) or producers if is_tensor(n)]
        found = [(n, p) for n in sources if (p := table(n)) is not None]
        if not found:
            return None
        source, places = max(found, key=lambda pair: len(pair[1].dims))
        own, before, after = self._own(node), self.trace.dims(source), self.trace.dims(node)
        dims = list(own.dims)
        sizes, given = shape_of(node), shape_of(source)
        taken_from: set[int] = set()
        for dim, axis in enumerate(after or ()):
            alike = [
                d
                for d, other in enumerate(before or ())
                if d not in taken_from and axis and resolve(other) == resolve(axis)
            ]
            in_place = len(sizes) == len(given) and same_size(sizes[dim], given[dim])
            if alike:
                chosen = dim if dim in alike else alike[0]
            elif in_place and node in self.trace.opaque:
                chosen = dim
            else:
                continue
            taken_from.add(chosen)
            dims[dim] = places.dims[chosen]
        return Places(tuple(dims), places.fixed)
