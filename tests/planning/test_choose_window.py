from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sta_compile.ir.tiling import Tiling
from sta_compile.ir.window import Window, kept
from sta_compile.planning.choose_window import auto_tiles, requested_tiles


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
def test_auto_has_the_largest_smallest_share(drawn: tuple[tuple[int, int], ...]) -> None:
    grid = tuple(length for length, _ in drawn)
    tiles = tuple(min(n, length) for length, n in drawn)
    tiling = Tiling(grid, tiles)

    def shares(window: tuple[int, ...]) -> list[float]:
        axes = zip(grid, tiles, window, strict=True)
        return [kept(Tiling((1, 1, length), (1, 1, n)), Window((1, 1, w))) for length, n, w in axes]

    allowed = list(product(*((*range(3, n, 2), n) for n in tiles)))
    fitting = [w for w in allowed if kept(tiling, Window(w)) <= 0.42]
    window = auto_tiles(grid, tiles)
    assert window in allowed
    if fitting:
        assert kept(tiling, Window(window)) <= 0.42
        assert min(shares(window)) == max(min(shares(w)) for w in fitting)
        for axis in range(3):  # nothing of the budget is left that one axis could use
            wider = [w for w in fitting if all(w[i] == window[i] for i in range(3) if i != axis)]
            assert window[axis] == max(w[axis] for w in wider)
    else:
        assert prod(shares(window)) == min(prod(shares(w)) for w in allowed)


def test_auto_on_the_grid_of_the_paper() -> None:
    assert auto_tiles((30, 48, 80), (5, 6, 10)) == (3, 6, 7)
    assert auto_tiles((30, 48, 80), (4, 5, 10)) == (3, 3, 9)
