"""Which key tiles does a query tile see, and what share of all pairs is that?

On an axis of n tiles, a window of w tiles keeps W = min(n, 2 * (w // 2) + 1) tiles: an even w acts
as w + 1, and w >= n is the whole axis. Query tile q sees tiles lo .. lo + W - 1 with lo = clamp(q -
w // 2, 0, n - W): the window shifts inward at borders and is never cut. With n = 5 and w = 3 the
query tiles 0..4 see tiles from 0, 0, 1, 2, 2 on.

Axis order is (frames, rows, cols) everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ..errors import StaError
from .attention_spec import Triple
from .tiling import Tiling


def effective(n: int, w: int) -> int:
    """Tiles that a window of w tiles keeps on an axis of n tiles."""
    return min(n, 2 * (w // 2) + 1)


def lo(q: int, w: int, n: int) -> int:
    """First key tile that query tile q sees."""
    return min(max(q - w // 2, 0), n - effective(n, w))


@dataclass(frozen=True)
class Window:
    """tiles: window in tiles per axis (T, H, W), as requested; `effective` says what it keeps."""

    tiles: Triple

    def __post_init__(self) -> None:
        if min(self.tiles) < 1:
            raise StaError(
                f"a window of {self.tiles} tiles is empty; pass at least 1 tile for each axis "
                "(frames, rows, cols)"
            )

    def effective(self, tiling: Tiling) -> Triple:
        """Tiles kept per axis (T, H, W)."""
        t, h, w = (effective(n, w) for n, w in zip(tiling.tiles, self.tiles, strict=True))
        return (t, h, w)

    def first(self, tiling: Tiling, tile: Triple) -> Triple:
        """First key tile (a, b, c) that query tile `tile` sees."""
        a, b, c = (lo(q, w, n) for q, w, n in zip(tile, self.tiles, tiling.tiles, strict=True))
        return (a, b, c)

    def is_full(self, tiling: Tiling) -> bool:
        """Does every query see every key?"""
        return self.effective(tiling) == tiling.tiles


@lru_cache(maxsize=65536)
def kept_on_axis(length: int, n: int, w: int) -> int:
    """(query, key) pairs of positions on one axis whose tiles see each other.

    A closed form, since planning asks for it for every window of every tiling of a grid.
    """
    width, half = effective(n, w), w // 2
    if width == n:
        return length * length
    small, larger = divmod(length, n)

    def before(tile: int) -> int:
        return small * tile + min(tile, larger)

    def larger_keys(firsts: int) -> int:
        """Larger tiles in windows that begin at x < firsts: sum of clamp(larger - x, 0, width)."""
        ramp = _triangle(larger) - _triangle(larger - firsts)
        return ramp - _triangle(larger - width) + _triangle(larger - width - firsts)

    at_start = before(half) * before(width)
    at_end = (length - before(n - half)) * (length - before(n - width))
    inner = n - width + 1  # query tiles in the middle of their window
    larger_inner = min(max(larger - half, 0), inner)
    keys_of_inner = inner * small * width + larger_keys(inner)
    keys_of_larger_inner = larger_inner * small * width + larger_keys(larger_inner)
    return at_start + at_end + small * keys_of_inner + keys_of_larger_inner


def _triangle(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0


def kept_pairs(tiling: Tiling, window: Window) -> int:
    """(query, key) pairs of video tokens that are computed: exact, a product over the axes."""
    axes = zip(tiling.grid, tiling.tiles, window.tiles, strict=True)
    return prod(kept_on_axis(length, n, w) for length, n, w in axes)


def windows_of(window: Window, head_windows: tuple[Window, ...]) -> tuple[Window, ...]:
    """One for each head, or one that all have; head_windows: () where all have `window`."""
    return head_windows or (window,)


def kept(tiling: Tiling, window: Window) -> float:
    """Share of the (query, key) pairs of video tokens that are computed."""
    return kept_pairs(tiling, window) / tiling.tokens**2
