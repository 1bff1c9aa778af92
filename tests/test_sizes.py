"""Sizes as sums of others."""

from __future__ import annotations

import pytest
import sympy

from sta_compile._sizes import Combinations

A, B, C = sympy.symbols("s0 s1 s2", integer=True, positive=True)


@pytest.mark.parametrize(
    ("given", "wanted", "found"),
    [
        ([A + 216], A, (-216, {0: 1}, 1)),
        ([A + B, B], A, (0, {0: 1, 1: -1}, 1)),
        ([A + B + C, B + 2, A - C], C, (2, {0: 1, 1: -1, 2: -1}, 2)),
        ([A + B + C, B + 2, A - 2], C, (0, {0: 1, 1: -1, 2: -1}, 1)),
        ([2 * A + 6], A, (-6, {0: 1}, 2)),
        ([A * B + C, C], 3 * A * B, (0, {0: 3, 1: -3}, 1)),
        ([A * (B + 2), 2 * A], A * B, (0, {0: 1, 1: -1}, 1)),
        ([A, B], A * B, None),
        ([4 * (A // 2) + 216], 4 * (A // 2), (-216, {0: 1}, 1)),
        ([C, A + C, C, 2 * C, A + B], B, (0, {4: 1, 1: -1, 0: 1}, 1)),
        ([], 7, (7, {}, 1)),
    ],
)
def test_a_size_as_a_sum_of_others(given, wanted, found):
    sums = Combinations()
    for size in given:
        sums.add(size)
    assert sums.of(wanted) == found


def test_a_size_that_says_nothing_new():
    sums = Combinations()
    assert [sums.add(size) for size in (A, A + 3, 5, 2 * A, A * B, A * B + A)] == [
        True, False, False, False, True, False,
    ]  # fmt: skip
