"""Do the tokens of an attention stand where the video has them, or were they rolled, flipped or picked in another order?

What an operation moves is followed forward through the graph as long as it is not moved back:

    y [b, t3, h4, w4, c] -> roll(1, 2) -> attention        moved: place 0 of the rows is the video's last row
    ... -> roll(-1, 2) -> attention                        back in its place

The sum of values that were moved and of values that were not has the places of the latter: `x + x.roll(1, 1)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch.fx

from .attention_site import Problem
from .axes import Atom, Axis, Size, atoms_of, axis_size, resolve, same_size
from .graph_view import argument, canonical_name, fake_value, is_tensor
from .mask_spans import index_items
from .token_parts import TokenParts
from .token_streams import passed_on
from .token_values import storage_of
from .trace_index import is_index, rows_by_index

MOVED = Problem(
    "its tokens are rolled, flipped or picked in another order than the video's",
    "attend to them in the order of the video; shifted windows are local already",
)
_FLIPS = {"flip": None, "fliplr": 1, "flipud": 0}
_TURNS = ("roll", "rot90", *_FLIPS)
_PICKS = ("getitem", "index_select", "gather", "take_along_dim")
# Their result has the places of those operands that were not moved; that of other operations is moved if one of theirs is.
_SUMS = ("add", "sub", "rsub", "addcmul", "addcdiv", "lerp")
_INPUT_RANK = 3  # of inputs with tokens or latents: [batch, tokens, channels]


class Move(NamedTuple):
    """axis: the atoms that it moves along. kind: "roll" (by an amount), "flip", or one that nothing undoes."""

    axis: frozenset[Atom]
    kind: str
    amount: Any = 0


class Reordering(NamedTuple):
    """What an operation reads, and how it moves the positions of that."""

    source: torch.fx.Node
    moves: list[Move]


Moves = tuple[Move, ...]


class MovedTokens:
    """Answers for the attention sites of one graph."""

    def __init__(self, parts: TokenParts) -> None:
        self.parts, self.trace, self.view = parts, parts.trace, parts.trace.view
        self._before: dict[
            Atom, frozenset[Atom]
        ] = {}  # of what was moved, in the place of new atoms
        # What was done to a value, in each of the ways that lead to it; () is a way without a move.
        self._states: dict[torch.fx.Node, frozenset[Moves]] = {}
        self._reorderings: dict[torch.fx.Node, Reordering] | None = None

    def moved(self, tokens: torch.fx.Node, part: Axis, *, picked: bool) -> bool:
        """Are the tokens of a part of a value in other places than the video's? picked: count picks by an index, too."""
        if self._reorderings is None:
            found = {node: self._reordering(node) for node in self.view.nodes}
            self._reorderings = {node: each for node, each in found.items() if each is not None}
            for _ in range(1 + bool(self.view.calls) if self._reorderings else 0):
                self._follow(self._reorderings)  # twice: a body's inputs have states of later calls
        along = self._atoms(part)

        def counts(move: Move) -> bool:
            return bool(move.axis & along) and (picked or move.kind != "index")

        states = self._states.get(tokens, frozenset())
        return bool(states) and all(any(map(counts, moves)) for moves in states)

    def _follow(self, reorderings: Mapping[torch.fx.Node, Reordering]) -> None:
        for node in self.view.nodes:
            if canonical_name(node) == "setitem":
                self._write(node)
            else:
                found = self._state(node, reorderings.get(node))
                if found:
                    self._states[node] = found

    def _state(self, node: torch.fx.Node, reordering: Reordering | None) -> frozenset[Moves]:
        if self.view.is_root_input(node):
            value = fake_value(node)
            rank = value.dim() if is_tensor(node) and value.is_floating_point() else 0
            return frozenset([()]) if rank >= _INPUT_RANK else frozenset()
        if reordering is not None:
            found = self._states.get(reordering.source, frozenset())
            for move in reordering.moves:
                found = frozenset(_after(before, move) for before in found)
            return found
        picked = self.view.picks(node)
        sources = [picked] if picked is not None else self.view.producers(node)
        states = [self._states[n] for n in passed_on(node, sources) if n in self._states]
        away = [state for state in states if () not in state]
        if away and canonical_name(node) not in _SUMS:
            states = away
        return frozenset[Moves]().union(*states)

    def _write(self, node: torch.fx.Node) -> None:
        """Moved values that are written over others leave these moved for good."""
        target: Any = node.args[0]
        value: Any = node.args[2]
        written = self._states.get(value, frozenset()) if is_tensor(value) else frozenset()
        if not written or () in written:
            return
        axes = frozenset[Atom]().union(*(move.axis for moves in written for move in moves))
        memory = set(storage_of(target))
        for other in self.view.nodes[: self.view.position[node]]:
            if other is target or not memory.isdisjoint(storage_of(other)):
                self._states[other] = frozenset([(Move(axes, "written", node),)])

    def _reordering(self, node: torch.fx.Node) -> Reordering | None:
        name = canonical_name(node)
        if name in ("cat", "stack"):
            return self._rejoined(node, name)
        if name not in (*_PICKS, *_TURNS):
            return None
        source = argument(node, 0, "input")
        dims = self.trace.dims(source)
        if dims is None:
            return None
        if name in _PICKS:
            listed = self._listed(node, dims) if name == "getitem" else None
            if listed is not None:
                for axis, made in zip(dims, self.trace.dims(node) or (), strict=False):
                    self._name_after(made, axis)
                return Reordering(source, [Move(self._atoms(listed), "index", node)])
            rows = rows_by_index(self.trace, node)
            return None if rows is None else self._picked(node, source, rows)
        for axis, made in zip(dims, self.trace.dims(node) or (), strict=False):
            self._name_after(made, axis)
        moves = []
        for dim, amount in _turned(node, name):
            if dim is None or not isinstance(amount, int):
                along = dims if dim is None else dims[dim : dim + 1 or None]
                moves += [Move(frozenset().union(*map(self._atoms, along)), "other", node)]
            else:
                kind = "flip" if name in _FLIPS else "roll"
                moves += [Move(self._atoms(dims[dim]), kind, amount)]
        return Reordering(source, moves)

    def _listed(self, node: torch.fx.Node, dims: Sequence[Axis]) -> Axis | None:
        """The axis of which a Python list picks all positions in another order, as in y[:, [2, 0, 1]]."""
        index: Any = node.args[1]
        items = index if isinstance(index, tuple) else (index,)
        if any(item is None or item is Ellipsis for item in items):
            return None
        for axis, item in zip(dims, items, strict=False):
            whole = isinstance(item, (list, tuple)) and same_size(axis_size(axis), len(item))
            if whole and list(item) != sorted(item):
                return axis
        return None

    def _picked(self, node: torch.fx.Node, source: torch.fx.Node, rows: Axis) -> Reordering | None:
        """As many rows as there are, by their numbers. Few rows of a table, or a part of the tokens, are no other order."""
        indices = [n for n in node.all_input_nodes if is_tensor(n) and is_index(n)]
        picked = [axis for index in indices for axis in self.trace.dims(index) or ()]
        if not any(same_size(axis_size(axis), axis_size(rows)) for axis in picked):
            return None
        for axis in picked:
            self._name_after(axis, rows)
        return Reordering(source, [Move(self._atoms(rows), "index", node)])

    def _rejoined(self, node: torch.fx.Node, name: str) -> Reordering | None:
        """The pieces of one value, all of them, put together again in another order."""
        tensors = argument(node, 0, "tensors")
        pieces = [self._piece(t) if name == "stack" else self.parts.cut(t) for t in tensors]
        known = [piece for piece in pieces if piece is not None]
        if not known or len(known) < len(pieces):
            return None
        (source, dim, _), starts = known[0], [start for _, _, start in known]
        into = argument(node, 1, "dim", 0) % fake_value(node).dim()
        if any((s, d) != (source, dim) for s, d, _ in known) or (name == "cat" and into != dim):
            return None
        whole, made = self.trace.dims(source), self.trace.dims(node)
        if (
            whole is None
            or made is None
            or not same_size(*map(axis_size, (whole[dim], made[into])))
        ):
            return None
        numbers = [start for start in starts if isinstance(start, int)]
        if len(numbers) < len(starts) or numbers == sorted(numbers):
            return None
        self._name_after(made[into], whole[dim])
        return Reordering(source, [Move(self._atoms(whole[dim]), *_order_of(name, numbers, node))])

    def _piece(self, node: torch.fx.Node) -> tuple[torch.fx.Node, int, Size] | None:
        """(value, dimension, place) of one position of a value."""
        source, name = node.args[0] if node.args else None, canonical_name(node)
        if not isinstance(source, torch.fx.Node):
            return None
        if name == "getitem" and canonical_name(source) == "unbind":
            value, at = argument(source, 0, "input"), argument(source, 1, "dim", 0)
            return value, at % fake_value(value).dim(), node.args[1]
        if not is_tensor(source):
            return None
        rank = fake_value(source).dim()
        if name == "select":
            return source, argument(node, 1, "dim") % rank, argument(node, 2, "index")
        items = index_items(node.args[1], rank) if name == "getitem" else None
        numbers = [i for i, item in enumerate(items or ()) if isinstance(item, int)]
        return (source, numbers[0], items[numbers[0]]) if items and len(numbers) == 1 else None

    def _name_after(self, axis: Axis, other: Axis) -> None:
        """States that an axis is what an operation made of another one."""
        new, old = list(atoms_of(resolve(axis))), resolve(other)
        for i, atom in enumerate(new):
            before = self._atoms(old[i : i + 1] if len(new) == len(old) else other)
            if atom not in before:
                self._before.setdefault(atom, before)

    def _atoms(self, axis: Axis) -> frozenset[Atom]:
        """The atoms of an axis, as they are called where nothing was moved."""
        atoms = atoms_of(resolve(axis))
        return frozenset().union(*(self._before.get(atom, {atom}) for atom in atoms))


