from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from sta_compile.ir.runs import key_runs
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.window import Window


def tile_of_positions(tiling: Tiling) -> list[tuple[int, int, int]]:
    """Tile of each position in tile order: tiles in order, each as often as it has tokens."""
    sizes = [
        [length // n + (i < length % n) for i in range(n)]
        for length, n in zip(tiling.grid, tiling.tiles, strict=True)
    ]
    return [
        (a, b, c)
        for a, b, c in product(*map(range, tiling.tiles))
        for _ in range(sizes[0][a] * sizes[1][b] * sizes[2][c])
    ]


def sees(q: int, k: int, w: int, n: int) -> bool:
    half = w // 2
    return 2 * half >= n - 1 or abs(min(max(q, half), n - 1 - half) - k) <= half


@settings(deadline=None, max_examples=60)
@given(st.tuples(*[st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 6))] * 3))
def test_runs_are_exactly_the_keys_of_the_window(drawn: tuple[tuple[int, int, int], ...]) -> None:
    tiling = Tiling(
        tuple(length for length, _, _ in drawn), tuple(min(n, length) for length, n, _ in drawn)
    )
    window = Window(tuple(w for _, _, w in drawn))
    tiles = tile_of_positions(tiling)
    for query in set(tiles):
        runs = key_runs(tiling, window, query)
        covered = [key for start, length in runs for key in range(start, start + length)]
        assert covered == [
            position
            for position, key in enumerate(tiles)
            if all(sees(*axis) for axis in zip(query, key, window.tiles, tiling.tiles, strict=True))
        ]
        assert all(start + length < after for (start, length), (after, _) in pairwise(runs))


def test_a_window_has_one_run_for_each_frame_and_row_tile() -> None:
    tiling = Tiling((30, 48, 80), (5, 6, 10))
    runs = key_runs(tiling, Window((3, 3, 3)), (2, 3, 4))
    assert len(runs) == 9
    assert {length for _, length in runs} == {6 * 8 * 24}


def test_runs_that_touch_are_one() -> None:
    tiling = Tiling((21, 45, 80), (4, 5, 11))
    assert key_runs(tiling, Window((4, 5, 11)), (1, 2, 3)) == ((0, 75600),)
    assert len(key_runs(tiling, Window((3, 3, 11)), (1, 2, 3))) == 3
    assert len(key_runs(tiling, Window((3, 5, 11)), (1, 2, 3))) == 1
