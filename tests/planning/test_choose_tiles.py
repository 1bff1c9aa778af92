from __future__ import annotations

import os
import subprocess
import sys
import time
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sta_compile.errors import StaError
from sta_compile.planning.choose_tiles import plan_attention
from sta_compile.planning.cost import waste

Triple = tuple[int, int, int]

REAL_GRIDS = [
    (30, 48, 80),
    (21, 45, 80),
    (21, 80, 45),
    (21, 30, 52),
    (33, 45, 80),
    (31, 44, 80),
    (28, 30, 53),
    (11, 48, 85),
    (13, 30, 45),
    (16, 44, 80),
    (33, 90, 160),
    (1, 64, 64),
    (1, 128, 128),
    (1, 256, 256),
    (40, 60, 100),
]
grids = st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(1, 100))
requests = st.one_of(st.sampled_from(["auto", "full"]), grids)


@pytest.mark.parametrize(
    ("grid", "request_", "tiles", "extents", "window", "kept", "work"),
    [
        ((30, 48, 80), (18, 24, 24), (5, 6, 10), (6, 8, 8), (3, 3, 3), 9.0, 1.000),
        ((21, 45, 80), (15, 24, 24), (4, 5, 11), (6, 9, 8), (3, 3, 3), 12.1, 1.034),
        ((33, 45, 80), (18, 24, 24), (6, 5, 11), (6, 9, 8), (3, 3, 3), 8.3, 1.033),
        ((31, 44, 80), (18, 24, 24), (5, 6, 9), (7, 8, 9), (3, 3, 3), 9.9, 1.036),
        ((28, 30, 53), (15, 18, 24), (6, 4, 6), (5, 8, 9), (3, 3, 3), 19.2, 1.060),
        ((11, 48, 85), (9, 24, 24), (1, 6, 18), (11, 8, 5), (1, 3, 5), 14.0, 1.044),
        # Further real grids, so that a change of the rule is seen.
        ((21, 45, 80), (18, 24, 24), (4, 5, 11), (6, 9, 8), (3, 3, 3), 12.1, 1.034),
        ((21, 80, 45), (15, 24, 24), (4, 11, 5), (6, 8, 9), (3, 3, 3), 12.1, 1.034),
        ((18, 48, 80), (18, 24, 24), (3, 6, 10), (6, 8, 8), (3, 3, 3), 15.0, 1.000),
        ((36, 48, 48), (18, 24, 24), (6, 6, 6), (6, 8, 8), (3, 3, 3), 12.5, 1.000),
        ((30, 48, 80), (30, 40, 40), (5, 6, 10), (6, 8, 8), (5, 5, 5), 41.7, 1.000),
        ((1, 128, 128), (1, 48, 72), (1, 8, 8), (1, 16, 16), (1, 3, 5), 23.4, 1.000),
        ((30, 48, 80), "auto", (7, 6, 10), (5, 8, 8), (5, 5, 7), 41.0, 1.000),
        ((21, 45, 80), "auto", (4, 5, 11), (6, 9, 8), (3, 3, 9), 36.1, 1.030),
        ((33, 45, 80), "auto", (4, 9, 10), (9, 5, 8), (3, 7, 7), 40.4, 1.019),
    ],
)
def test_plans_of_real_grids(
    grid: Triple,
    request_: Triple,
    tiles: Triple,
    extents: Triple,
    window: Triple,
    kept: float,
    work: float,
) -> None:
    plan = plan_attention(grid, request_)
    assert plan.tiling.tiles == tiles
    assert plan.tiling.extents == extents
    assert plan.window.effective(plan.tiling) == window
    assert round(100 * plan.kept, 1) == kept
    assert waste(plan.tiling, plan.window) / 1000 == work


