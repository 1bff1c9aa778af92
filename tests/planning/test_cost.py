from __future__ import annotations

from itertools import product
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from sta_compile.ir.runs import key_runs
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.window import Window
from sta_compile.planning.cost import computed_pairs, waste


def computed_by_walking(tiling: Tiling, window: Window) -> int:
    """Every query tile in 64 rows; full 128-key blocks of every run, then the tails packed."""
    total = 0
    for tile in product(*map(range, tiling.tiles)):
        lengths = [length for _, length in key_runs(tiling, window, tile)]
        blocks = sum(length // 128 for length in lengths)
        blocks += ceil(sum(length % 128 for length in lengths) / 128)
        total += ceil(tiling.count(*tile) / 64) * 64 * blocks * 128
    return total


@settings(deadline=None)
@given(st.tuples(*[st.tuples(st.integers(1, 24), st.integers(1, 6), st.integers(1, 7))] * 3))
def test_computed_pairs_equal_walking_all_tiles(drawn: tuple[tuple[int, int, int], ...]) -> None:
    tiling = Tiling(
        tuple(length for length, _, _ in drawn), tuple(min(n, length) for length, n, _ in drawn)
    )
    window = Window(tuple(w for _, _, w in drawn))
    assert computed_pairs(tiling, window) == computed_by_walking(tiling, window)


def test_waste_of_real_grids() -> None:
    assert waste(Tiling((30, 48, 80), (5, 6, 10)), Window((3, 3, 3))) == 1000
    assert waste(Tiling((21, 45, 80), (4, 5, 11)), Window((3, 3, 3))) == 1034
