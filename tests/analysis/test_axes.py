"""Axes of moved tensors against a numbering of their elements, and the terms of single operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sta_compile.analysis.axes import (
    Atom,
    Axis,
    Concat,
    Dims,
    atoms_of,
    axis_size,
    fresh,
    part_of,
    resolve,
    same_size,
    segments_of,
    unify,
)
from sta_compile.analysis.joined_axes import concat, filled
from sta_compile.analysis.reshaped_axes import regroup
from tests.analysis.numbering import assert_moved, index_on, multi_indices


@dataclass
class Value:
    ids: Tensor  # which element of which input
    dims: Dims
    invented: set[Atom] = field(default_factory=set)  # atoms that what it was moved from has not


class Program:
    """Random operations that move elements, applied to numbered tensors and to their axes."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.inputs: list[Value] = []
        self.values: list[Value] = []
        self.tied: list[tuple[Value, Value]] = []
        self.elements = 0

    def input(self, shape: tuple[int, ...]) -> None:
        ids = torch.arange(prod(shape)).view(shape) + self.elements
        self.elements += ids.numel()
        self.inputs.append(Value(ids, tuple(fresh(size) for size in shape)))
        self.values.append(self.inputs[-1])

    def pick(self) -> Value:
        return self.draw(st.sampled_from(self.values))

    def add(self, ids: Tensor, dims: Dims, *sources: Value) -> None:
        known = {atom for source in sources for atom in atoms_in(source.dims)}
        invented = {atom for source in sources for atom in source.invented}
        dims = tuple(resolve(axis) for axis in dims)
        self.values.append(Value(ids, dims, invented | (atoms_in(dims) - known)))

    def reshape(self) -> None:
        value = self.pick()
        shape, left = [], value.ids.numel()
        while len(shape) < 4 and left > 1:
            size = self.draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
            shape.append(size)
            left //= size
        shape.append(left)
        self.add(value.ids.reshape(shape), regroup(value.dims, shape), value)

    def permute(self) -> None:
        value = self.pick()
        order = self.draw(st.permutations(range(value.ids.dim())))
        self.add(value.ids.permute(order), tuple(value.dims[i] for i in order), value)

    def slice(self) -> None:
        value = self.pick()
        dim = self.draw(st.integers(0, value.ids.dim() - 1))
        ends = st.integers(0, value.ids.shape[dim])
        start, stop = sorted((self.draw(ends), self.draw(ends)))
        if start == stop:
            return
        dims = list(value.dims)
        dims[dim] = part_of(dims[dim], start, stop)
        self.add(value.ids.narrow(dim, start, stop - start), tuple(dims), value)

    def cat(self) -> None:
        first = self.pick()
        dim = self.draw(st.integers(0, first.ids.dim() - 1))

        def fits(other: Value) -> bool:
            a, b = list(first.ids.shape), list(other.ids.shape)
            return a[:dim] + a[dim + 1 :] == b[:dim] + b[dim + 1 :] and len(a) == len(b)

        second = self.draw(st.sampled_from([v for v in self.values if fits(v)]))
        dims = list(first.dims)
        for i in range(len(dims)):
            if i == dim:
                dims[i] = concat([resolve(first.dims[i]), resolve(second.dims[i])])
            elif not self.unify(first.dims[i], second.dims[i]):
                return
        if first.ids.numel() + second.ids.numel() <= 400:
            self.add(torch.cat([first.ids, second.ids], dim), tuple(dims), first, second)

    def unify(self, a: Axis, b: Axis) -> bool:
        """Only of axes that have nothing in common: what is added to its own neighbour has two places."""
        separate = not whole_atoms(a) & whole_atoms(b)
        return resolve(a) == resolve(b) or (separate and unify(a, b))

    def tie(self) -> None:
        """A pointwise operation of two values."""
        first = self.pick()
        second = self.draw(
            st.sampled_from([v for v in self.values if v.ids.shape == first.ids.shape])
        )
        aligned = [self.unify(a, b) for a, b in zip(first.dims, second.dims, strict=True)]
        if all(aligned):
            self.tied.append((first, second))


