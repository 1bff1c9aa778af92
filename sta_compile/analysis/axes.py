"""What is a tensor axis made of? Terms for axes, and their unification.

An axis is an ordered product of factors; a factor is an atom (an axis that nothing has split yet) or a concatenation of
axes. A 3x4x5 latent that passes a patch embed, `flatten(2)` and a concatenation with 7 text tokens gives an axis of 67
elements written `([t3 h4 w5 | l7])`; slicing `[:, :60]` gives `(t3 h4 w5)` back, and a rope table of shape (60, d) that
multiplies it is bound to the same atoms. Sizes are ints, or sympy expressions where shapes are dynamic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import sympy
import torch

from .._sizes import simplified

Size: TypeAlias = int | sympy.Expr


def size_of(value: int | torch.SymInt) -> Size:
    """A dimension as an int or as a simplified sympy expression; adds no guard."""
    if isinstance(value, torch.SymInt):
        node = value.node
        constant = node.maybe_as_int()
        if constant is not None:
            return int(constant)
        expr: Size = simplified(node.expr, node.shape_env)
        return expr
    return int(value)


def same_size(a: Size, b: Size) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(sympy.expand(a - b) == 0)


_ids = itertools.count()


@dataclass(eq=False)
class Atom:
    """An axis of its own until something binds it to a product of others.

    origin: "" or how the atom was proved to be a grid axis ("conv3d patch embed", ...).
    slice_of: (axis, start, stop) when it is a part of another axis.
    apart: atoms that it is not, whatever their size: rows are no columns where a grid is square.
    """

    size: Size
    origin: str = ""
    slice_of: tuple[Axis, Size, Size] | None = None
    bound: Axis | None = None
    apart: Axis = ()
    index: int = field(default_factory=lambda: next(_ids))

    def __repr__(self) -> str:
        return f"a{self.index}:{self.size}"


@dataclass(frozen=True)
class Concat:
    """Parts one after the other along one axis."""

    parts: tuple[Axis, ...]


Factor: TypeAlias = Atom | Concat
Axis = tuple[Factor, ...]
Dims = tuple[Axis, ...]


def axis_size(axis: Axis) -> Size:
    total: Size = 1
    for factor in axis:
        total = total * factor_size(factor)
    return total


def factor_size(factor: Factor) -> Size:
    if isinstance(factor, Atom):
        return factor.size
    total: Size = 0
    for part in factor.parts:
        total = total + axis_size(part)
    return total


def fresh(size: Size, *, origin: str = "") -> Axis:
    """A new axis; an axis of size one has no factors."""
    if isinstance(size, int) and size == 1:
        return ()
    return (Atom(size, origin=origin),)


def resolve(axis: Axis) -> Axis:
    """The factors that an axis is known to be made of."""
    out: list[Factor] = []
    for factor in axis:
        if isinstance(factor, Concat):
            parts: list[Axis] = []
            for part in factor.parts:
                inner = resolve(part)
                if len(inner) == 1 and isinstance(inner[0], Concat):
                    parts.extend(inner[0].parts)
                elif axis_size(inner) != 0:
                    parts.append(inner)
            if len(parts) == 1:
                out.extend(parts[0])
            else:
                out.append(Concat(tuple(parts)))
        elif factor.bound is not None:
            factor.bound = _end_of_chain(factor.bound)
            out.extend(resolve(factor.bound))
        elif factor.slice_of is not None and (part := _whole_segments(*factor.slice_of)):
            factor.bound = part  # what it was sliced from is known by now to be a concatenation
            out.extend(resolve(part))
        else:
            out.append(factor)
    return tuple(out)


def _end_of_chain(axis: Axis) -> Axis:
    """Past atoms that only stand for another axis: 40 calls of a body bind 40 atoms one to the next."""
    while len(axis) == 1 and isinstance(axis[0], Atom):
        if axis[0].bound is None or axis[0].origin:
            break
        axis = axis[0].bound
    return axis


def segments_of(axis: Axis) -> tuple[Axis, ...]:
    """The parts of a concatenated axis; any other axis is one part."""
    axis = resolve(axis)
    return axis[0].parts if len(axis) == 1 and isinstance(axis[0], Concat) else (axis,)


def atoms_of(axis: Axis) -> Iterator[Atom]:
    """The atoms of an axis and of its parts."""
    for factor in axis:
        if isinstance(factor, Atom):
            yield factor
        else:
            for part in factor.parts:
                yield from atoms_of(part)


def _made_of(axis: Axis, atom: Atom) -> bool:
    """Is an atom in an axis, or in an axis that a part of it is a slice of?"""
    return any(
        a is atom or (a.slice_of is not None and _made_of(a.slice_of[0], atom))
        for a in atoms_of(resolve(axis))
    )


def set_apart(axes: Sequence[Axis], all_from: Axis = ()) -> None:
    """States that the atoms of these axes are different axes of one thing, and all are apart from further ones."""
    atoms = [atom for axis in axes for atom in atoms_of(axis)]
    for atom in atoms:
        atom.apart += (*all_from, *(other for other in atoms if other is not atom))


def _are_apart(a: Atom, b: Atom) -> bool:
    return any(x is b for x in atoms_of(resolve(a.apart))) or any(
        x is a for x in atoms_of(resolve(b.apart))
    )


def _bind(atom: Atom, axis: Axis) -> bool:
    axis = resolve(axis)
    if axis == (atom,):
        return True
    if any(_are_apart(atom, other) for other in atoms_of(axis)):
        return False
    for other in atoms_of(axis) if atom.apart else ():
        other.apart = tuple(dict.fromkeys((*other.apart, *resolve(atom.apart))))
    if len(axis) == 1 and isinstance(axis[0], Atom):
        other = axis[0]
        if atom.origin and not other.origin:  # keep the atom that is proved
            atom.apart, atom, other = other.apart, other, atom
        slices = [s for s in (other.slice_of, atom.slice_of) if s is not None]
        # A slice with the positions of what it was sliced from is shifted: it is no part of it any more.
        shifted = any(_made_of(whole, a) for whole, *_ in slices for a in (atom, other))
        other.slice_of = None if shifted or not slices else slices[0]
        atom.bound = (other,)
        return True
    if _made_of(axis, atom):  # swapped halves, put together, are not the whole
        return False
    atom.bound = axis
    return True


def equal_groups(a: Sequence[Size], b: Sequence[Size]) -> list[tuple[int, int, int, int]] | None:
    """Shortest pieces of two factorisations that have equal products: (a from, a to, b from, b to); None if totals differ.

    Example: [2, 3, 4] and [6, 4] -> [(0, 2, 0, 1), (2, 3, 1, 2)]
    """
    out = []
    i = j = 0
    while i < len(a) or j < len(b):
        products: list[tuple[Size, int]] = []
        product: Size = 1
        for stop in range(i, len(a)):
            product = product * a[stop]
            products.append((product, stop + 1))
        found = None
        product = 1
        for stop in range(j, len(b)):
            product = product * b[stop]
            hit = next((end for p, end in products if same_size(p, product)), None)
            if hit is not None:
                found = (hit, stop + 1)
                break
        if found is None:
            return None
        out.append((i, found[0], j, found[1]))
        i, j = found
    return out


def unify(a: Axis, b: Axis) -> bool:
    """State that two axes are the same one, position by position. False if their known structures can't be aligned."""
    a, b = resolve(a), resolve(b)
    if a == b:
        return True
    groups = equal_groups([factor_size(f) for f in a], [factor_size(f) for f in b])
    if groups is None:
        return False
    pairs = [(a[a0:a1], b[b0:b1]) for a0, a1, b0, b1 in groups]
    unlike = [pair for pair in pairs if pair[0] != pair[1]]
    if {f for left, _ in unlike for f in left} & {f for _, right in unlike for f in right}:
        return False  # [rows columns] are no [columns rows]
    ok = True
    for left, right in pairs:
        if len(left) == 1 and isinstance(left[0], Atom):
            ok &= _bind(left[0], right)
        elif len(right) == 1 and isinstance(right[0], Atom):
            ok &= _bind(right[0], left)
        elif len(left) == 1 and len(right) == 1:
            ok &= _unify_concat(left[0], right[0])
        else:
            ok &= left == right or _unify_copies(left, right) or _unify_copies(right, left)
    return ok