@settings(deadline=None, max_examples=60)
@given(grid=grids, request_=requests)
def test_rules_hold_for_any_grid(grid: Triple, request_: Triple | str) -> None:
    plan = plan_attention(grid, request_)
    tiles, window = plan.tiling.tiles, plan.window.effective(plan.tiling)
    assert 2 not in tiles
    means = [length / n for length, n in zip(grid, tiles, strict=True) if n > 1]
    assert not means or max(means) <= 2 * min(means)
    if prod(grid) >= 192:
        assert 192 <= prod(grid) / prod(tiles) <= 576
    else:
        assert tiles == (1, 1, 1)
    assert all(w % 2 or w == n for w, n in zip(window, tiles, strict=True))
    if request_ == "auto":
        assert all(w > 1 or n == 1 for w, n in zip(window, tiles, strict=True))
    elif request_ == "full":
        assert plan.is_full
        assert plan.tiling == plan_attention(grid, "auto").tiling
    else:
        for length, n, w, tokens in zip(grid, tiles, window, request_, strict=True):
            assert w == n or tokens < length
            assert w * -(-length // n) >= tokens or w == n


@pytest.mark.parametrize("grid", REAL_GRIDS)
def test_auto_stays_in_its_budget_on_real_grids(grid: Triple) -> None:
    plan = plan_attention(grid, "auto")
    assert 0.32 <= plan.kept <= 0.42


@settings(deadline=None, max_examples=60)
@given(grid=grids, request_=requests, tile=grids)
def test_a_tile_of_the_user_is_kept_to(grid: Triple, request_: Triple | str, tile: Triple) -> None:
    tiling = plan_attention(grid, request_, tile).tiling
    for length, n, extent in zip(grid, tiling.tiles, tile, strict=True):
        assert n == 1 or abs(length / extent - n) <= 0.5
        assert n > 1 or length / extent < 1.5


def test_small_grids_with_a_small_tile_are_sparse() -> None:
    plan = plan_attention((5, 9, 11), (2, 3, 4), (2, 3, 4))
    assert plan.tiling.tiles == (3, 3, 3)
    assert plan.window.tiles == (1, 1, 1)
    for window in [(2, 3, 4), (4, 6, 8)]:
        plan = plan_attention((7, 13, 17), window, (2, 3, 4))
        assert plan.tiling.tiles == (4, 4, 4)
        assert plan.kept < 0.45
    # By the definition two tiles act as three, and here three are the whole axis.
    assert plan_attention((5, 9, 11), (4, 6, 8), (2, 3, 4)).is_full


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 3, 5), (1, 2, 2), (1, 1, 577), (601, 1, 1)])
@pytest.mark.parametrize("request_", ["auto", "full", (1, 1, 1), (2, 3, 4)])
def test_tiny_and_thin_grids_have_plans(grid: Triple, request_: Triple | str) -> None:
    for tile in (None, (2, 3, 4), (1, 1, 1)):
        plan = plan_attention(grid, request_, tile)
        assert plan.tiling.grid == grid
        assert 0 < plan.kept <= 1


def test_a_request_for_all_axes_is_full() -> None:
    assert plan_attention((21, 45, 80), (21, 45, 99)) == plan_attention((21, 45, 80), "full")


@pytest.mark.parametrize("name", ["grid", "window", "tile"])
def test_empty_sizes_are_refused(name: str) -> None:
    arguments = {"grid": (3, 4, 4), "window": (1, 2, 2), "tile": (1, 2, 2), name: (3, 0, 4)}
    with pytest.raises(StaError, match=rf"{name} \(3, 0, 4\) .* pass \(frames, rows, cols\)"):
        plan_attention(**arguments)


def test_plans_do_not_depend_on_the_process() -> None:
    code = (
        "from sta_compile.planning.choose_tiles import plan_attention as plan\n"
        "for grid in [(13, 30, 45), (7, 31, 37), (1, 64, 48)]:\n"
        "    print([plan(grid, window) for window in ('auto', (5, 12, 12))])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize("grid", REAL_GRIDS)
def test_planning_is_fast(grid: Triple) -> None:
    for request_ in ("auto", (18, 24, 24)):
        seconds = []
        for _ in range(2):
            plan_attention.cache_clear()
            start = time.process_time()
            plan_attention(grid, request_)
            seconds.append(time.process_time() - start)
        assert min(seconds) < 0.3
