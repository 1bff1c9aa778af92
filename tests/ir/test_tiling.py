from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sta_compile.errors import StaError
from sta_compile.ir.tiling import Tiling, balanced


@st.composite
def tilings(draw: st.DrawFn) -> Tiling:
    grid = draw(st.tuples(*[st.integers(1, 11)] * 3))
    return Tiling(grid, tuple(draw(st.integers(1, length)) for length in grid))


def tile_of_position(length: int, n: int, i: int) -> int:
    """By walking the tiles: sizes differ by at most one, larger ones first."""
    tile, end = 0, 0
    while True:
        end += length // n + (1 if tile < length % n else 0)
        if i < end:
            return tile
        tile += 1


def order_by_sorting(tiling: Tiling) -> list[int]:
    """Tile order as defined: lexicographic in tile, then in token."""
    frames, rows, cols = tiling.grid
    tokens = [(t, h, w) for t in range(frames) for h in range(rows) for w in range(cols)]

    def key(token: tuple[int, int, int]) -> tuple[int, ...]:
        axes = zip(tiling.grid, tiling.tiles, token, strict=True)
        return (*(tile_of_position(length, n, i) for length, n, i in axes), *token)

    raster = {token: index for index, token in enumerate(tokens)}
    return [raster[token] for token in sorted(tokens, key=key)]


def test_larger_tiles_come_first() -> None:
    assert balanced(45, 6) == ((8, 8, 8, 7, 7, 7), (0, 8, 16, 24, 31, 38))


@given(length=st.integers(1, 200), data=st.data())
def test_balanced_sizes(length: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, length))
    sizes, starts = balanced(length, n)
    assert len(sizes) == n
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert list(starts) == [sum(sizes[:i]) for i in range(n)]


@given(tilings())
def test_order_is_the_defined_bijection(tiling: Tiling) -> None:
    order = tiling.order()
    assert order == order_by_sorting(tiling)
    assert sorted(order) == list(range(tiling.tokens))


@given(tilings())
def test_start_count_and_tile_of_agree_with_the_order(tiling: Tiling) -> None:
    _, rows, cols = tiling.grid
    tiles = []
    for index in tiling.order():
        t, h, w = index // (rows * cols), index // cols % rows, index % cols
        tiles.append(tiling.tile_of(t, h, w))
    for tile in set(tiles):
        assert tiling.start(*tile) == tiles.index(tile)
        assert tiling.count(*tile) == tiles.count(tile)
    assert len(set(tiles)) == tiling.count_tiles


@given(tilings())
def test_extents_are_the_largest_tile(tiling: Tiling) -> None:
    assert tiling.extents == tuple(max(tiling.sizes(axis)) for axis in range(3))
    assert tiling.ragged_axes == tuple(
        axis for axis in range(3) if len(set(tiling.sizes(axis))) > 1
    )


@pytest.mark.parametrize("tiles", [(0, 1, 1), (1, 5, 1), (4, 1, 1)])
def test_impossible_tiles_are_refused(tiles: tuple[int, int, int]) -> None:
    with pytest.raises(StaError, match="pass between 1 and the axis length"):
        Tiling((3, 4, 4), tiles)
