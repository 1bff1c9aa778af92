"""Tokens that are picked by their numbers: a permutation by an index tensor, for example.

    y = x[:, index]          with x in tile order:          y = x[:, places[index]]

where `places` says at which place of tile order each token of the raster is. What is picked has the order of the index, so
the numbers are translated, and no token is moved for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx

from .axes import axis_size
from .graph_view import argument, canonical_name, fake_value, is_tensor
from .token_values import TokenValues
from .trace_index import one_row_index


@dataclass(frozen=True, eq=False)
class PickedRows:
    """An operation `reader` that picks tokens of `value`, which are at `offset` in an axis of `length`."""

    value: torch.fx.Node
    reader: torch.fx.Node
    offset: int
    length: int


def picked_rows(values: TokenValues, node: torch.fx.Node) -> PickedRows | None:
    """What an operation picks, if that is tokens of the grid along an axis of known length."""
    found = _source(node)
    if found is None:
        return None
    value, dim = found
    place, dims = values.place(value), values.trace.dims(value)
    if place is None or dims is None or not place.movable or place.span > 1:
        return None
    length, (offset, *others) = axis_size(dims[place.dim]), place.offsets
    known = isinstance(length, int) and isinstance(offset, int) and not others
    if not known or dim % len(dims) != place.dim or index_of(node) is value:
        return None
    return PickedRows(value, node, offset, length)


def _source(node: torch.fx.Node) -> tuple[torch.fx.Node, int] | None:
    name = canonical_name(node)
    value: Any = node.args[0] if node.args else argument(node, 0, "input")
    if not is_tensor(value):
        return None
    if name in ("index_select", "gather"):
        dim: Any = argument(node, 1, "dim")
        return (value, dim) if isinstance(dim, int) else None
    if name != "getitem" or index_of(node) is None:
        return None
    index: Any = node.args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    at = next(i for i, item in enumerate(items) if is_tensor(item))
    plain = one_row_index(items) and all(isinstance(item, slice) for item in items[:at])
    return (value, at) if plain else None


def index_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The tensor of row numbers."""
    if canonical_name(node) in ("index_select", "gather"):
        found: Any = argument(node, 2, "index")
        return found if is_tensor(found) else None
    index: Any = node.args[1]
    tensors = [
        item for item in (index if isinstance(index, tuple) else (index,)) if is_tensor(item)
    ]
    integers = [item for item in tensors if not fake_value(item).is_floating_point()]
    return integers[0] if len(tensors) == len(integers) == 1 else None