def _order_of(name: str, starts: Sequence[int], node: torch.fx.Node) -> tuple[str, Any]:
    """Kind and amount of a move by what the pieces began with."""
    if len(starts) == 2:
        return "roll", -starts[0]
    if name == "stack" and list(starts) == sorted(starts, reverse=True):
        return "flip", 0
    return "other", node


def _turned(node: torch.fx.Node, name: str) -> Iterator[tuple[int | None, Any]]:
    """(dimension, amount) of what is rolled or flipped; no dimension where that is not followed."""
    if name == "roll":
        shifts, dims = argument(node, 1, "shifts"), argument(node, 2, "dims")
        shifts = shifts if isinstance(shifts, (tuple, list)) else [shifts]
        dims = dims if isinstance(dims, (tuple, list)) else [dims]
        yield from zip(dims or [None], shifts, strict=False)
    elif name == "rot90":
        yield None, 0
    elif _FLIPS[name] is not None:
        yield _FLIPS[name], 0
    else:
        given: Any = node.kwargs.get("dims", node.args[1:])
        items = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        yield from ((int(dim), 0) for dim in items)


def _after(before: Moves, move: Move) -> Moves:
    """Moves with one more; what undoes the last one along its axis takes it away."""
    across = any(m.axis & move.axis and m.axis != move.axis for m in before)
    last = next((m for m in reversed(before) if m.axis == move.axis), None)
    if last is None or across or last.kind != move.kind or move.kind not in ("roll", "flip"):
        return before if move in before else (*before, move)
    rest = tuple(m for m in before if m is not last)
    if move.kind == "flip":
        return rest
    amount, length = last.amount + move.amount, prod(atom.size for atom in move.axis)
    amount = amount % length if isinstance(length, int) else amount
    return (*rest, Move(move.axis, "roll", amount)) if amount else rest
