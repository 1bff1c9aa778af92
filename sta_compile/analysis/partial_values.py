"""Values that are the same along some axes of a grid, and what gives each token its own: a scale per frame, for example.

    x.view(b, t, h * w, d) * scale[b, t, 1, d]          broadcast inside of a pointwise operation
    scale[b, t, d].repeat_interleave(h * w, 1)          or by itself: expand, repeat, repeat_interleave

Such a value has no order of tokens to convert. In tile order its rows are picked by a number for each token, its frame here,
and these numbers are what is put into tile order: one list for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.fx

from .axes import Dims, Size, axis_size, same_size
from .graph_view import canonical_name, is_inplace, is_pointwise, is_tensor
from .token_values import BROADCAST, TokenValues
from .trace_dims import DimTrace

# Of each axis of the tokens, from the outermost: has the value rows of its own along it, and the axis's size.
Pattern = tuple[tuple[bool, Size], ...]

_COPYING = ("repeat", "tile", "repeat_interleave")


@dataclass(frozen=True, eq=False)
class Spread:
    """A partial value and an operation that spreads it over the tokens.

    dims: the first and the last dimension of `value` that belong to the tokens. run: sizes of these dimensions once each
    token has its own row. lead: size of what the first one holds ahead of the tokens (samples, in
    [samples * frames, rows * cols, width]); 1 if nothing.
    """

    value: torch.fx.Node
    reader: torch.fx.Node
    dims: tuple[int, int]
    pattern: Pattern
    run: tuple[Size, ...]
    lead: Size = 1

    @property
    def copies(self) -> bool:
        """Does the reader copy rows, so that it has nothing more to do once each token has its own?"""
        return canonical_name(self.reader) in _COPYING


def spreads(values: TokenValues, node: torch.fx.Node) -> list[Spread]:
    """The partial values that an operation spreads over the tokens of a grid; none if that can't be written by rows."""
    trace, name = values.trace, canonical_name(node)
    place, dims = values.place(node), trace.dims(node)
    if place is None or dims is None or not place.movable or place.offsets != (0,):
        return []
    partial = [n for n in node.all_input_nodes if is_tensor(n) and values.scattered(n)]
    if not partial or (is_inplace(node) and node.args[0] in partial):
        return []
    if name not in BROADCAST and not is_pointwise(name):
        return []
    run = range(place.dim, place.dim + place.span)
    if place.span == 1 and dims[place.dim] != values.grid:  # text stands beside it
        return []
    find = _copied if name in _COPYING else _broadcast
    found = [find(trace, node, value, dims, run, values) for value in partial]
    return [] if None in found else [spread for spread in found if spread is not None]


def _broadcast(
    trace: DimTrace,
    node: torch.fx.Node,
    value: torch.fx.Node,
    dims: Dims,
    run: range,
    values: TokenValues,
) -> Spread | None:
    """Axes are aligned from the right; along each axis of the tokens the value has all of it or size one."""
    mine = trace.dims(value) or ()
    shift = len(dims) - len(mine)
    if any(values.touches(axis) for d, axis in enumerate(mine, shift) if d not in run):
        return None
    own = [d for d in run if d >= shift and mine[d - shift]]
    if any(mine[d - shift] != dims[d] for d in own):
        return None
    lead = values.lead(dims[run[0]])
    if lead != 1 and run[0] not in own:
        return None
    pattern = tuple((d in own, size) for d, size in zip(run, _sizes(dims, run, lead), strict=True))
    first = max(run[0] - shift, 0)
    sizes = tuple(size for _, size in pattern)
    return Spread(value, node, (first, run[-1] - shift), pattern, sizes, lead)


def _sizes(dims: Dims, run: range, lead: Size) -> Iterator[Size]:
    for d in run:
        size = axis_size(dims[d])
        yield size if d > run[0] or lead == 1 else size // lead


def _copied(
    trace: DimTrace,
    node: torch.fx.Node,
    value: torch.fx.Node,
    dims: Dims,
    run: range,
    values: TokenValues,
) -> Spread | None:
    """Copies of all rows one after the other (repeat), or of each row in its place (repeat_interleave)."""
    mine = trace.dims(value) or ()
    if len(mine) != len(dims) or values.lead(dims[run[0]]) != 1:
        return None
    pattern: list[tuple[bool, Size]] = []
    for d, (axis, other) in enumerate(zip(dims, mine, strict=True)):
        whole, own = axis_size(axis), axis_size(other)
        copied = not same_size(whole, own)
        if d not in run and (copied or values.touches(other)):
            return None
        if d in run and copied and other:
            both = [(False, whole // own), (True, own)]
            pattern += reversed(both) if canonical_name(node) == "repeat_interleave" else both
        elif d in run:
            pattern.append((bool(other), whole))
    sizes = tuple(axis_size(dims[d]) for d in run)
    return Spread(value, node, (run[0], run[-1]), tuple(pattern), sizes)