def atoms_in(dims: Dims) -> set[Atom]:
    return {atom for axis in dims for atom in atoms_of(resolve(axis))}


def whole_atoms(axis: Axis) -> set[Atom]:
    """Atoms that are no slices, of an axis and of those that it was sliced from."""
    found: set[Atom] = set()
    for atom in atoms_of(resolve(axis)):
        found |= {atom} if atom.slice_of is None else whole_atoms(atom.slice_of[0])
    return found


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program(draw)
    sizes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=3)
    for _ in range(draw(st.integers(1, 3))):
        program.input(tuple(draw(sizes)))
    steps = [program.reshape, program.permute, program.slice, program.cat, program.tie]
    for step in draw(st.lists(st.sampled_from(steps), min_size=1, max_size=8)):
        step()
    return program


@settings(max_examples=100, deadline=None)
@given(programs())
def test_moved_elements_are_where_the_axes_say(program: Program) -> None:
    sources = {}
    for value in program.inputs:
        pairs = zip(value.ids.flatten().tolist(), multi_indices(value.dims), strict=True)
        sources.update(pairs)
    given = {atom for value in program.inputs for atom in atoms_in(value.dims)}
    for value in program.values:
        if not given & atoms_in(tuple((atom,) for atom in value.invented)):
            assert_moved(sources, value.ids, value.dims)
    for first, second in program.tied:
        assert list(multi_indices(first.dims)) == list(multi_indices(second.dims))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.data())
def test_views_that_keep_or_merge_axes_lose_nothing(sizes: list[int], data: st.DataObject) -> None:
    """A permuted tensor, some of whose neighbouring axes are merged, and split again."""
    order = data.draw(st.permutations(range(len(sizes))))
    cuts = data.draw(st.sets(st.integers(1, len(sizes))).map(sorted))
    bounds = [0, *(c for c in cuts if c < len(sizes)), len(sizes)]
    dims = tuple(fresh(sizes[i]) for i in order)
    merged = [prod(sizes[i] for i in order[start:stop]) for start, stop in pairwise(bounds)]
    flat = regroup(dims, merged)
    assert list(multi_indices(flat)) == list(multi_indices(dims))
    assert regroup(flat, [sizes[i] for i in order]) == tuple(resolve(axis) for axis in dims)


def test_a_video_beside_text() -> None:
    """The example of the module: a 3x4x5 grid, flattened, beside 7 text tokens, and sliced off again."""
    t, h, w, text = fresh(3), fresh(4), fresh(5), fresh(7)
    (tokens,) = regroup((t, h, w), (60,))
    joint = concat([tokens, text])
    assert axis_size(joint) == 67
    assert segments_of(joint) == (tokens, text)
    assert part_of(joint, 0, 60) == (*t, *h, *w)
    assert part_of(joint, 60, 67) == text
    table = fresh(60)
    assert unify(part_of(joint, 0, 60), table)
    assert resolve(table) == (*t, *h, *w)


def test_an_axis_is_split_where_it_must_be() -> None:
    heads_and_channels = fresh(24)
    heads, channels = regroup((heads_and_channels,), (3, 8))
    assert resolve(heads_and_channels) == (*heads, *channels)
    rows, cols = fresh(4), fresh(6)
    pairs, halves, rest = regroup((rows, cols), (4, 2, 3))
    assert pairs == rows
    assert resolve(cols) == (*halves, *rest)


def test_a_view_across_axes_claims_nothing() -> None:
    rows, cols = fresh(4), fresh(6)
    three, eight = regroup((rows, cols), (3, 8))
    assert not {*three, *eight} & {*resolve(rows), *resolve(cols)}
    assert resolve(rows) == rows


def test_a_view_across_a_concatenation_claims_nothing() -> None:
    joint = concat([fresh(4), fresh(2)])
    three, two = regroup((joint,), (3, 2))
    assert (axis_size(three), axis_size(two)) == (3, 2)
    assert segments_of(joint) == joint[0].parts  # type: ignore[union-attr]


