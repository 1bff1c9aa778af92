"""The token axes of a graph's inputs, as other graphs of the call have told them (see `ir.known_tokens`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch.fx

from ..ir.attention_spec import Triple
from ..ir.known_tokens import OF_CALL, Doubt, Told
from .attention_site import Problem
from .axes import (
    Atom,
    Axis,
    Dims,
    axis_size,
    fresh,
    segments_of,
    set_apart,
    size_of,
)
from .graph_view import fake_value
from .hints import DECLARE
from .joined_axes import concat
from .moved_tokens import MOVED


@dataclass(frozen=True, eq=False)
class ToldAxes:
    """dims: of inputs. names: which factors are frames (0), rows (1) and columns (2). doubts: by the number of tokens.

    doubted: of the inputs themselves, whatever another input, such as a table of positions, tells of as many tokens.
    """

    dims: Mapping[torch.fx.Node, Dims] = field(default_factory=dict)
    names: Mapping[Atom, int] = field(default_factory=dict)
    doubts: Mapping[int, Doubt] = field(default_factory=dict)
    doubted: Mapping[torch.fx.Node, Doubt] = field(default_factory=dict)

    def grids(self) -> Iterator[Axis]:
        """Those of inputs."""
        for dims in self.dims.values():
            for axis in dims:
                yield from (p for p in segments_of(axis) if not self.names.keys().isdisjoint(p))


def told_axes(told: Mapping[torch.fx.Node, Told]) -> ToldAxes:
    """What is told of inputs, as axes. Numbers of tokens are those of the example inputs, and guarded by now."""
    dims: dict[torch.fx.Node, Dims] = {}
    names: dict[Atom, int] = {}
    doubts: dict[int, Doubt] = {}
    doubted: dict[torch.fx.Node, Doubt] = {}
    for node, known in told.items():
        sizes = [size_of(size) for size in fake_value(node).shape]
        axes: dict[int, Axis] = {}
        for dim, segments in known:
            if isinstance(segments, Doubt):
                doubts[int(sizes[dim])] = segments
                doubted.setdefault(node, segments)
            elif sum(tokens for tokens, _ in segments) == sizes[dim]:
                axes[dim] = concat([_axis_of(*segment, names) for segment in segments])
        if axes:
            dims[node] = tuple(axes.get(dim, fresh(size)) for dim, size in enumerate(sizes))
    return ToldAxes(dims, names, doubts, doubted)


def _axis_of(tokens: int, grid: Triple | None, names: dict[Atom, int]) -> Axis:
    if grid is None:
        return fresh(tokens)
    factors = tuple((Atom(n, origin=OF_CALL), name) for name, n in enumerate(grid) if n > 1)
    names.update(factors)
    axis = tuple(atom for atom, _ in factors)
    set_apart([(atom,) for atom in axis])
    assert axis_size(axis) == prod(grid)
    return axis


UNSEEN = Problem(
    "its tokens may have been moved by code that runs in Python between the graphs of this call",
    DECLARE,
)
# Of attentions whose tokens are in doubt, apart from several sequences of as many.
REASONS = {
    Doubt.MOVED: MOVED,
    Doubt.ORDER: Problem(
        "another graph of this call has the video's tokens in an order other than frames, rows, cols",
        "avoid the graph breaks between that and the blocks, or put tokens in that order in the model",
    ),
    Doubt.UNSEEN: UNSEEN,
    Doubt.UNSHOWN: UNSEEN,
    Doubt.UNWATCHED: UNSEEN,
}
