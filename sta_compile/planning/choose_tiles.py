"""Into which tiles is a token grid cut, given the window that is wanted?

Tiling changes what is computed, so it is a pure function of grid and request, the same on every
machine and for every kernel, and `VERSION` names the rule. 21x45x80 tokens with a window of (15,
24, 24) tokens become 4x5x11 tiles of at most 6x9x8 tokens and a window of (3, 3, 3) tiles: 12.1 %
of the pairs are kept, 11.4 % were asked for, and blocks that are not full add 3.4 % of work.

Tilings that are considered:
1. An axis has one tile or at least three: a window over two tiles is local without overlap, or
   dense.
2. Mean tile sizes of axes with several tiles differ by at most a factor 2.
3. A tile has 192 to 576 tokens on average. If a grid has no such tiling (fewer than 192 tokens,
   say), both ends of the range are relaxed by a factor of 2 until there is one.

The distance of a plan from a window in tokens is the ratio of their kept shares, the larger over
the smaller. Of the plans that are within the widest of `BANDS`:
4. Those that look most like the request: every axis' share is within 4/3 of its own request, no
   window of one tile on an axis with several, no whole axis that was not asked for. The last of
   these conditions is given up first.
5. The narrowest of `BANDS` that has a plan within 2 % of the least work in the widest, work being
   computed over real pairs. Only the 256 nearest plans are compared.
6. In it the least work, in thousandths; then fewest ragged axes; then the smallest distance; then
   the most equal tile sizes; then the fewest tiles on frames, rows and cols, in this order.
If no plan is in any band, step 6 among those within 10 % of the nearest.

"auto" is a budget of 42 % of the pairs, or 45 % if no plan is in it, and so on by 3 %. Of the plans
in it, those remain that use more than 39 %, or 36 % if there are none, and so on by 3 %. Their
distance is the largest smallest reach among them over their own (`choose_window` says what a reach
is); steps 5 and 6 are the same, and 4 is empty. 30x48x80 has 597 such plans; 6x8x8 tiles with the
paper's (5, 5, 5) are among the nearest, waste nothing and have no ragged axis. "full" is tiled as
"auto", so that tile order is defined.

Where each head has a window of its own, tiles are those for the window that most heads have (of equals, the largest),
since all heads share one order of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from operator import lt
from typing import Literal

from ..errors import StaError
from ..ir.attention_spec import HeadTriples, Triple, WindowRequest, is_per_head
from ..ir.tiling import Tiling
from ..ir.window import Window, kept, kept_on_axis, windows_of
from .choose_window import AUTO_PERCENT, auto_tiles, reach, requested_tiles
from .cost import waste

VERSION = 1
VOLUME = (192, 576)  # tokens of a tile, on average
ASPECT = 2  # largest over smallest mean tile size of axes with several tiles
BANDS = (1.1, 1.25, 1.4)
AXIS_BAND = 4 / 3
WORK_PERCENT = 102  # of the least work, to be good enough for a narrower band
COMPARED = 256  # plans whose work is computed, at most: bounds the time of a call
AUTO_STEP = 3  # percent of the pairs


@dataclass(frozen=True)
class Plan:
    """How the video tokens are ordered and which pairs of them are computed.

    head_windows: one for each head, or () where all have `window`, which else is as wide on each axis as the widest.
    """

    tiling: Tiling
    window: Window
    head_windows: tuple[Window, ...] = ()

    @staticmethod
    def of(tiling: Tiling, windows: Sequence[Triple]) -> Plan:
        """windows: in tiles; one, or one for each head."""
        t, h, w = map(max, zip(*windows, strict=True))
        widest = Window((t, h, w))
        return Plan(tiling, widest, () if len(set(windows)) == 1 else tuple(map(Window, windows)))

    @property
    def windows(self) -> tuple[Window, ...]:
        return windows_of(self.window, self.head_windows)

    @property
    def kept(self) -> float:
        """Share of the (query, key) pairs of video tokens that are computed, on average over the heads."""
        return sum(kept(self.tiling, window) for window in self.windows) / len(self.windows)

    @property
    def is_full(self) -> bool:
        return all(window.is_full(self.tiling) for window in self.windows)


@dataclass(frozen=True)
class _Candidate:
    tiles: Triple
    window: Triple  # in tiles
    distance: float  # >= 1
    likeness: int  # number of conditions of rule 4 that were given up

    def sort_key(self, grid: Triple) -> tuple[int, float, float, Triple]:
        ragged = len(Tiling(grid, self.tiles).ragged_axes)
        return ragged, self.distance, _aspect(grid, self.tiles), self.tiles


@lru_cache(maxsize=1024)
def plan_attention(grid: Triple, window: WindowRequest, tile: Triple | None = None) -> Plan:
    """Plan for a grid (T, H, W) and a window in tokens; `tile` in tokens replaces rules 1 to 6."""
    _check("grid", grid)
    if is_per_head(window):
        tiling = plan_attention(grid, _commonest(grid, window), tile).tiling
        return Plan.of(tiling, [_window(grid, tiling.tiles, each) for each in window])
    if not isinstance(window, str):
        _check("window", window)
        if all(tokens >= length for tokens, length in zip(window, grid, strict=True)):
            window = "full"
    if tile is None:
        tiles = _choose(grid, "auto" if window == "full" else window)
    else:
        _check("tile", tile)
        tiles = _tiles_of_extent(grid, tile)
    return Plan(Tiling(grid, tiles), Window(_window(grid, tiles, window)))


def _commonest(grid: Triple, windows: HeadTriples) -> Triple:
    """The window that most heads have, of those that are not as large as the grid, to which tiles are all the same."""
    count = Counter(w for w in windows if any(map(lt, w, grid))) or Counter(windows)
    return max(count, key=lambda window: (count[window], prod(window), window))


def _check(name: str, value: Triple) -> None:
    if len(value) != 3 or min(value) < 1:
        raise StaError(
            f"{name} {value} is not three positive numbers of tokens; pass (frames, rows, cols)"
        )


def _tiles_of_extent(grid: Triple, tile: Triple) -> Triple:
    """Length over extent, rounded, halves up, from one to length: 45 in 8s is 6, 5 in 2s is 3."""
    t, h, w = (
        min(max(1, (2 * length + extent) // (2 * extent)), length)
        for length, extent in zip(grid, tile, strict=True)
    )
    return (t, h, w)


def _window(grid: Triple, tiles: Triple, request: Triple | Literal["auto", "full"]) -> Triple:
    if request == "full":
        return tiles
    if request == "auto":
        return auto_tiles(grid, tiles)
    t, h, w = (
        requested_tiles(length, n, tokens)
        for length, n, tokens in zip(grid, tiles, request, strict=True)
    )
    return (t, h, w)


def _choose(grid: Triple, request: Triple | Literal["auto"]) -> Triple:
    if isinstance(request, str):
        candidates = _auto_candidates(grid)
    else:
        wanted = [min(1.0, size / length) for size, length in zip(request, grid, strict=True)]
        candidates = [
            _candidate(grid, tiles, _window(grid, tiles, request), wanted)
            for tiles in _tilings(grid)
        ]
    candidates.sort(key=lambda c: (c.distance, c.tiles))
    near = [c for c in candidates if c.distance <= BANDS[-1]]
    if not near:
        widest = BANDS[0] * candidates[0].distance
        return _least_work(grid, [c for c in candidates if c.distance <= widest], (widest,))
    likeness = min(c.likeness for c in near)
    return _least_work(grid, [c for c in near if c.likeness == likeness], BANDS)


def _least_work(grid: Triple, candidates: list[_Candidate], bands: tuple[float, ...]) -> Triple:
    """Rules 5 and 6. `candidates` are in order of distance."""
    work = {c: waste(Tiling(grid, c.tiles), Window(c.window)) for c in candidates[:COMPARED]}
    good_enough = WORK_PERCENT * min(work.values())
    for band in bands:
        inside = [c for c in work if c.distance <= band]
        if any(100 * work[c] <= good_enough for c in inside):
            return min(inside, key=lambda c: (work[c], c.sort_key(grid))).tiles
    raise AssertionError("the least work is in the widest band")


def _auto_candidates(grid: Triple) -> list[_Candidate]:
    total = prod(grid) ** 2
    plans: list[tuple[Triple, Triple, int, float]] = []  # tiles, window, kept pairs, reach
    for tiles in _tilings(grid):
        window = auto_tiles(grid, tiles)
        axes = list(zip(grid, tiles, window, strict=True))
        pairs = prod(kept_on_axis(*axis) for axis in axes)
        plans.append((tiles, window, pairs, min(reach(*axis) for axis in axes)))
    percent = [-(-100 * pairs // total) for _, _, pairs, _ in plans]
    budget = AUTO_PERCENT
    while min(percent) > budget:
        budget += AUTO_STEP
    used = max(share for share in percent if share <= budget)
    floor = budget - AUTO_STEP * -(-(budget + 1 - used) // AUTO_STEP)
    within = [plan for plan, share in zip(plans, percent, strict=True) if floor < share <= budget]
    widest = max(own for *_, own in within)
    return [
        _Candidate(tiles, window, 1.0 if own == widest else widest / own, 0)
        for tiles, window, _, own in within
    ]


def _candidate(grid: Triple, tiles: Triple, window: Triple, wanted: Sequence[float]) -> _Candidate:
    axes = zip(grid, tiles, window, strict=True)
    shares = [kept_on_axis(length, n, w) / length**2 for length, n, w in axes]
    if max(map(_ratio, shares, wanted)) > AXIS_BAND:
        likeness = 3
    elif any(w == 1 < n for w, n in zip(window, tiles, strict=True)):
        likeness = 2
    else:
        likeness = int(any(a == 1 != b for a, b in zip(shares, wanted, strict=True)))
    return _Candidate(tiles, window, _ratio(prod(shares), prod(wanted)), likeness)


def _ratio(a: float, b: float) -> float:
    return max(a / b, b / a)


def _tilings(grid: Triple) -> list[Triple]:
    """Rules 1 to 3."""
    low, high = VOLUME
    while not (found := list(_tilings_of_volume(grid, low, high))):
        low, high = max(1, low // 2), high * 2
    return found


def _tilings_of_volume(grid: Triple, low: int, high: int) -> Iterator[Triple]:
    tokens = prod(grid)
    frames, rows, cols = grid
    for t, h in product(_counts(frames), _counts(rows)):
        if _aspect(grid, (t, h, 1)) > ASPECT:
            continue
        fewest, most = -(-tokens // (high * t * h)), min(tokens // (low * t * h), cols)
        for w in range(fewest, most + 1):
            if w != 2 and _aspect(grid, (t, h, w)) <= ASPECT:
                yield (t, h, w)


def _counts(length: int) -> list[int]:
    return [1, *range(3, length + 1)]


def _aspect(grid: Triple, tiles: Triple) -> float:
    """Largest over smallest mean tile size of the axes with several tiles."""
    means = [length / n for length, n in zip(grid, tiles, strict=True) if n > 1]
    return max(means) / min(means) if means else 1.0
