"""Which dimensions does an operation pick or write by an index, and in which order do its numbers take the rows?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from .axes import Size, same_size, size_of
from .graph_view import argument, canonical_name, fake_value, is_tensor
from .known_integers import known_integers
from .mask_spans import at_most, position_of
from .orders import Named, Permutation, listed

# The same numbers for every channel or sample.
_SPREAD = (
    "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "repeat", "view", "reshape", "to", "long", "int",
    "contiguous", "clone", "type", "cuda", "cpu", "detach",
)  # fmt: skip


def index_order(index: Any) -> Permutation:
    """Of a tensor of numbers, or of a list of them; place i gets row index[i]."""
    if not isinstance(index, torch.fx.Node):
        return listed([int(number) % len(index) for number in index])
    base = _before_spreading(index)
    numbers = known_integers(base)
    if numbers is not None and all(isinstance(number, int) for number in numbers):
        return listed([number % len(numbers) for number in numbers])
    sorted_by = _sorted(base, rising=True)
    if sorted_by is not None and _sorted(_before_spreading(sorted_by)) is not None:
        return Named(_before_spreading(sorted_by), inverse=True)
    return Named(base)


def picked_index(index: Any) -> tuple[tuple[int, ...] | torch.fx.Node, Size | None] | None:
    """(the numbers of an index along one dimension, or the tensor that has them; how many, or None for a mask)."""
    if not is_tensor(index):
        plain = isinstance(index, (list, tuple)) and all(type(n) is int for n in index)
        return (tuple(index), len(index)) if plain else None
    base = _before_spreading(index)
    if fake_value(base).dim() != 1:
        return None
    if _is_mask(base):
        return base, None
    numbers, count = known_integers(base), size_of(fake_value(base).shape[0])
    known = tuple(n for n in numbers or () if isinstance(n, int))
    return (known if numbers is not None and len(known) == len(numbers) else base), count


def _before_spreading(index: torch.fx.Node) -> torch.fx.Node:
    while True:
        source = index.args[0] if index.args else None
        if not is_tensor(source):
            return index
        assert isinstance(source, torch.fx.Node)
        name = canonical_name(index)
        views = name == "getitem" and _takes_all(index.args[1])
        if not views and (name not in _SPREAD or not _keeps_rows(index, source)):
            return index
        index = source


def _takes_all(items: Any) -> bool:
    items = items if isinstance(items, tuple) else (items,)
    return all(item is None or item is Ellipsis or item == slice(None) for item in items)


def _keeps_rows(index: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Has a view the dimensions of its source, but for those of size one and copies?"""
    if canonical_name(index) not in ("view", "reshape", "repeat"):
        return True
    before, after = ([n for n in fake_value(v).shape if n != 1] for v in (source, index))
    return all(n in after for n in before) and (
        len(before) <= 1 or canonical_name(index) != "repeat"
    )


def _sorted(index: torch.fx.Node, *, rising: bool = False) -> torch.fx.Node | None:
    """What an index sorts, if it is all the places of something in another order: argsort(x), x.sort().indices.

    rising: only if the least comes first.
    """
    name, sort = canonical_name(index), index
    if name == "getitem" and isinstance(index.args[0], torch.fx.Node) and index.args[1] == 1:
        sort = index.args[0]
        name = canonical_name(sort)
    if name != ("argsort" if sort is index else "sort"):
        return None
    source = argument(sort, 0, "input")
    return None if rising and argument(sort, 2, "descending", False) else source


def numbers_from(index: Any) -> list[torch.fx.Node]:
    """The tensors that an index's numbers are in on their way, and what it sorts."""
    found = []
    while isinstance(index, torch.fx.Node):
        found += [index, _before_spreading(index)]
        index = _sorted(found[-1])
    return found


def index_of(node: torch.fx.Node, source: torch.fx.Node) -> Iterator[tuple[int, Any]]:
    """(dimension, item) of what an operation asks of a value: numbers, slices, lists, and tensors of numbers or a mask."""
    name = canonical_name(node)
    if name == "embedding":
        yield from ((0, n) for n in node.all_input_nodes if n is not source)
    elif name in ("getitem", "setitem"):
        given = node.args[1]
        yield from _by_dimension(given if isinstance(given, tuple) else (given,), source)
    elif name in ("index", "index_put"):
        given = argument(node, 1, "indices")
        yield from _by_dimension([slice(None) if i is None else i for i in given], source)
    else:
        along = name == "take_along_dim"
        dim = argument(node, 2 if along else 1, "dim")
        index = argument(node, 1 if along else 2, "indices" if along else "index")
        if isinstance(dim, int) and is_tensor(index):
            yield dim % fake_value(source).dim(), index


def numbers_of(node: torch.fx.Node, source: torch.fx.Node) -> Iterator[tuple[int, Any]]:
    """(dimension, index) of what an operation picks or writes by several numbers."""
    for dim, item in index_of(node, source):
        numbers = isinstance(item, (list, tuple)) and all(type(n) is int for n in item)
        if numbers or (is_tensor(item) and not _is_mask(item)):
            yield dim, item


def takes_all(item: Any, size: Size) -> bool:
    """Does an item of an index take all positions of a dimension, or as many?"""
    if isinstance(item, slice):
        start, stop = item.start, size if item.stop is None else position_of(item.stop, size)
        return start in (None, 0) and item.step in (None, 1) and at_most(size, stop)
    if isinstance(item, (list, tuple)):
        return same_size(len(item), size)
    if not is_tensor(item):
        return same_size(size, 1)
    if _is_mask(item):
        return False
    sizes = [size_of(n) for n in fake_value(item).shape]
    return any(same_size(n, size) for n in [*sizes, math.prod(sizes)])


def _by_dimension(items: Sequence[Any], source: torch.fx.Node) -> Iterator[tuple[int, Any]]:
    left_out = fake_value(source).dim() - sum(map(_width, items))
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += left_out
        elif item is not None:
            yield dim, item
            dim += _width(item)


def _width(item: Any) -> int:
    """How many dimensions an item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return int(fake_value(item).dim()) if is_tensor(item) and _is_mask(item) else 1


def _is_mask(item: torch.fx.Node) -> bool:
    return fake_value(item).dtype in (torch.bool, torch.uint8)
