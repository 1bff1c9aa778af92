"""What do writes into a value move? A write to a view is one to a part of the value that it is a view of.

z[:, 1:] = y[:, :-1] * 2                  a piece that began at 0
z[:, 0].copy_(y[:, 2])                    a single frame
z.flatten(1, 2)[:, :4].add_(w)            a piece of rows of several frames
z[:, order[:4]] = y[:, :4]                a piece, by an index
torch.slice_scatter(z, y, 1, 2, 4)        a piece, in a copy of z
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch.fx

from .axes import Axis, Dims, Size, axis_size, same_size
from .graph_view import argument, canonical_name, fake_value, is_inplace, is_tensor
from .index_order import index_of, takes_all
from .indexed_positions import indexed
from .mask_spans import at_most
from .orders import Named
from .outer_positions import within_outer
from .pieces import Found, order_of, put_together
from .positions import (
    Index,
    Layout,
    Places,
    Segment,
    empty,
    merged,
    position,
    size_of_layout,
    split,
    whole,
    written_over,
)
from .trace_dims import shape_of
from .trace_positions import TracedPositions

# Which argument is written. Along a dimension that is their second argument, to rows that their third one says: _BY_DIM.
VALUES = {
    "setitem": 2, "index_put": 2, "index_copy": 3, "index_add": 3, "index_reduce": 3, "scatter": 3, "scatter_add": 3,
    "scatter_reduce": 3,
}  # fmt: skip
SCATTERS = ("slice_scatter", "select_scatter")
_BY_DIM = (
    "index_copy", "index_add", "index_reduce", "scatter", "scatter_add", "scatter_reduce", "index_fill",
)  # fmt: skip


_MANY = 256  # rows that are looked at one by one


class _Part(NamedTuple):
    """What a write does along dimensions of a value, merged to one. at: where, or by which index; new: what it puts there.

    all_of: their size.
    """

    dims: tuple[int, ...]
    at: Size | Index
    step: int
    new: Layout
    all_of: Size

    @property
    def partial(self) -> bool:
        return not same_size(size_of_layout(self.new), self.all_of)


class WrittenPieces:
    """Answers for the writes of one graph, in its order.

    left_out: of writes, the dimensions of which they write a part, by their axes; none where that is not known.
    """

    def __init__(self, positions: TracedPositions) -> None:
        self.positions = positions
        self.left_out: dict[torch.fx.Node, Axis] = {}

    def moved(self, node: torch.fx.Node) -> list[Found]:
        """What a write moves; states where the positions of the value that it writes to are from now."""
        pairs = list(targets_and_values(node))
        return [found for target, value in pairs for found in self._write(node, target, value)]

    def _write(self, node: torch.fx.Node, target: torch.fx.Node, value: Any) -> Iterator[Found]:
        plain = canonical_name(node) in (*VALUES, *SCATTERS, "copy", "_foreach_copy")
        given = self.positions.values.get(value) if plain else self.positions.of(node)
        rank = fake_value(value if plain else target).dim()
        root, parts = self._parts(node, target, given, rank)
        sizes, axes = shape_of(root), self.positions.trace.dims(root) or ()
        if parts is None:
            axis = _along(axes, _indexed_dims(node, target))
            self.left_out[node] = axis
            if given is not None and given.known() and axis:
                yield axis, Named(node)
            return
        partial = [part for part in parts if part.partial]
        self.left_out[node] = _along(axes, (d for part in partial for d in part.dims))
        if given is None:
            return
        before = self.positions.values.get(root) or Places(tuple(map(empty, sizes)))
        dims = list(before.dims)
        for part in parts:
            old = merged(tuple(f for d in part.dims for f in dims[d]), node)
            known = any(segment.pieces for segment in old)
            if not part.partial and (partial or _picks(part)) and known:
                continue
            new = part.new
            if part.partial:
                base = old if len(partial) == 1 else (Segment(part.all_of),)
                if len(partial) > 1 and not all(segment.pieces for segment in new):
                    continue  # a matrix of computed values, as a rotation in one of positions
                over = _over(base, part, node)
                found = _by_index(part, node) if over is None else order_of(over, node)
                if found is not None:  # what other writes do beside this one is not known
                    yield found[0], Named(node)
                if found is not None or over is None or len(partial) > 1:
                    over = old if known and found is None else whole(axes[part.dims[0]])[0]
                new = over
            split_up = (
                (new,) if len(part.dims) == 1 else split(new, [sizes[d] for d in part.dims], node)
            )
            for d, factor in zip(part.dims, split_up, strict=False):
                dims[d] = (factor,)
        if is_inplace(node):
            self.positions.values[root] = Places(tuple(dims), before.fixed)
            yield from self._seen_by_views(node, root)

    def _seen_by_views(self, node: torch.fx.Node, root: torch.fx.Node) -> Iterator[Found]:
        """What a write moves in views that were made before it: a crop of a buffer that is filled after it."""
        for view in self.positions.views_of(root):
            found = put_together(self.positions, view)
            if found is not None:
                _, (axis, _) = found
                yield axis, Named(node)
            self.positions.follow(view, None)

    def _parts(
        self, node: torch.fx.Node, target: torch.fx.Node, given: Places | None, rank: int
    ) -> tuple[torch.fx.Node, list[_Part] | None]:
        """(the value that is written to, how); None if that is not known. A view that has other axes is a value, too."""
        own = (target, self.positions.marks(target))
        views = [self.positions.view(target), own] if is_inplace(node) else [own]
        for root, seen in views:
            parts = self._parts_of(root, seen, node, target, given, rank)
            if parts is not None:
                return root, parts
        return views[0][0], None

    def _parts_of(
        self,
        root: torch.fx.Node,
        seen: Places,
        node: torch.fx.Node,
        target: torch.fx.Node,
        given: Places | None,
        rank: int,
    ) -> list[_Part] | None:
        marks, sizes = self.positions.marks(root), shape_of(root)
        region = self._region(node, target, seen)
        if region is None:
            return None
        numbers = {
            mark: d
            for d, factors in enumerate(marks.dims)
            for f in factors
            for mark in f[0].pieces[0].whole
        }
        left, parts = set(numbers.values()), []
        lines = [(d, merged(f, node)) for d, f in enumerate(region.dims) if f]
        wanted = [
            *((None, Segment(1, (p,))) for p in region.fixed),
            *((d, s) for d, line in lines for s in line),
        ]
        for d, segment in wanted:
            piece = segment.pieces[0] if len(segment.pieces) == 1 else None
            if (
                piece is None
                or piece.at is node
                or not left >= {numbers.get(m) for m in piece.whole}
            ):
                return None
            own = tuple(numbers[m] for m in piece.whole)
            new: Layout = (Segment(segment.size),)
            if given is not None:
                at = None if d is None else d - len(region.dims) + rank
                if at is None:
                    new = (Segment(1, given.fixed),)
                elif at >= 0 and given.dims[at]:
                    new = merged(given.dims[at], node)
                new = within_outer(new, given.fixed)
            left -= set(own)
            parts.append(_Part(own, piece.at, piece.step, new, prod(sizes[n] for n in own)))
        return None if left else parts

    def _region(self, node: torch.fx.Node, target: torch.fx.Node, places: Places) -> Places | None:
        """Where a write is to, in what `places` are of."""
        name = canonical_name(node)
        index: Any = None
        if name == "setitem":
            index = node.args[1]
        elif name == "index_put":
            index = tuple(slice(None) if i is None else i for i in argument(node, 1, "indices"))
        elif name in _BY_DIM:
            index = {argument(node, 1, "dim"): argument(node, 2, "index")}
        elif name == "select_scatter":
            index = {argument(node, 2, "dim"): argument(node, 3, "index")}
        elif name == "slice_scatter":
            bounds = (argument(node, i + 3, n) for i, n in enumerate(("start", "end", "step")))
            index = {argument(node, 2, "dim", 0): slice(*bounds)}
        return places if index is None else indexed(node, target, places, index)


def _along(axes: Dims, dims: Iterable[int]) -> Axis:
    return tuple(factor for dim in dims if dim < len(axes) for factor in axes[dim])


def targets_and_values(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, Any]]:
    """What an operation writes to, and what; for an operation in place, its last tensor."""
    name = canonical_name(node)
    if name.startswith("_foreach") and is_inplace(node):
        values = node.args[1] if len(node.args) > 1 else ()
        if isinstance(values, (list, tuple)):
            yield from zip(node.args[0], values, strict=False)  # type: ignore[arg-type]
        return
    target, value = argument(node, 0, "input"), None
    if name in VALUES:
        given = [node.kwargs[n] for n in ("source", "src", "values") if n in node.kwargs]
        value = given[0] if given else argument(node, VALUES[name], "value")
    elif name in SCATTERS:
        value = argument(node, 1, "src")
    elif is_inplace(node) and node.kwargs.get("out") is None:
        others = [n for n in node.all_input_nodes if n is not target and is_tensor(n)]
        value = others[-1] if others else None
    if is_tensor(target) and is_tensor(value):
        yield target, value


def _over(base: Layout, part: _Part, node: torch.fx.Node) -> Layout | None:
    """A layout after a write; None for rows by an index whose numbers are not known, or for many that are apart."""
    if isinstance(part.at, torch.fx.Node):
        return None
    size = size_of_layout(part.new)
    if (isinstance(part.at, tuple) or part.step != 1) and not at_most(size, _MANY):
        return None
    if not isinstance(part.at, tuple) and (part.step == 1 or same_size(size, 1)):
        return written_over(base, part.at, part.new, node)
    rows = _rows(part.at, part.step, size)
    if not isinstance(rows, tuple):
        return None
    for i, row in enumerate(rows):
        base = written_over(base, row, (Segment(1, position(part.new, i, node)),), node)
    return base


def _rows(at: Size | Index, step: int, size: Size) -> Size | Index:
    """The numbers of rows, one by one where they are known."""
    if not isinstance(at, int) or not isinstance(size, int):
        return at
    return tuple(range(at, at + size * step, step))


def _by_index(part: _Part, node: torch.fx.Node) -> Found | None:
    """What is moved by a write to rows that are not known, or many: all but what is from the same rows."""
    rows = _rows(part.at, part.step, size_of_layout(part.new))
    for piece in (piece for segment in part.new for piece in segment.pieces):
        same = any(
            p.whole == piece.whole and _rows(p.at, p.step, segment.size) == rows
            for segment in part.new
            for p in segment.pieces
        )
        if same_size(axis_size(piece.whole), part.all_of) and not (same and len(part.new) == 1):
            return piece.whole, Named(node)
    return None


def _picks(part: _Part) -> bool:
    return isinstance(part.at, (tuple, torch.fx.Node))


def _indexed_dims(node: torch.fx.Node, target: torch.fx.Node) -> list[int]:
    """Of an index that is not understood: the dimensions of which it takes a part."""
    if canonical_name(node) not in VALUES:
        return list(range(fake_value(target).dim()))
    sizes = shape_of(target)
    return [
        d for d, item in index_of(node, target) if d < len(sizes) and not takes_all(item, sizes[d])
    ]
