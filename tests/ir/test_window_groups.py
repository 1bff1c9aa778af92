"""Groups of tiles with one window: they cover each tile once, and a kernel's blocks cover each row once."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from sta_compile.ir.runs import box_runs, key_runs
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.window import Window
from sta_compile.ir.window_groups import AxisGroups, group_blocks, groups_of

AXIS = st.integers(1, 14).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@st.composite
def problems(draw):
    axes = [draw(AXIS) for _ in range(3)]
    grid, tiles = zip(*axes, strict=True)
    window = tuple(draw(st.integers(1, 9)) for _ in range(3))
    return Tiling(grid, tiles), Window(window)


@given(st.integers(1, 40), st.integers(1, 45))
def test_groups_of_an_axis(tiles, window):
    groups = AxisGroups.of(tiles, window)
    seen = [
        tile
        for group in range(groups.count)
        for tile in range(groups.queries(group)[0], sum(groups.queries(group)))
    ]
    assert seen == list(range(tiles))
    places = {groups.at(place) for place in range(3)} - {None}
    assert 0 in places
    assert groups.count - 1 in places
    assert groups.total((1, 1, 1)) == groups.count


@given(problems())
def test_tiles_of_a_group_see_the_same_keys(problem):
    tiling, window = problem
    axes = groups_of(tiling, window)
    for group in product(*(range(axis.count) for axis in axes)):
        spans = [axis.queries(g) for axis, g in zip(axes, group, strict=True)]
        keys = box_runs(tiling, group, tuple(axis.width for axis in axes))
        for tile in product(*(range(first, first + count) for first, count in spans)):
            assert key_runs(tiling, window, tile) == keys


def decoded(tiling, window, unit, units):
    """(group, first row, rows) of each unit, as the kernel finds them from a block's number."""
    blocks = group_blocks(tiling, window, unit, units)
    axes = groups_of(tiling, window)

    def take(block, of_place, count):
        if block < of_place[0]:
            return 0, 0, block
        block -= of_place[0]
        middle = min(block // of_place[1] if of_place[1] else 0, count - 2)
        return middle + 1, 1 if middle < count - 2 else 2, block - middle * of_place[1]

    for block in range(blocks.video):
        t, at_t, block = take(block, blocks.slab, axes[0].count)
        h, at_h, block = take(block, blocks.band[at_t], axes[1].count)
        w, _, block = take(block, blocks.group[at_t][at_h], axes[2].count)
        spans = [axis.queries(g) for axis, g in zip(axes, (t, h, w), strict=True)]
        first, count = zip(*spans, strict=True)
        for index in range(block * units, (block + 1) * units):
            for start, length in box_runs(tiling, first, count):
                here = -(-length // unit)
                if index < here:
                    yield (t, h, w), start + index * unit, min(unit, length - index * unit)
                    break
                index -= here


@given(problems(), st.sampled_from([1, 3, 64]), st.integers(1, 3))
def test_blocks_cover_each_row_once(problem, unit, units):
    tiling, window = problem
    rows = Counter()
    for _, first, count in decoded(tiling, window, unit, units):
        rows.update(range(first, first + count))
    assert rows == Counter(range(tiling.tokens))
