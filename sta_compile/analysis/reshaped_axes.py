"""Axes after a reshape.

[3, 4 x 5] as [3, 4, 5]            an atom of 20 is cut into two
[b, frames 1 to 3 of t, h, w]      of `y[:, n:].reshape(b * (t - 1), n, c)` with n = h w: a slice of [t h w] is cut
                                   axis has factors
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from .._sizes import whole_quotient
from .axes import (
    Atom,
    Axis,
    Dims,
    Factor,
    Size,
    axis_size,
    equal_groups,
    factor_size,
    fresh,
    part_of,
    resolve,
    same_size,
    set_apart,
)


def regroup(dims: Sequence[Axis], sizes: Sequence[Size]) -> Dims:
    """Axes after a reshape, which keeps row-major order: factors are merged, and atoms are split where they must be."""
    factors = [f for axis in dims for f in resolve(axis)]
    targets = [(i, s) for i, s in enumerate(sizes) if not (isinstance(s, int) and s == 1)]
    out: list[Axis] = [() for _ in sizes]
    if any(isinstance(s, int) and s == 0 for s in sizes):
        return tuple(fresh(s) for s in sizes)
    groups = equal_groups([factor_size(f) for f in factors], [s for _, s in targets])
    if groups is None:
        return tuple(fresh(s) for s in sizes)
    for f0, f1, t0, t1 in groups:
        pieces = _split(factors[f0:f1], [s for _, s in targets[t0:t1]])
        for (i, _), piece in zip(targets[t0:t1], pieces, strict=True):
            out[i] = piece
    return tuple(out)


def _split(factors: Sequence[Factor], sizes: Sequence[Size]) -> list[Axis]:
    """Factors of equal total product dealt out to axes of the given sizes; atoms are split as needed."""
    if len(sizes) == 1:
        return [tuple(factors)]
    if len(factors) == 1 and isinstance(factors[0], Atom):
        return _split_atom(factors[0], sizes)
    out: list[Axis] = []
    queue = list(factors)
    for size in sizes:
        taken: list[Factor] = []
        left = size
        while not (isinstance(left, int) and left == 1):
            if not queue:
                return [fresh(s) for s in sizes]
            head = queue[0]
            have = factor_size(head)
            if not isinstance(head, Atom):
                return [fresh(s) for s in sizes]
            if (times := whole_quotient(left, have)) is not None:
                taken.append(queue.pop(0))
                left = times
            elif (times := whole_quotient(have, left)) is not None:
                first, rest = _split_atom(head, [left, times])
                taken += first
                queue[0:1] = list(rest)
                left = 1
            else:
                return [fresh(s) for s in sizes]
        out.append(tuple(taken))
    return out


def _split_atom(atom: Atom, sizes: Sequence[Size]) -> list[Axis]:
    parts = _split_slice(atom, sizes)
    if not parts:
        parts = [fresh(s) for s in sizes]
        set_apart(parts, atom.apart)
    atom.bound = tuple(f for part in parts for f in part)
    return parts


def _split_slice(atom: Atom, sizes: Sequence[Size]) -> list[Axis]:
    """A slice of [t h w] that is frames of it as [frames, h w]; [] where it begins or ends within one, or is no slice."""
    whole, start, stop = atom.slice_of or ((), 0, 0)
    factors = resolve(whole)
    for n, k in product(range(1, len(sizes)), range(1, len(factors))):
        inner = factors[k:]
        size = axis_size(inner)
        if not same_size(size, _product(sizes[n:])):
            continue
        first, last = whole_quotient(start, size), whole_quotient(stop, size)
        if first is not None and last is not None:
            outer = part_of(factors[:k], first, last)
            set_apart([outer], (*atom.apart, *inner))
            return [*regroup((outer,), sizes[:n]), *regroup((inner,), sizes[n:])]
    return []


def _product(sizes: Sequence[Size]) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return total
