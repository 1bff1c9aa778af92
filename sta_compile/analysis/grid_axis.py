"""A token axis that is a grid, and which of its factors are frames, rows and columns.

Tokens stand in the order (frames, rows, columns) in nearly every model. Where a model has another order, a convolution, the
latent or the positions that it makes say so:

    conv3d [b, c, t3, h4, w5] -> permute(0, 3, 4, 2, 1).flatten(1, 3)       (h4 w5 t3): order (1, 2, 0)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ..ir.attention_spec import Triple
from .axes import Axis, Size, factor_size
from .folded_axes import FoldedAxes
from .graph_view import canonical_name
from .hints import Hint
from .trace_dims import DimTrace

T = TypeVar("T")
NAMES = ("frames", "rows", "cols")
IN_ORDER: Triple = (0, 1, 2)


@dataclass(frozen=True, eq=False)
class GridAxis:
    """A token axis that is a grid, and its factors, outermost first.

    ones: which of frames (0), rows (1) and columns (2) have one position and so no factor; (0,) is an image.
    order: which of the three each factor is, those of one position among them; named: whether anything says so. Else the
        order of the tokens stands for it.
    """

    axis: Axis
    factors: Axis
    evidence: str
    kind: Literal["proved", "declared", "hinted"] = "proved"
    hint: Hint | None = None
    contradicts: Triple | None = None  # a declared grid of as many tokens
    ones: tuple[int, ...] = (0,)
    order: Triple = IN_ORDER
    named: bool = True

    @property
    def basis(self) -> str:
        """How the grid is known, for the report."""
        text = f"{self.kind} by {self.evidence}"
        if self.contradicts is not None:
            text += f", so {self.contradicts} of option grid is not used"
        return text

    @property
    def order_text(self) -> str:
        """What a reader has to know of the order of the tokens; "" where it is frames, rows, cols."""
        if not self.named:
            return "frames, rows and cols are named by the order of the tokens"
        if self.order == IN_ORDER:
            return ""
        return f"tokens in the order {', '.join(NAMES[axis] for axis in self.order)}"

    @property
    def shape(self) -> tuple[Size, Size, Size]:
        """The lengths of the axes as the tokens stand, outermost first."""
        a, b, c = self.in_place([factor_size(f) for f in self.factors])
        return a, b, c

    def in_place(self, numbers: Sequence[Any]) -> list[Any]:
        """One number per factor -> one per axis, outermost first."""
        rest = iter(numbers)
        alone = self.ones if len(numbers) < 3 else ()
        return [1 if axis in alone else next(rest) for axis in self.order]


def by_name(order: Triple, values: tuple[T, T, T]) -> tuple[T, T, T]:
    """Values as the tokens stand -> (frames, rows, cols)."""
    t, h, w = (values[order.index(axis)] for axis in range(3))
    return t, h, w


def as_they_stand(order: Triple, values: tuple[T, T, T]) -> tuple[T, T, T]:
    """(frames, rows, cols) -> values in the order of the tokens, outermost first."""
    a, b, c = (values[axis] for axis in order)
    return a, b, c


class AxisNames:
    """Which factors of a graph's grids are frames, rows and columns.

    latents: axes of the graph's inputs and outputs; positions: products of axes that positions are made for; told: factors
    that another graph of the call has named.
    """

    def __init__(
        self,
        trace: DimTrace,
        folded: FoldedAxes,
        latents: Sequence[Sequence[Axis]],
        positions: Sequence[Axis],
        told: Mapping[Any, int],
    ) -> None:
        self._embedded = [
            [folded.of(axis) for axis in (trace.dims(node) or ())[2:]]
            for node in trace.view.nodes
            if canonical_name(node) in ("conv2d", "conv3d")
        ]
        self._latents, self._positions = latents, positions
        self._told = {folded.of((atom,))[0]: name for atom, name in told.items()}

    def order_of(self, factors: Axis) -> tuple[Triple, tuple[int, ...]] | None:
        """Order and ones of a grid's factors; None where nothing says which is which."""
        for named in self._named(factors):
            names = [named.get(factor) for factor in factors]
            if None in names and len(factors) == 3 and names.count(None) == 1:  # conv2d of frames
                names[names.index(None)] = next(axis for axis in range(3) if axis not in names)
            found = [name for name in names if name is not None]
            if len(found) == len(factors) and len(set(found)) == len(found):
                ones = tuple(axis for axis in range(3) if axis not in found)
                for axis in ones:
                    found.insert(axis, axis)
                a, b, c = found
                return (a, b, c), ones
        return None

    def _named(self, factors: Axis) -> Iterator[dict[Any, int]]:
        """What each kind of evidence says, the best first: factor -> frames (0), rows (1) or columns (2)."""
        yield self._told
        for axes in self._embedded:
            first = 3 - len(axes)  # a convolution over images has rows and columns
            yield {axis[0]: first + i for i, axis in enumerate(axes) if len(axis) == 1}
        for latent in self._latents:
            own = [axis[0] for axis in latent if axis and axis[0] in factors]
            if len(own) == len(factors):
                yield _counted(own)
        for axis in self._positions:
            if len(axis) == len(factors) and set(axis) == set(factors):
                yield _counted(axis)


def _counted(factors: Sequence[Any]) -> dict[Any, int]:
    """Three are frames, rows and columns in this order, two are rows and columns."""
    return {factor: 3 - len(factors) + i for i, factor in enumerate(factors)}