def _unify_copies(joined: Axis, product: Axis) -> bool:
    """[frames | frames of another video] and copies of a table of frames, which are (copies, frames)."""
    parts = joined[0].parts if len(joined) == 1 and isinstance(joined[0], Concat) else ()
    for k in range(1, len(product)):
        inner = product[k:]
        sizes = [axis_size(inner), *map(axis_size, parts)]
        if same_size(axis_size(product[:k]), len(parts)) and all(
            same_size(size, sizes[0]) for size in sizes
        ):
            return all(unify(part, inner) for part in parts)
    return False


def _unify_concat(a: Factor, b: Factor) -> bool:
    if not isinstance(a, Concat) or not isinstance(b, Concat):
        return False
    ends_a = list(itertools.accumulate(axis_size(p) for p in a.parts))
    ends_b = list(itertools.accumulate(axis_size(p) for p in b.parts))
    ok = True
    i = j = 0
    for stop_a, end in enumerate(ends_a, 1):
        stop_b = next((k + 1 for k in range(j, len(b.parts)) if same_size(ends_b[k], end)), None)
        if stop_b is None:
            continue
        left, right = a.parts[i:stop_a], b.parts[j:stop_b]
        one_left = left[0] if len(left) == 1 else (Concat(left),)
        one_right = right[0] if len(right) == 1 else (Concat(right),)
        if len(left) == 1 or len(right) == 1:
            ok &= unify(one_left, one_right)
        else:
            ok = False
        i, j = stop_a, stop_b
    return ok and i == len(a.parts)


def part_of(axis: Axis, start: Size, stop: Size) -> Axis:
    """The axis of a slice [start, stop): whole segments of a concatenation keep their identity, other slices are new."""
    axis = resolve(axis)
    total = axis_size(axis)
    if same_size(start, 0) and same_size(stop, total):
        return axis
    if part := _whole_segments(axis, start, stop):
        return part
    atom = Atom(stop - start, slice_of=(axis, start, stop))
    return () if isinstance(atom.size, int) and atom.size == 1 else (atom,)


def _whole_segments(axis: Axis, start: Size, stop: Size) -> Axis:
    """The segments of a concatenation from start to stop; () if there are none that begin and end there."""
    axis = resolve(axis)
    if len(axis) != 1 or not isinstance(axis[0], Concat):
        return ()
    ends: list[Size] = [0, *itertools.accumulate(axis_size(p) for p in axis[0].parts)]
    first = next((i for i, e in enumerate(ends) if same_size(e, start)), None)
    last = next((i for i, e in enumerate(ends) if same_size(e, stop)), None)
    if first is None or last is None or first >= last:
        return ()
    return resolve((Concat(axis[0].parts[first:last]),))
