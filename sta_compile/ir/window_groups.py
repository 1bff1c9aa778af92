"""Which tiles see the same window? Kernels that take query rows of such tiles together share their keys.

Windows shift inward at borders, so on an axis of n tiles the first window // 2 + 1 tiles see one window and so do the
last ones; every tile between sees a window of its own. With n = 5 and a window of 3 the groups are tiles (0, 1), (2,) and
(3, 4). A group of the grid is a product of groups of its axes. Axis order is (frames, rows, cols).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .attention_spec import Triple
from .runs import box_runs
from .tiling import Tiling
from .window import Window, effective

# Groups of an axis are counted by place: the first, those between (which differ by less than a row of tiles), the last.
PLACES = range(3)


@dataclass(frozen=True)
class AxisGroups:
    """half: tiles beside a window's middle. width: tiles of a window. Group g sees tiles g .. g + width - 1."""

    tiles: int
    half: int
    width: int

    @staticmethod
    def of(tiles: int, window: int) -> AxisGroups:
        return AxisGroups(tiles, window // 2, effective(tiles, window))

    @property
    def count(self) -> int:
        return self.tiles - self.width + 1

    def queries(self, group: int) -> tuple[int, int]:
        """(first, how many) tiles of the group."""
        if self.count == 1:
            return 0, self.tiles
        if group == 0:
            return 0, self.half + 1
        if group == self.count - 1:
            return self.tiles - 1 - self.half, self.half + 1
        return group + self.half, 1

    def at(self, place: int) -> int | None:
        """A group of that place with the most tokens (sizes never grow along an axis), or None."""
        if place == 0:
            return 0
        if place == 1:
            return 1 if self.count > 2 else None
        return self.count - 1 if self.count > 1 else None

    def total(self, of_place: tuple[int, int, int]) -> int:
        """Sum over the groups of the axis of a number that each place has."""
        first, between, last = of_place
        return first + between * max(self.count - 2, 0) + (last if self.count > 1 else 0)


@dataclass(frozen=True)
class GroupBlocks:
    """Blocks of query rows by place: of a group [t][h][w], of a band of them [t][h], of a slab [t], and of the video."""

    group: tuple[tuple[Triple, Triple, Triple], ...]
    band: tuple[Triple, Triple, Triple]
    slab: Triple
    video: int


def groups_of(tiling: Tiling, window: Window) -> tuple[AxisGroups, AxisGroups, AxisGroups]:
    t, h, w = (AxisGroups.of(n, m) for n, m in zip(tiling.tiles, window.tiles, strict=True))
    return t, h, w


@lru_cache(maxsize=4096)
def group_blocks(tiling: Tiling, window: Window, unit: int, units: int) -> GroupBlocks:
    """A block has `units` units of up to `unit` rows each; no unit crosses a run of rows."""
    axes = groups_of(tiling, window)

    def blocks(places: Triple) -> int:
        groups = [axis.at(place) for axis, place in zip(axes, places, strict=True)]
        if any(group is None for group in groups):
            return 0
        (a, i), (b, j), (c, k) = (
            axis.queries(group or 0) for axis, group in zip(axes, groups, strict=True)
        )
        runs = box_runs(tiling, (a, b, c), (i, j, k))
        return -(-sum(-(-length // unit) for _, length in runs) // units)

    group = tuple(tuple(tuple(blocks((t, h, w)) for w in PLACES) for h in PLACES) for t in PLACES)
    band = tuple(tuple(axes[2].total(group[t][h]) for h in PLACES) for t in PLACES)  # type: ignore[arg-type]
    slab = tuple(axes[1].total(band[t]) for t in PLACES)  # type: ignore[arg-type]
    return GroupBlocks(group, band, slab, axes[0].total(slab))  # type: ignore[arg-type]
