from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sta_compile.errors import StaError
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.window import Window, effective, kept, kept_on_axis, kept_pairs, lo

axes = st.integers(1, 40).flatmap(
    lambda length: st.tuples(st.just(length), st.integers(1, length), st.integers(1, 44))
)


def sees(q: int, k: int, w: int, n: int) -> bool:
    """Published form of the rule: clamp the window's centre, then compare distances."""
    half = w // 2
    if 2 * half >= n - 1:
        return True
    centre = min(max(q, half), n - 1 - half)
    return abs(centre - k) <= half


def sizes_of(length: int, n: int) -> list[int]:
    return [length // n + (i < length % n) for i in range(n)]


def pairs_by_counting(length: int, n: int, w: int) -> int:
    sizes = sizes_of(length, n)
    return sum(sizes[q] * sizes[k] for q, k in product(range(n), repeat=2) if sees(q, k, w, n))


def test_window_rule_equals_the_clamped_centre() -> None:
    for n, w in product(range(1, 16), range(1, 20)):
        for q in range(n):
            keys = range(lo(q, w, n), lo(q, w, n) + effective(n, w))
            assert list(keys) == [k for k in range(n) if sees(q, k, w, n)]


def test_even_windows_are_one_wider_and_wide_ones_the_whole_axis() -> None:
    assert [effective(9, w) for w in (1, 2, 3, 4, 8, 9, 10)] == [1, 3, 3, 5, 9, 9, 9]
    assert effective(6, 6) == 6


@given(axes)
def test_pairs_on_an_axis_equal_counting(axis: tuple[int, int, int]) -> None:
    assert kept_on_axis(*axis) == pairs_by_counting(*axis)


@settings(deadline=None, max_examples=60)
@given(st.tuples(*[st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 7))] * 3))
def test_kept_equals_counting_pairs_of_tokens(drawn: tuple[tuple[int, int, int], ...]) -> None:
    grid = tuple(length for length, _, _ in drawn)
    tiles = tuple(min(n, length) for length, n, _ in drawn)
    window = Window(tuple(w for _, _, w in drawn))
    tiling = Tiling(grid, tiles)
    tokens = [
        tuple(tile for tile, size in enumerate(sizes_of(length, n)) for _ in range(size))
        for length, n in zip(grid, tiles, strict=True)
    ]
    tile_of_tokens = list(product(*tokens))
    pairs = sum(
        all(sees(*axis) for axis in zip(query, key, window.tiles, tiles, strict=True))
        for query, key in product(tile_of_tokens, repeat=2)
    )
    assert kept_pairs(tiling, window) == pairs
    assert kept(tiling, window) == pairs / tiling.tokens**2
    assert window.is_full(tiling) == (pairs == tiling.tokens**2)


@pytest.mark.parametrize(
    ("grid", "tiles", "window", "sparsity"),
    [
        ((30, 48, 80), (5, 6, 10), (3, 3, 3), 91.00),
        ((30, 48, 80), (5, 6, 10), (5, 5, 5), 58.33),
        ((30, 48, 80), (5, 6, 10), (5, 3, 5), 75.00),
        ((30, 48, 80), (5, 6, 10), (5, 6, 10), 0.00),
        ((18, 48, 80), (3, 6, 10), (3, 3, 3), 85.00),
        ((18, 48, 80), (3, 6, 10), (3, 3, 5), 75.00),
        ((18, 48, 80), (3, 6, 10), (3, 5, 5), 58.33),
        ((36, 48, 48), (6, 6, 6), (3, 3, 3), 87.50),
    ],
)
def test_published_sparsities(
    grid: tuple[int, int, int],
    tiles: tuple[int, int, int],
    window: tuple[int, int, int],
    sparsity: float,
) -> None:
    assert round(100 * (1 - kept(Tiling(grid, tiles), Window(window))), 2) == sparsity


def test_empty_window_is_refused() -> None:
    with pytest.raises(StaError, match="pass at least 1 tile"):
        Window((3, 0, 3))
