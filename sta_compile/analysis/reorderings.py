"""Which operations of a graph put positions of a value in another order, and in which?

    y [b, t3, h4, w5, c] -> roll(1, 2)                        rows, by Turned(1, -1)
    y.flatten(1, 3)[:, order]                                 tokens, by Named(order)
    torch.cat([y[:, 1:], y[:, :1]], 1)                        frames, by Turned(1, 1)
    z.index_copy(1, order, y.flatten(1, 3))                   tokens, by Named(order, inverse)

An index counts where it has as many numbers as there are rows: a table of few rows, and tokens of which a part is taken or
written, are in no other order. What an operation does to axes that it makes anew is told by what it made them of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.fx

from .axes import (
    Atom,
    Axis,
    Dims,
    Size,
    atoms_of,
    axis_size,
    resolve,
    size_of,
)
from .graph_view import argument, canonical_name, fake_value, is_inplace, is_tensor
from .index_order import index_order, numbers_from, numbers_of, takes_all
from .joins import joined_dim
from .orders import FLIPPED, Named, Permutation, Turned, in_place, inverse
from .pieces import put_together
from .token_parts import TokenParts
from .token_streams import MIXING, before_casts, passed_on
from .token_values import storage_of, written_storages
from .trace_index import is_index
from .trace_positions import SUMS, TracedPositions
from .written_pieces import SCATTERS, VALUES, WrittenPieces, targets_and_values

_FLIPS = {"flip": None, "fliplr": 1, "flipud": 0}
_SHIFTS = {"fftshift": -1, "fft_fftshift": -1, "ifftshift": 1, "fft_ifftshift": 1}
_TURNS = ("roll", "rot90", *_FLIPS, *_SHIFTS)
_READS = ("getitem", "index_select", "gather", "take_along_dim", "embedding", "index")
_ADDING = ("index_add", "index_reduce", "scatter_add", "scatter_reduce")
# Their elements come from anywhere: along one dimension, which is their second argument, or along all of them.
_SORTS = ("sort", "msort", "topk")
_CHANNELS = ("channel_shuffle", "native_channel_shuffle")
_SHUFFLES = ("take", "put", "as_strided", *_CHANNELS)
_VIEWS = ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")


class Move(NamedTuple):
    """The positions along an axis are taken in an order. axis: its atoms; length: its size."""

    axis: frozenset[Atom]
    order: Permutation
    length: Size


@dataclass(frozen=True)
class Reordering:
    """An operation that reads values of one order, and moves their positions.

    onto: the value that it adds them to, if it does.
    """

    sources: tuple[torch.fx.Node, ...]
    moves: tuple[Move, ...]
    onto: torch.fx.Node | None = None


class Reorderings:
    """Those of one graph, by node."""

    def __init__(self, parts: TokenParts) -> None:
        self._parts, self.trace = parts, parts.trace
        self._positions = TracedPositions(parts)
        self._writes = WrittenPieces(self._positions)
        # Atoms of new axes -> those of the axes that an operation made them of.
        self._before: dict[Atom, frozenset[Atom]] = {}
        self._known: set[Atom] = set()  # of tokens so far
        self._changed = set(written_storages(self.trace.view))
        self.found: dict[torch.fx.Node, Reordering] = {}
        # Operations that might have moved something, and did not.
        self.in_place: set[torch.fx.Node] = set()
        for node in self.trace.view.nodes:
            self._name_new_axes(node)
            reordering = self._of(node)
            if reordering is not None and reordering.moves:
                self.found[node] = reordering
            elif reordering is not None:
                self.in_place.add(node)
            moves = () if reordering is None or reordering.onto is not None else reordering.moves
            self._positions.follow(node, partial(self._is_along, moves) if moves else None)
            if node in self._positions.values:
                self._known |= self.trace.atoms(node)

    def _is_along(self, moves: Iterable[Move], axis: Axis) -> bool:
        return any(move.axis & self.atoms(axis) for move in moves)

    def left_out(self, node: torch.fx.Node) -> Axis:
        """The axes of which a write writes a part only."""
        return self._writes.left_out.get(node, ())

    def atoms(self, axis: Axis) -> frozenset[Atom]:
        """The atoms of an axis, as they are called where nothing was moved or cut."""
        found: set[Atom] = set()
        for atom in atoms_of(resolve(axis)):
            if atom in self._before:
                found |= self._before[atom]
            else:
                found |= {atom} if atom.slice_of is None else self.atoms(atom.slice_of[0])
        return frozenset(found)

    def atoms_of_value(self, node: torch.fx.Node) -> frozenset[Atom]:
        return frozenset().union(
            *(self.atoms(axis) for dims in self.trace.tensors(node) for axis in dims)
        )

    def _of(self, node: torch.fx.Node) -> Reordering | None:
        name = canonical_name(node)
        if name in _TURNS:
            return self._turned(node, name)
        if name in VALUES or name in SCATTERS:
            return self._written(node, name)
        if name in _READS and (picked := self._read(node, name)) is not None:
            return picked
        if name in _SORTS or (name in _SHUFFLES and not _is_a_part(node)):
            return self._shuffled(node, name)
        if name in _VIEWS:
            return self._misread(node)
        if name in ("matmul", "bmm", "mm"):
            return self._by_matrix(node)
        if is_inplace(node) and (written := self._written(node, name)) is not None:
            return written
        found = put_together(self._positions, node)
        dim = joined_dim(node)
        if node in self.trace.shuffled and dim is not None:
            found = dim, (self.trace.axis(node, dim), Named(node))
        if found is None:
            return None
        tensors: Any = argument(node, 0, "tensors")
        dim, (axis, order) = found
        move = self._move(axis, order)
        sources = tensors if isinstance(tensors, (tuple, list)) else node.all_input_nodes[:1]
        self._name_after(node, sources[0], [move], along=dim)
        return Reordering(tuple(sources), (move,))

    def _turned(self, node: torch.fx.Node, name: str) -> Reordering | None:
        source = argument(node, 0, "input")
        dims = self.trace.dims(source)
        if dims is None:
            return None
        moves = []
        for dim, order in _turns(node, name, [axis_size(axis) for axis in dims]):
            along = dims if dim is None else (dims[dim],)
            axis = tuple(factor for each in along for factor in each)
            moves.append(self._move(axis, order or Named(node)))
        return Reordering((source,), tuple(m for m in moves if not in_place(m.order, m.length)))

    def _read(self, node: torch.fx.Node, name: str) -> Reordering | None:
        """Rows by their numbers, as many as there are."""
        source = argument(node, 0, "input")
        if name == "embedding":
            source = next((n for n in node.all_input_nodes if not is_index(n)), source)
        dims = self.trace.dims(source)
        if dims is None:
            return None
        moves = self._by_numbers(node, dims, numbers_of(node, source))
        self._name_after(node, source, moves)
        return Reordering((source,), tuple(moves)) if moves else None

    def _written(self, node: torch.fx.Node, name: str) -> Reordering | None:
        """Values written to rows by their numbers, to all of them, or a piece of a value written to another place."""
        pairs = list(targets_and_values(node))
        if not pairs:
            return None
        target, value = pairs[0]
        dims, values = self.trace.dims(target), tuple(value for _, value in pairs)
        moves = [self._move(*found) for found in self._writes.moved(node)]
        if name in VALUES and dims is not None:
            moves += [
                Move(move.axis, inverse(move.order) or Named(node), move.length)
                for move in self._by_numbers(node, dims, numbers_of(node, target))
            ]
        if not moves:
            return None
        if name in SCATTERS:  # the rest is in place, which is not told apart
            self._name_after(node, target, moves)
            return Reordering((target, value), tuple(moves))
        adds = name in _ADDING or (name == "index_put" and argument(node, 3, "accumulate", False))
        if name in SUMS:
            values, adds = tuple(n for n in node.all_input_nodes if n is not target), True
        elif name not in (*VALUES, "copy", "_foreach_copy"):
            values = tuple(node.all_input_nodes)
        return Reordering(values, tuple(moves), target if adds else None)

    def _by_numbers(
        self, node: torch.fx.Node, dims: Dims, picked: Iterable[tuple[int, Any]]
    ) -> list[Move]:
        moves = []
        for dim, index in picked:
            if dims[dim] and takes_all(index, axis_size(dims[dim])):
                order = Named(node) if self._changes(index) else index_order(index)
                moves.append(self._move(dims[dim], order))
        return [move for move in moves if not in_place(move.order, move.length)]

    def _changes(self, index: Any) -> bool:
        """Are an index's numbers changed in place, so that a tensor has several orders?"""
        memory = {m for numbers in numbers_from(index) for m in storage_of(numbers)}
        return not memory.isdisjoint(self._changed)

    def _shuffled(self, node: torch.fx.Node, name: str) -> Reordering | None:
        """Elements from anywhere, along one dimension or along all."""
        source = argument(node, 0, "input")
        dims = self.trace.dims(source)
        if dims is None:
            return None
        axes = dims
        if name in _SORTS:
            dim = argument(node, 2 if name == "topk" else 1, "dim", -1) if name != "msort" else 0
            axes = dims[dim : dim + 1 or None]
        elif name in _CHANNELS:
            axes = dims[1:2]
        value = argument(node, 2, "source") if name == "put" else source
        axis = tuple(factor for each in axes for factor in each)
        return Reordering((value,), (self._move(axis, Named(node)),))

    def _misread(self, node: torch.fx.Node) -> Reordering | None:
        """A view that cuts axes at other places than they have: [t5 h5 w7] as [7, 5, 5]."""
        source = argument(node, 0, "input")
        before, after = self.trace.dims(source), self.trace.dims(node)
        if before is None or after is None:
            return None
        had, has = ([factor for axis in dims for factor in axis] for dims in (before, after))
        while had and has and had[0] == has[0]:
            del had[0], has[0]
        while had and has and had[-1] == has[-1]:
            del had[-1], has[-1]
        if len(set(atoms_of(tuple(had)))) < 2:
            return None
        return Reordering((source,), (self._move((*had, *has), Named(node)),))

    def _by_matrix(self, node: torch.fx.Node) -> Reordering | None:
        """Rows by a product with a matrix that has a one in each row: F.one_hot(order), torch.eye(n)[order]"""
        matrix, rows = node.args[:2]
        dims = self.trace.dims(rows)
        if dims is None or len(dims) < 2 or not is_tensor(matrix):
            return None
        assert isinstance(matrix, torch.fx.Node)
        assert isinstance(rows, torch.fx.Node)
        ones = before_casts(matrix)
        index: Any = argument(ones, 0, "input")
        if canonical_name(ones) == "getitem" and canonical_name(index) == "eye":
            index = ones.args[1]
        elif canonical_name(ones) != "one_hot":
            return None
        if not is_tensor(index) or not takes_all(index, axis_size(dims[-2])):
            return None
        move = self._move(dims[-2], index_order(index))
        self._name_after(node, rows, [move])
        return Reordering((rows,), (move,))

    def _move(self, axis: Axis, order: Permutation) -> Move:
        return Move(self.atoms(axis), order, axis_size(axis))

    def _name_after(
        self,
        node: torch.fx.Node,
        source: torch.fx.Node,
        moves: Iterable[Move],
        along: int | None = None,
    ) -> None:
        """States that the axes that a node has and its source has not are those that were moved. along: a dimension."""
        before = frozenset[Atom]().union(*(move.axis for move in moves))
        dims = self.trace.dims(node)
        has = self.trace.atoms(node)
        if along is not None and dims is not None:
            has = set(atoms_of(dims[along]))
        if before:
            self._name(has - self.trace.atoms(source), before)

    def _name_new_axes(self, node: torch.fx.Node) -> None:
        """Names axes that an operation makes after those of what it reads, dimension by dimension where it has as many.

        A product makes those that only its right side has: x.mT @ matrix has tokens where the matrix has columns.
        """
        trace, product = self.trace, canonical_name(node) in MIXING
        makes = product or node in trace.opaque or trace.invented.get(node)
        if node.op == "placeholder" or not makes:
            return
        sources = trace.view.producers(node)
        read = [n for n in passed_on(node, sources) or sources if trace.dims(n) is not None]
        if not read:
            return
        source = max(read, key=lambda n: len(trace.dims(n) or ()))
        dims = trace.dims(source) or ()
        given = [source] if product else sources
        new = trace.atoms(node).difference(self._known, *map(trace.atoms, given))
        named = set() if product else self._before.keys()
        lost = tuple(trace.atoms(source) - trace.atoms(node))
        for made in trace.tensors(node):
            for position, axis in enumerate(made):
                same_rank = len(made) == len(dims)
                before = self.atoms(dims[position] if same_rank else lost)
                # What is beside the axis that was there is something else: padding.
                padded = same_rank and set(atoms_of(axis)) & set(atoms_of(dims[position]))
                if before and not padded:
                    self._name(new & set(atoms_of(axis)) - named, before)

    def _name(self, atoms: Iterable[Atom], before: frozenset[Atom]) -> None:
        for atom in atoms:
            if atom not in before and atom.slice_of is None:
                self._before[atom] = before


