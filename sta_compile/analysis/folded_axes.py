"""Axes with what is proved to be one axis of a grid as one factor, whatever that is made of.

Frames may be joined before a patch embed of single frames, repeated, or cut up later by a view:

    cat([condition t2, noise t3]) -> conv3d, k = 1 in time -> tokens [([t2|t3] h w)]: folded, (t5 h w) of t5 proved
"""

from __future__ import annotations

from collections.abc import Iterable

from .axes import Atom, Axis, resolve
from .trace_dims import DimTrace


class FoldedAxes:
    """Folds the axes of one graph."""

    def __init__(self, trace: DimTrace) -> None:
        self._wholes: dict[Axis, Atom] = {}
        for traced in trace.values.values():
            for dims in traced if isinstance(traced, list) else [traced]:
                for factor in (f for axis in dims or () for f in axis):
                    made = isinstance(factor, Atom) and factor.origin and factor.bound is not None
                    if made and resolve((factor,)) != (factor,):
                        self._wholes[resolve((factor,))] = factor  # type: ignore[assignment]

    @property
    def wholes(self) -> Iterable[Axis]:
        """What the proved axes are made of."""
        return self._wholes.keys()

    def of(self, axis: Axis) -> Axis:
        """The factors of an axis, with those that together are one proved grid axis as that axis."""
        left, out = list(resolve(axis)), []
        while left:
            lengths = range(len(left), 0, -1)
            n = next((n for n in lengths if tuple(left[:n]) in self._wholes), 0)
            out.append(self._wholes[tuple(left[:n])] if n else left[0])
            del left[: n or 1]
        return tuple(out)

    def grid_atoms(self, part: Axis) -> tuple[Atom, ...] | None:
        """The two or three factors that a token axis may have to be a grid."""
        factors = self.of(part)
        atoms = tuple(f for f in factors if isinstance(f, Atom))
        return atoms if len(atoms) == len(factors) and len(factors) in (2, 3) else None
