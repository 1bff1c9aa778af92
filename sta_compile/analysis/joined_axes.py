"""The axis of values that are put one behind the other.

torch.cat([text, x], 1)                     ([text | t h w])
torch.cat([x[:, :n], f(x[:, n:])], 1)       (t h w) again, also where f took frames one by one
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from .axes import Atom, Axis, Concat, Size, axis_size, part_of, resolve, same_size, segments_of

Slice = tuple[Axis, Size, Size]  # an axis, and where a part of it starts and stops


def concat(parts: Sequence[Axis]) -> Axis:
    """The axis of a concatenation; neighbouring slices that together are a whole axis give that axis back."""
    if len(parts) == 1:
        return resolve(parts[0])
    kept = [part if part else (Atom(1),) for part in parts]
    pieces = [piece for part in kept for piece in _pieces(part)]
    joined: list[Axis] = []
    i = 0
    while i < len(pieces):
        whole, i = _whole_from(pieces, i)
        joined.append(whole)
    if len(joined) == len(pieces):
        joined = kept
    return resolve((Concat(tuple(joined)),)) if len(joined) > 1 else joined[0]


def _pieces(axis: Axis) -> Iterator[Axis]:
    """What a slice of a concatenation takes of each segment; the segments of any other axis."""
    sliced = axis[0].slice_of if len(axis) == 1 and isinstance(axis[0], Atom) else None
    segments = segments_of(axis if sliced is None else sliced[0])
    ends = [0, *itertools.accumulate(axis_size(segment) for segment in segments)]
    if sliced is None or not all(isinstance(size, int) for size in (*sliced[1:], *ends)):
        yield from segments_of(axis)
        return
    for begin, end, segment in zip(ends, ends[1:], segments, strict=False):
        start, stop = max(begin, sliced[1]), min(end, sliced[2])
        if start < stop:
            yield part_of(segment, start - begin, stop - begin) or (Atom(1),)


def _whole_from(parts: Sequence[Axis], i: int) -> tuple[Axis, int]:
    """The axis that is cut into the parts from the i-th on, and the number of the part after it; else the i-th part."""
    end: Size = 0
    whole: Axis | None = None
    for j in range(i, len(parts)):
        piece = _as_slice(parts[j])
        if piece is None or not same_size(piece[1], end):
            break
        if whole is not None and resolve(piece[0]) != resolve(whole):
            break
        whole, _, end = piece
        if same_size(end, axis_size(whole)):
            return whole, j + 1
    return parts[i], i + 1


def _as_slice(axis: Axis) -> Slice | None:
    """What of which axis it is: frames of t are that of [t h w] where rows and columns follow."""
    atom, *inner = axis or (None,)
    if not isinstance(atom, Atom) or atom.slice_of is None:
        return None
    whole, start, stop = atom.slice_of
    size = axis_size(tuple(inner))
    return (*whole, *inner), start * size, stop * size


def filled(axis: Axis, before: Size, after: Size) -> Axis | None:
    """The axis of which a slice is one, with as many positions before and after it as it was cut off; None for any other."""
    piece = _as_slice(resolve(axis))
    if piece is None or not same_size(before, piece[1]):
        return None
    whole, _, stop = piece
    return whole if same_size(stop + after, axis_size(whole)) else None
