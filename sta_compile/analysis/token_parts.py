"""Which tokens are those at a place of a sequence, where several parts of it have the same axis?

`[x, encoder(x)]` holds the grid twice, and keys `[history, x]` may have a history of as many tokens as the video: the axis
of a part does not say which tokens it holds, so these are followed by where they stand.
"""

from __future__ import annotations

from typing import Any

import torch.fx

from .axes import Axis, Size, axis_size, resolve, same_size, segments_of, size_of
from .graph_view import argument, canonical_name, fake_value, is_tensor
from .mask_spans import at_most, index_items, position_of
from .token_streams import MIXING, TokenStreams, before_casts
from .trace_index import SPLIT_DIMS, split_dim

Place = tuple[torch.fx.Node, Size]  # a value, and where along its tokens a part begins
_TUPLES = (
    "split",
    "chunk",
    "tensor_split",
    "split_with_sizes",
    "unsafe_split",
    "unsafe_chunk",
    *SPLIT_DIMS,
)


class TokenParts:
    """Answers for the attention sites of one graph."""

    def __init__(self, streams: TokenStreams) -> None:
        self.streams, self.trace = streams, streams.trace
        self._reach: set[torch.fx.Node] | None = None

    def sources(self, node: torch.fx.Node, part: Axis, start: Size) -> set[Place]:
        """Walks back over values that hold `part` at `start` to the inputs of the first projections."""
        found: set[Place] = set()
        seen = {(node, start)}
        stack = [(node, start)]
        while stack:
            value, at = stack.pop()
            carriers = self._carriers(value, part, at)
            if not carriers or self.streams.reorders(value, part):
                found.add((value, at))
            elif canonical_name(value) in MIXING:
                found.update(self._origin(carrier, part, place) for carrier, place in carriers)
            else:
                fresh = [c for c in carriers if c not in seen]
                seen.update(fresh)
                stack += fresh
        return found

    def _origin(self, node: torch.fx.Node, part: Axis, start: Size) -> Place:
        """The value that the tokens were before they were cast, put beside others, or cut out."""
        while True:
            node = before_casts(node)
            chosen = canonical_name(node) == "cat" or self.cut(node) is not None
            carriers = self._carriers(node, part, start) if chosen else []
            if len(carriers) != 1:
                return node, start
            ((node, start),) = carriers

    def _carriers(self, node: torch.fx.Node, part: Axis, start: Size) -> list[Place]:
        """The operands that hold these tokens, and where."""
        view = self.trace.view
        picked = view.picks(node)
        if picked is not None:
            return [(picked, start)] if self._holds(picked, part, start) else []
        cut = self.cut(node)
        if cut is not None and self._dim(node, part, start) == cut[1]:
            held = self._dim(cut[0], part, cut[2] + start) == cut[1]
            return [(cut[0], cut[2] + start)] if held else []
        places = [(source, start) for source in view.producers(before_picking(node))]
        if canonical_name(node) == "cat":
            places = self._joined(node, part, start)
        return [(source, at) for source, at in places if self._holds(source, part, at)]

    def _joined(self, node: torch.fx.Node, part: Axis, start: Size) -> list[Place]:
        tensors = argument(node, 0, "tensors")
        dim = self._dim(node, part, start)
        if dim is None or argument(node, 1, "dim", 0) % fake_value(node).dim() != dim:
            return [(tensor, start) for tensor in tensors]
        before: Size = 0
        for tensor in tensors:
            after = before + size_of(fake_value(tensor).shape[dim])
            if at_most(before, start) and at_most(start + axis_size(part), after):
                return [(tensor, start - before)]
            before = after
        return []

    def _holds(self, node: torch.fx.Node, part: Axis, start: Size) -> bool:
        return self._dim(node, part, start) is not None

    def _dim(self, node: torch.fx.Node, part: Axis, start: Size) -> int | None:
        """The dimension of a value that holds the part at a place."""
        wanted = resolve(part)
        for dim, axis in enumerate(self.trace.dims(node) or ()):
            before: Size = 0
            for segment in segments_of(axis):
                if resolve(segment) == wanted and same_size(before, start):
                    return dim
                before = before + axis_size(segment)
        return None

    def cut(self, node: torch.fx.Node) -> tuple[torch.fx.Node, int, Size] | None:
        """(value, dimension, start) of a slice of one dimension; None for anything else."""
        source = node.args[0] if node.args else None
        name = canonical_name(node)
        if name == "narrow" and is_tensor(source):
            dim = argument(node, 1, "dim") % fake_value(source).dim()
            return (
                source,
                dim,
                position_of(argument(node, 2, "start"), size_of(fake_value(source).shape[dim])),
            )  # type: ignore[return-value]
        if name != "getitem" or not isinstance(source, torch.fx.Node):
            return None
        if canonical_name(source) in _TUPLES and isinstance(node.args[1], int):
            return self._piece(source, node.args[1])
        return self._slice(source, node.args[1]) if is_tensor(source) else None

    def _piece(self, split: torch.fx.Node, index: int) -> tuple[torch.fx.Node, int, Size] | None:
        value = argument(split, 0, "input")
        pieces = fake_value(split)
        dim = split_dim(split)
        start: Size = 0
        for piece in pieces[: index % len(pieces)]:
            start = start + size_of(piece.shape[dim])
        return value, dim, start

    def _slice(self, source: torch.fx.Node, index: Any) -> tuple[torch.fx.Node, int, Size] | None:
        sizes = [size_of(s) for s in fake_value(source).shape]
        items = index_items(index, len(sizes))
        if items is None or not all(isinstance(item, slice) for item in items):
            return None
        cuts = [d for d, item in enumerate(items) if item != slice(None)]
        if len(cuts) != 1:
            return None
        (dim,) = cuts
        start = items[dim].start
        return source, dim, 0 if start is None else position_of(start, sizes[dim])

    def last_kept(self, axis: Axis, starts: list[Size]) -> int | None:
        """Of parts of one axis, at these places of a sequence: the one that is left where the graph last cuts the sequence.

        None if it is never cut on the way to the output.
        """
        view = self.trace.view
        if self._reach is None:
            output = next(n for n in reversed(view.nodes) if n.op == "output")
            self._reach = set(view.backwards(output))
        whole = resolve(axis)
        for node in reversed(view.nodes):
            cut = self.cut(node) if node in self._reach else None
            if cut is None or (self.trace.dims(cut[0]) or ())[cut[1] : cut[1] + 1] != (whole,):
                continue
            stop = cut[2] + size_of(fake_value(node).shape[cut[1]])
            left = [
                i for i, at in enumerate(starts) if at_most(cut[2], at) and not at_most(stop, at)
            ]
            if len(left) == 1:
                return left[0]
        return None


def before_picking(node: torch.fx.Node) -> torch.fx.Node:
    """The operation that made several tensors, of which a node is one: `x.chunk(2, -1)` of `x.chunk(2, -1)[1]`."""
    source = node.args[0] if node.args else None
    made = isinstance(source, torch.fx.Node) and canonical_name(node) == "getitem"
    return source if made and not is_tensor(source) else node  # type: ignore[return-value]
