"""Which part of a sequence is the video, where several are grids? The others are references or history."""

from __future__ import annotations

from collections.abc import Sequence

from .axes import Axis, atoms_of, axis_size, resolve, same_size
from .grid_proofs import GridProofs
from .segments import same_axis, start_of
from .token_parts import TokenParts


class MainPart:
    """Answers for the sequences of one graph."""

    def __init__(self, parts: TokenParts, grids: GridProofs) -> None:
        self._parts, self._grids = parts, grids
        output = next(iter(reversed(parts.trace.view.gm.graph.nodes)))
        self._returned = {a for node in output.all_input_nodes for a in parts.trace.atoms(node)}

    def of(self, axis: Axis, parts: Sequence[Axis], grids: list[int]) -> int:
        """The grid of a sequence that is the video: the one that the graph returns, then the largest, then the first.

        The others are references or history: tokens that every query sees.
        """
        returned = [g for g in grids if self._returned & set(atoms_of(resolve(parts[g])))]
        grids = returned or grids
        sizes = {g: axis_size(parts[g]) for g in grids}
        known = [g for g, size in sizes.items() if isinstance(size, int)]
        largest = max(known, key=lambda g: (sizes[g], -g)) if len(known) > 1 else grids[0]
        alike = [g for g in grids if same_axis(parts[g], parts[largest])]
        starts = [start_of(parts, g) for g in alike]
        kept = self._parts.last_kept(axis, starts) if len(alike) > 1 else None
        return largest if kept is None else alike[kept]

    def has_equals(self, axis: Axis, parts: Sequence[Axis], main: int) -> bool:
        """Have other parts of a sequence from another graph a grid of as many tokens, any of which the model may return?"""
        told = set(self._grids.told.names)
        equals = [
            i
            for i, part in enumerate(parts)
            if same_size(axis_size(part), axis_size(parts[main]))
            and not told.isdisjoint(atoms_of(resolve(part)))
        ]
        returned = [i for i in equals if self._returned & set(atoms_of(resolve(parts[i])))]
        starts = [start_of(parts, i) for i in equals]
        return (
            len(equals) > 1 and len(returned) != 1 and self._parts.last_kept(axis, starts) is None
        )