def test_axes_of_other_structure_are_not_unified() -> None:
    a, b = regroup((fresh(2), fresh(3)), (6,))[0], regroup((fresh(3), fresh(2)), (6,))[0]
    assert not unify(a, b)
    joint, other = concat([fresh(2), fresh(4)]), concat([fresh(3), fresh(3)])
    assert not unify(joint, other)
    assert not unify(fresh(5), fresh(6))


def test_unified_concatenations_have_the_same_parts() -> None:
    video, text = fresh(60), fresh(7)
    first, second = concat([video, text]), concat([fresh(60), fresh(3), fresh(4)])
    assert unify(first, second)
    assert resolve(first) == resolve(second)
    assert [axis_size(part) for part in segments_of(first)] == [60, 3, 4]
    assert resolve(text) == (Concat(segments_of(second)[1:]),)


def test_an_axis_is_not_unified_with_a_part_of_itself() -> None:
    axis = fresh(6)
    (whole,) = axis
    assert isinstance(whole, Atom)
    assert not unify(axis, (Atom(1), whole))
    assert resolve(axis) == axis


def test_rows_are_no_columns_where_a_grid_is_square() -> None:
    rows, cols, table = fresh(6), fresh(6), fresh(36)
    assert unify(table, (*rows, *cols))
    assert not unify(table, (*cols, *rows))
    assert not unify((*rows, *cols), (*cols, *rows))
    assert resolve(table) == (*rows, *cols)


def test_parts_of_an_axis_are_apart_whatever_stands_for_them() -> None:
    first, second = regroup((fresh(36),), (6, 6))
    other, twin = fresh(6), fresh(6)
    assert not unify(first, second)
    assert unify(other, first)
    assert unify(twin, second)
    assert not unify(other, twin)
    outer, _ = regroup((first,), (2, 3))
    assert not unify(outer, regroup((twin,), (2, 3))[0])


def test_pieces_that_are_put_back_are_the_whole() -> None:
    axis = fresh(12)
    pieces = [part_of(axis, start, stop) for start, stop in ((0, 5), (5, 6), (6, 12))]
    assert [axis_size(piece) for piece in pieces] == [5, 1, 6]
    assert concat([part_of(axis, 0, 5), part_of(axis, 5, 12)]) == axis
    assert concat([part_of(axis, 5, 12), part_of(axis, 0, 5)]) != axis
    assert concat([part_of(axis, 0, 5), part_of(axis, 6, 12)]) != axis


def test_copies_of_a_table_beside_two_videos() -> None:
    first, second, rows, table, copies = map(fresh, (4, 4, 3, 4, 2))
    videos = (*concat([first, second]), *rows)
    assert unify(videos, (*copies, *table, *fresh(3)))
    assert resolve(first) == resolve(second) == resolve(table)
    assert not unify(concat([fresh(4), fresh(6)]), (*fresh(2), *fresh(5)))


def test_slices_of_frames_are_frames() -> None:
    grid = t, h, w = fresh(4), fresh(3), fresh(5)
    video = tuple(factor for axis in grid for factor in axis)
    first, others = part_of(video, 0, 15), part_of(video, 15, 60)
    batch, tokens = regroup((fresh(2), others), (6, 15))
    assert resolve(tokens) == (*h, *w)
    back = regroup((batch, tokens), (2, 45))[1]
    assert concat([first, back]) == video
    assert filled(back, 15, 0) == video
    assert filled(back, 0, 15) is None
    assert concat([back, first]) != video
    (frames,) = resolve(batch)[1:]
    assert index_on((frames,), 0)[t[0], 1] == 1  # type: ignore[index]
    across = part_of(video, 20, 50)
    assert resolve(regroup((across,), (2, 15))[1]) != (*h, *w)


