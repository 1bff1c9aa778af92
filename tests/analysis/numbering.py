"""A brute-force twin of axis provenance: every element gets its multi-index over the atoms that its axes claim.

An element of a (2, 12) tensor whose axes are b2 and (h3 w4), at [1, 7], is `{b: 1, h: 1, w: 3}`. Moving elements around
(view, permute, cat, slice) must move their multi-indices with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import prod

from torch import Tensor

from sta_compile.analysis.axes import Atom, Axis, Concat, Dims, axis_size, resolve

MultiIndex = Counter[tuple[Atom, int]]  # a tensor may have the same atom on two axes


def index_on(axis: Axis, position: int) -> MultiIndex:
    """What an axis claims of one position: the outermost factor comes first."""
    found: MultiIndex = Counter()
    factors = resolve(axis)
    sizes = [axis_size((factor,)) for factor in factors]
    assert all(isinstance(size, int) for size in sizes)
    for i, factor in enumerate(factors):
        inner = prod(sizes[i + 1 :])  # type: ignore[arg-type]
        own = position // inner % sizes[i]
        found += _index_on_factor(factor, own)
    return found


def _index_on_factor(factor: Atom | Concat, position: int) -> MultiIndex:
    if isinstance(factor, Concat):
        for part in factor.parts:
            size = axis_size(part)
            if position < size:
                return index_on(part, position)
            position -= size
        raise AssertionError("a position beyond the last part")
    if factor.size == 1:
        return Counter()
    if factor.slice_of is not None:
        axis, start, _ = factor.slice_of
        assert isinstance(start, int)
        return index_on(axis, start + position)
    return Counter({(factor, position): 1})


def multi_indices(dims: Dims) -> Iterator[MultiIndex]:
    """Of all elements of a tensor with these axes, in row-major order."""
    axes = [[index_on(axis, i) for i in range(int(axis_size(axis)))] for axis in dims]
    for indices in product(*axes):
        total: MultiIndex = Counter()
        for index in indices:
            total += index
        yield total


def assert_moved(sources: dict[int, MultiIndex], ids: Tensor, dims: Dims) -> None:
    """The elements `ids`, whose multi-indices where they came from are `sources`, are where `dims` says.

    An atom that their origin doesn't have is a new axis, of which nothing is claimed.
    """
    assert tuple(axis_size(resolve(axis)) for axis in dims) == tuple(ids.shape)
    for identity, claimed in zip(ids.flatten().tolist(), multi_indices(dims), strict=True):
        origin = sources[identity]
        atoms = {atom for atom, _ in origin}
        shared = Counter({key: n for key, n in claimed.items() if key[0] in atoms})
        assert shared <= origin, f"element {identity}: {claimed} was {origin}"
