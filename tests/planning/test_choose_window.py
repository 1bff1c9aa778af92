from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sta_compile.ir.tiling import Tiling
from sta_compile.ir.window import Window, kept
from sta_compile.planning.choose_window import auto_tiles, reach, requested_tiles


@pytest.mark.parametrize(
    ("length", "n", "tokens", "tiles"),
    [
        (30, 5, 18, 3),
        (48, 6, 24, 3),
        (48, 6, 25, 5),  # 4 tiles, then odd
        (48, 6, 48, 6),  # the whole axis, though even
        (48, 6, 100, 6),
        (48, 6, 1, 1),
        (45, 6, 24, 3),  # nominal size is that of the larger tiles
        (11, 1, 9, 1),
        (5, 2, 4, 2),
    ],
)
def test_tokens_become_tiles(length: int, n: int, tokens: int, tiles: int) -> None:
    assert requested_tiles(length, n, tokens) == tiles


@settings(deadline=None)
@given(st.tuples(*[st.tuples(st.integers(1, 40), st.integers(1, 11))] * 3))
def test_auto_has_the_largest_smallest_reach(drawn: tuple[tuple[int, int], ...]) -> None:
    grid = tuple(length for length, _ in drawn)
    tiles = tuple(min(n, length) for length, n in drawn)
    tiling = Tiling(grid, tiles)

    def smallest(window: tuple[int, ...]) -> Fraction | float:
        axes = zip(grid, tiles, window, strict=True)
        return min((Fraction(w * length, n) for length, n, w in axes if w < n), default=inf)

    allowed = list(product(*((*range(3, n, 2), n) for n in tiles)))
    fitting = [w for w in allowed if kept(tiling, Window(w)) <= 0.42]
    window = auto_tiles(grid, tiles)
    assert window in allowed
    if fitting:
        assert kept(tiling, Window(window)) <= 0.42
        assert smallest(window) == max(map(smallest, fitting))
        for axis in range(3):  # nothing of the budget is left that one axis could use
            wider = [w for w in fitting if all(w[i] == window[i] for i in range(3) if i != axis)]
            assert window[axis] == max(w[axis] for w in wider)
    else:
        assert kept(tiling, Window(window)) == min(kept(tiling, Window(w)) for w in allowed)


def test_auto_is_the_window_of_the_paper_in_its_tiles() -> None:
    assert auto_tiles((30, 48, 80), (5, 6, 10)) == (5, 5, 5)
    assert auto_tiles((18, 48, 80), (3, 6, 10)) == (3, 5, 5)
    assert auto_tiles((30, 48, 80), (4, 5, 10)) == (4, 3, 5)


def test_reach_is_in_tokens() -> None:
    assert reach(48, 6, 3) == 24
    assert reach(45, 6, 4) == 37.5  # an even window is one wider
    assert reach(48, 6, 6) == reach(48, 1, 1) == inf