def test_pieces_in_another_order_are_another_axis() -> None:
    axis = fresh(12)
    swapped = concat([part_of(axis, 6, 12), part_of(axis, 0, 6)])
    assert not unify(axis, swapped)
    assert segments_of(axis) == (axis,)
    shifted = part_of(concat([fresh(1), axis]), 0, 12)
    assert unify(axis, shifted)
    assert resolve(axis)[0].slice_of is None  # type: ignore[union-attr]


def test_a_piece_of_a_piece_knows_where_it_was() -> None:
    axis = fresh(12)
    (inner,) = part_of(part_of(axis, 2, 10), 3, 7)
    (whole,) = axis
    assert index_on((inner,), 1)[whole, 6] == 1


@pytest.mark.parametrize("proved_first", [True, False])
def test_the_proved_atom_of_two_is_kept(proved_first: bool) -> None:
    proved, plain = fresh(8, origin="conv2d patch embed"), fresh(8)
    assert unify(*((proved, plain) if proved_first else (plain, proved)))
    assert resolve(plain) == resolve(proved) == proved


def test_sizes_may_be_expressions() -> None:
    t, h, w = sympy.symbols("t h w", integer=True, positive=True)
    dims = (fresh(2), fresh(t), fresh(h), fresh(w))
    batch, tokens = regroup(dims, (2, t * h * w))
    assert (batch, tokens) == (dims[0], (*dims[1], *dims[2], *dims[3]))
    assert regroup((batch, tokens), (2, t, h * w))[1:] == (dims[1], (*dims[2], *dims[3]))
    assert same_size(axis_size(concat([tokens, fresh(7)])), w * h * t + 7)
    joint = concat([fresh(7), tokens])
    assert part_of(joint, 7, 7 + t * h * w) == tokens
    assert axis_size(part_of(joint, 3, 7 + t * h * w)) == 4 + t * h * w


def test_symbolic_axes_are_split_where_sizes_divide() -> None:
    """Frames are in the batch of an operation that gives its output new axes: their tokens are put together later."""
    b, f, n, m = sympy.symbols("b f n m", integer=True, positive=True)
    batch, tokens = regroup((fresh(b * f), fresh(n)), (b, f * n))
    assert [axis_size((factor,)) for factor in (*batch, *tokens)] == [b, f, n]
    assert regroup((batch, tokens), (b, f, n)) == (batch, tokens[:1], tokens[1:])
    swapped = regroup((fresh(n), fresh(m)), (m, n))
    assert [axis_size(axis) for axis in swapped] == [m, n]


def test_empty_and_single_axes() -> None:
    assert fresh(1) == ()
    assert axis_size(()) == 1
    empty: Axis = fresh(0)
    assert [axis_size(axis) for axis in regroup((empty, fresh(3)), (3, 0))] == [3, 0]
    assert segments_of(concat([fresh(3), (), fresh(2)]))[1] != ()


def test_slices_that_begin_or_end_inside_a_segment() -> None:
    """[text | first frame, other frames | text] in four slices, of which the last goes on into the text."""
    text, video, after = fresh(2), fresh(12), fresh(3)
    whole = concat([text, video, after])
    pieces = [part_of(whole, 0, 2), part_of(whole, 2, 6), part_of(whole, 6, 17)]
    assert segments_of(concat(pieces)) == (text, video, after)
    assert segments_of(concat(pieces[1:])) == (video, after)
    assert concat(pieces[:2]) == (*concat([text, pieces[1]]),)
    swapped = concat([pieces[2], pieces[1]])
    assert video not in segments_of(swapped)


def test_slices_follow_what_is_learned_later_of_the_axis_that_they_were_sliced_from() -> None:
    joint, image = fresh(124), fresh(117)
    assert unify(part_of(joint, 7, 124), image)
    inside = part_of(joint, 3, 50)
    rows, cols = fresh(9), fresh(13)
    assert unify(joint, concat([fresh(7), (*rows, *cols)]))
    assert resolve(image) == (*rows, *cols)
    assert resolve(inside) == inside
