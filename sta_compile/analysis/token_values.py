"""Where does a value hold the tokens of a grid, and what may an operation ask of their order?

A value may hold a whole grid along one axis, alone or as a segment beside text, or cut up over neighbouring axes
([batch, frames, rows, cols, width]); such a value can be in tile order, the latter as a view of flat tokens that only
operations without regard for their places may read. Anything else (rope tables before they are flattened, means of
frames) exists in raster order only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from .attention_names import MULTIHEAD, is_known_call
from .axes import Atom, Axis, Concat, Dims, Size, atoms_of, axis_size, resolve, segments_of
from .graph_view import (
    GraphView,
    argument,
    canonical_name,
    fake_value,
    is_inplace,
    is_pointwise,
    is_tensor,
)
from .trace_dims import DimTrace
from .trace_index import rows_by_index, written_axes

# Sums over tokens: the order of the tokens doesn't matter, as long as all operands have the same one.
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "any", "all", "prod", "std", "var", "norm",
    "linalg_vector_norm", "logsumexp",
}  # fmt: skip
_ORDER_FREE = _REDUCTIONS | {
    "matmul", "bmm", "mm", "baddbmm", "addmm", "einsum", "scaled_dot_product_attention",
}  # fmt: skip
# What is asked of a value but not of its elements; tile order has as many tokens.
_SIZES = {"size", "sym_size", "numel", "sym_numel"}
CONSTANT = {
    "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like",
    "new_zeros", "new_ones", "new_full", "new_empty",
}  # fmt: skip
BROADCAST = {"expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"}
# Beside pointwise ones, operations that a grid cut up over axes passes in any order: they leave all of these axes as they
# are, put them together again, or leave out all of them.
_INDIFFERENT = CONSTANT | BROADCAST | _REDUCTIONS | {
    "view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze", "permute",
    "transpose", "movedim", "linear", "cat", "stack", "pad_sequence", "chunk", "split", "unbind", "getitem", "narrow",
    "select",
}  # fmt: skip
_NORMS = {"layer_norm", "rms_norm"}


@dataclass(frozen=True, eq=False)
class Place:
    """Tokens of a grid in a value: rows offset .. offset + T*H*W along dimension `dim`, or the `span` dimensions from it.

    offsets: several where the value holds the grid several times along `dim`.
    movable: False where a conversion can't be written: the tokens are merged with another axis, or are along two.
    lead: how many grids the dimensions hold one after the other, [samples * frames, rows * cols] for example.
    """

    dim: int
    offsets: tuple[Size, ...]
    movable: bool
    span: int = 1
    lead: Size = 1


class TokenValues:
    """Where the values of a graph hold one grid, given by the factors of its token axis."""

    def __init__(self, trace: DimTrace, grid: Axis) -> None:
        self.trace = trace
        self.view: GraphView = trace.view
        self.grid = resolve(grid)
        self._atoms = set(atoms_of(self.grid))

    def place(self, node: torch.fx.Node) -> Place | None:
        """Where a value holds the whole grid; for a tuple, where its first such element does, and then not movable."""
        traced = self.trace.values.get(node)
        for dims in self.trace.tensors(node):
            places = [(d, *found) for d, axis in enumerate(dims) for found in self._find(axis)]
            if places:
                dim, offsets = places[0][0], tuple(offset for _, offset, _ in places)
                movable = all(at == dim and moves for at, _, moves in places)
                return Place(dim, offsets, movable and isinstance(traced, tuple))
            if run := self._run(dims):
                lead = self.lead(dims[run[0]])
                return Place(run[0], (0,), isinstance(traced, tuple), len(run), lead)
        return None

    def _run(self, dims: Dims) -> range:
        """The neighbouring dimensions over which the grid is cut up, if no other dimension has a part of it."""
        held = [d for d, axis in enumerate(dims) if self.touches(axis)]
        if len(held) < 2:
            return range(0)
        run = range(held[0], held[-1] + 1)
        factors = tuple(factor for d in run for factor in dims[d])
        ahead = len(factors) - len(self.grid)
        whole = ahead >= 0 and factors[ahead:] == self.grid
        return run if whole and ahead < len(dims[run[0]]) else range(0)

    def touches(self, axis: Axis) -> bool:
        """Has an axis a part of the grid?"""
        return any(atom in self._atoms for atom in atoms_of(axis))

    def lead(self, axis: Axis) -> Size:
        """Size of what the first of several dimensions holds ahead of its part of the grid."""
        ahead = next((i for i, factor in enumerate(axis) if self.touches((factor,))), 0)
        return axis_size(axis[:ahead])

    def _find(self, axis: Axis) -> list[tuple[Size, bool]]:
        """(offset, movable) of each occurrence of the grid in an axis."""
        if axis == self.grid:
            return [(0, True)]
        if len(axis) == 1 and isinstance(axis[0], Concat):
            out = []
            offset: Size = 0
            for part in axis[0].parts:
                out += [(offset + inner, movable) for inner, movable in self._find(part)]
                offset = offset + axis_size(part)
            return out
        n = len(self.grid)
        return [(0, False) for i in range(len(axis) - n + 1) if axis[i : i + n] == self.grid]

    def scattered(self, node: torch.fx.Node) -> bool:
        """Does a value hold factors of the grid, but not the grid as a whole?"""
        return any(
            not self._find(axis) and self.touches(axis)
            for dims in self.trace.tensors(node)
            if not self._run(dims)
            for axis in dims
        )

    def cut_up(self, node: torch.fx.Node) -> range:
        """The dimensions over which a value has the grid cut up."""
        return next(
            (run for dims in self.trace.tensors(node) if (run := self._run(dims))), range(0)
        )

    def misaligned(self, node: torch.fx.Node) -> bool:
        """Does an operation combine tokens of the grid with an axis whose relation to them is not known?"""
        axes = self.trace.misaligned.get(node, ())
        return any(atom in self._atoms for axis in axes for atom in atoms_of(resolve(axis)))

    def constant(self, node: torch.fx.Node) -> bool:
        """Does the operation make the same value for all tokens? Such values are in every order at once."""
        name = canonical_name(node)
        if name in CONSTANT:
            return True
        sources = [s for s in self.view.producers(node) if self.trace.tensors(s)]
        if name in BROADCAST:
            return not any(self.place(s) or self.scattered(s) for s in sources)
        return False

    def order_free(self, node: torch.fx.Node) -> bool:
        """Is an operation that reads the grid and doesn't return it indifferent to the order of the tokens?"""
        value = fake_value(node)
        if canonical_name(node) in _SIZES:
            return True
        if canonical_name(node) == "_assert_tensor_metadata":  # of type and device, as a rule
            return argument(node, 2, "stride") is None
        if canonical_name(node) in _ORDER_FREE:
            return isinstance(value, torch.Tensor)  # max(dim) gives indices too
        if isinstance(value, torch.Tensor) and any(
            isinstance(size, int) and size == 0 for size in value.shape
        ):
            return True
        return self._passes_by(node)

    def order_bound(self, node: torch.fx.Node) -> bool:
        """Does an operation that reads the grid, and may return it, put its tokens elsewhere or ask for their places?"""
        name = canonical_name(node)
        if self._sees_axes(node, name):
            return True
        if name == "scaled_dot_product_attention":
            return bool(argument(node, 5, "is_causal", False))
        if is_known_call(node) or name == MULTIHEAD:  # it may ask for places, and is left as it is
            return True
        rows = rows_by_index(self.trace, node)
        if rows is not None:
            return name == "setitem" or not self._atoms.isdisjoint(atoms_of(resolve(rows)))
        if name == "setitem":
            part = written_axes(self.trace, node)
            return not (self._keeps_rows(node.args[0], part) and self._fills(part, node.args[2]))
        return bool(self._made(node) & self._atoms)

    def _sees_axes(self, node: torch.fx.Node, name: str) -> bool:
        """Does an operation treat the axes of a grid that is cut up differently?"""
        runs = [run for n in (*node.all_input_nodes, node) if (run := self.cut_up(n))]
        if not runs or is_pointwise(name) or name in _INDIFFERENT:
            return False
        if name in _NORMS:
            normalised = len(argument(node, 1, "normalized_shape"))
            return runs[0][-1] >= len(self.trace.tensors(node)[0]) - normalised
        return True

    def _made(self, node: torch.fx.Node) -> set[Atom]:
        """Atoms of a node's own making, as they are known now."""
        made = self.trace.invented.get(node, set())
        return {a for atom in made for a in atoms_of(resolve((atom,)))}

    def _passes_by(self, node: torch.fx.Node) -> bool:
        """Does an operation pick the text beside the grid, or the element of a tuple that has no grid?"""
        source = node.args[0] if node.args else None
        if canonical_name(node) not in ("getitem", "narrow") or not isinstance(
            source, torch.fx.Node
        ):
            return False
        if isinstance(self.trace.values.get(source), list):
            return True
        made = self._made(
            node
        )  # rows that are written to the text have its axis, wherever they are from
        return self._beside(source, self.trace.dims(node)) and not any(
            atom in made for dims in self.trace.tensors(node) for axis in dims for atom in axis
        )

    def _keeps_rows(self, source: Any, part: Dims | None) -> bool:
        """Has a slice of a value the whole grid, or nothing of it?"""
        return any(map(self._find, part or ())) or self._beside(source, part)

    def _fills(self, part: Dims | None, value: Any) -> bool:
        """Has what is written to the whole grid the grid itself, or the same value for all its tokens?"""
        written = self.trace.tensors(value)[0] if is_tensor(value) else ()
        return all(
            self._find(other) or not other
            for axis, other in zip(reversed(part or ()), reversed(written), strict=False)
            if self._find(axis)
        )

    def _beside(self, source: Any, part: Dims | None) -> bool:
        """Is a slice of a value the text beside the grid?"""
        beside = [
            {factor for part in axis[0].parts if not self._find(part) for factor in part}
            for axis in self.trace.dims(source) or ()
            if len(axis) == 1 and isinstance(axis[0], Concat)
        ]
        return any(
            axis and all(set(segment) <= others for segment in segments_of(axis))
            for others in beside
            for axis in part or ()
        )


def storage_of(node: torch.fx.Node) -> Iterable[int]:
    """Identity of the memory behind a node's fake tensors."""
    value = fake_value(node)
    for tensor in value if isinstance(value, (tuple, list)) else [value]:
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            yield tensor.untyped_storage()._cdata


def written_storages(view: GraphView) -> dict[int, list[torch.fx.Node]]:
    """Memory that in-place operations write, with the operations in order."""
    out: dict[int, list[torch.fx.Node]] = {}
    for node in view.nodes:
        if is_inplace(node):
            target: Any = node.args[0] if node.args else argument(node, 0, "input")
            if isinstance(target, torch.fx.Node):
                for storage in storage_of(target):
                    out.setdefault(storage, []).append(node)
    return out
