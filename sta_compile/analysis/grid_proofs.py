"""Which token axes are grids, and how is that known?

In order: the factors of an axis are proved by a convolution, a patchify, an unpatchify; told by the call or the option
`grid`; or they are those of a rope table. A 3x4x5 latent that a convolution cuts into patches has axes (t3)(h4)(w5), and an
axis `(t3 h4 w5)` is that grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

import torch.fx

from ..ir.known_tokens import Doubt
from .axes import Atom, Axis, axis_size, resolve, same_size
from .folded_axes import FoldedAxes
from .graph_view import canonical_name, is_parameter
from .grid_axis import AxisNames, GridAxis, by_name
from .hints import Hints
from .rival_sequences import RivalSequences
from .rope_axes import position_axes
from .told_axes import ToldAxes
from .trace_dims import DimTrace

POSITIONS = "positions of the rope tables"
RESHAPE = "a reshape of three axes"


class GridProofs:
    """Answers for the token axes of one graph. declared: option `grid`; told: by other graphs of the call."""

    def __init__(
        self,
        trace: DimTrace,
        declared: tuple[int, int, int] | None,
        hints: Hints,
        told: ToldAxes,
        rivals: RivalSequences,
    ) -> None:
        self.trace, self.hints = trace, hints
        self.declared, self.told, self.rivals = declared, told, rivals
        self.folded = FoldedAxes(trace)
        self._inputs = self._latents(
            n for n in trace.view.nodes if trace.view.is_root_input(n) and not is_parameter(n)
        )
        output = next(iter(reversed(trace.view.gm.graph.nodes)))
        self._outputs = self._latents(output.all_input_nodes)
        self._convolutions = [n for n in trace.values if canonical_name(n).startswith("conv")]
        # declared grids: one tuple of factors per token axis
        self._declared: dict[Axis, Axis] = {}
        self._positions = position_axes(trace)
        self._names = AxisNames(trace, self.folded, self.latents, self._positions, told.names)

    @property
    def latents(self) -> list[list[Axis]]:
        """Axes of the inputs and outputs of the graph."""
        return [*self._inputs, *self._outputs]

    def _latents(self, nodes: Iterable[torch.fx.Node]) -> list[list[Axis]]:
        """Axes of the tensors among the nodes: b, c, t, (h p), (w p) of a latent that is cut into patches."""
        known = [dims for dims in map(self.trace.dims, nodes) if dims is not None]
        return [[self.folded.of(axis) for axis in dims] for dims in known]

    def grid_of(self, part: Axis) -> GridAxis | None:
        """What the graph proves comes first: a declared grid of as many tokens may be that of another resolution."""
        option = None if self.is_shared_number(part) else self._of_option(part)
        found = self.proved(part) or option or self.by_positions(part)
        if found is None or found.kind == "declared" or self.declared is None:
            return found
        shape = by_name(found.order, found.shape)
        contradicted = same_size(prod(shape), prod(self.declared)) and not all(
            map(same_size, shape, self.declared)
        )
        return replace(found, contradicts=self.declared) if contradicted else found

    def proved(self, part: Axis) -> GridAxis | None:
        atoms = self.folded.grid_atoms(part)
        if atoms is None:
            return None
        hint = self.hints.by_atom.get(atoms[-1])
        if hint is not None:
            ones = tuple(i for i, n in enumerate(hint.positions.grid) if n == 1)
            return GridAxis(part, atoms, hint.evidence, "hinted", hint, ones=ones, named=False)
        origin = next((a.origin for a in atoms if a.origin), "")
        if origin and all(a.origin for a in atoms[-2:]):
            return self._named(part, atoms, origin)
        if self._spread_over(self._inputs, atoms):
            return self._named(part, atoms, "reshape patchify")
        if self._spread_over(self._outputs, atoms):
            return self._named(part, atoms, "unpatchify")
        return None

    def _named(self, part: Axis, factors: Axis, evidence: str) -> GridAxis:
        order = self._names.order_of(factors)
        if order is None:
            return GridAxis(part, factors, evidence, named=False)
        return GridAxis(part, factors, evidence, order=order[0], ones=order[1])

    def embedded(self) -> Iterator[Axis]:
        """The grids that patch embeds make, whether any attention has them or not."""
        for node in self._convolutions:
            traced = self.trace.values[node]
            known = traced if isinstance(traced, tuple) else ()
            if any(isinstance(f, Atom) and f.origin for axis in known for f in axis):
                yield resolve(tuple(factor for axis in known[2:] for factor in axis))

    def is_shared_number(self, part: Axis) -> bool:
        """Is a grid known of its number of tokens, and more than one sequence has so many?"""
        if self.doubt(part) is Doubt.SEVERAL:
            return True
        return self._of_option(part) is not None and self.rivals.has(part)

    def in_parts(self, part: Axis) -> bool:
        """Does another graph know as many tokens that are a part of a video in each sample, and this one nothing better?"""
        found = self.proved(part)
        better = found is not None and found.hint is None
        return self.doubt(part) is Doubt.PARTS and not better

    def doubt(self, part: Axis) -> Doubt | None:
        """Why its number of tokens, of which another graph of the call knows a grid, tells nothing here."""
        size = axis_size(part)
        return self.told.doubts.get(size) if isinstance(size, int) else None

    def _of_option(self, part: Axis) -> GridAxis | None:
        if self.declared is None or not same_size(axis_size(part), prod(self.declared)):
            return None
        factors = self._declared.setdefault(resolve(part), tuple(Atom(s) for s in self.declared))
        return GridAxis(part, factors, "option grid", "declared")

    def is_declared(self, part: Axis) -> bool:
        """Does the option say of these tokens that they are a grid, and nothing that it is another?"""
        grid = self.grid_of(part)
        return grid is not None and grid.contradicts is None and self._of_option(part) is not None

    def by_positions(self, part: Axis) -> GridAxis | None:
        factors = resolve(part)
        atoms = self.folded.grid_atoms(part)
        three = atoms is not None and len(atoms) == 3
        of_table = len(factors) in (2, 3) and any(resolve(p) == factors for p in self._positions)
        if not three and not of_table:
            return None
        return self._named(part, factors, POSITIONS if of_table else RESHAPE)

    def _spread_over(self, latents: list[list[Axis]], atoms: tuple[Atom, ...]) -> bool:
        """Does one latent have each of the atoms as the outermost factor of a dimension of its own?

        Two alone may be frames and positions in a frame: they are rows and columns if both are cut into patches.
        """
        for axes in latents:
            own = [axis for atom in atoms for axis in axes if axis[:1] == (atom,)]
            if len(own) == len(atoms) and (len(atoms) > 2 or all(len(axis) > 1 for axis in own)):
                return True
        return False