def _turns(
    node: torch.fx.Node, name: str, sizes: Sequence[Size]
) -> Iterator[tuple[int | None, Permutation | None]]:
    """(dimension, order) of what is rolled or flipped; no dimension for all of them."""
    if name == "rot90":
        yield None, None
    elif name == "roll":
        shifts, dims = argument(node, 1, "shifts"), argument(node, 2, "dims")
        dims = None if dims in ((), []) else dims
        amounts = shifts if isinstance(shifts, (tuple, list)) else [shifts]
        for dim, amount in zip(
            [dims] if isinstance(dims, int) or dims is None else dims, amounts, strict=False
        ):
            yield dim, None if dim is None else Turned(1, -size_of(fake_value(amount)))
    elif name in _SHIFTS:
        dims = argument(node, 1, "dim")
        dims = range(len(sizes)) if dims is None else [dims] if isinstance(dims, int) else dims
        yield from ((dim, Turned(1, _SHIFTS[name] * (sizes[dim] // 2))) for dim in dims)
    elif _FLIPS[name] is not None:
        yield _FLIPS[name], FLIPPED
    else:
        given: Any = node.kwargs.get("dims", node.args[1:])
        items = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        yield from ((int(dim), FLIPPED) for dim in items)


def _is_a_part(node: torch.fx.Node) -> bool:
    """Is a strided view of known sizes one of a part of a value, as queries of a product are, or the value as it was?"""
    if canonical_name(node) != "as_strided":
        return False
    before, after = fake_value(argument(node, 0, "input")), fake_value(node)
    sizes = (*before.shape, *before.stride(), *after.shape, *after.stride(), after.storage_offset())
    if not all(type(n) is int for n in sizes):
        return False
    same = before.shape == after.shape and before.stride() == after.stride()
    return bool(same or before.numel() != after.numel())
