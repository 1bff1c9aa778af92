"""The token sequence that one attention call works on: segments, and the video's tiling and window.

A sequence of 512 text tokens and a 3x4x4 video in 1x2x2 tiles has segments (512, 48) with roles
("context", "video"); the video starts at key 512 and at query 512. With the role "keys" the text has
no queries, and the video starts at query 0. Axis order is (frames, rows, cols); video tokens are in
tile order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from ..errors import StaError
from .runs import Run
from .tiling import Tiling
from .window import Window, kept_pairs, windows_of


@dataclass(frozen=True)
class Geometry:
    """segments: tokens per segment, in the order of the keys. roles: "video", "context" or "keys".

    head_windows: one for each query head, or () where all have `window`, which else holds all of them.
    """

    segments: tuple[int, ...]
    roles: tuple[str, ...]
    tiling: Tiling
    window: Window
    head_windows: tuple[Window, ...] = ()

    def __post_init__(self) -> None:
        if self.segments[self.video] != self.tiling.tokens:
            raise StaError(
                f"the video segment has {self.segments[self.video]} tokens and its grid "
                f"{self.tiling.grid} has {self.tiling.tokens}; pass the (T, H, W) token grid of "
                "this video"
            )

    @property
    def video(self) -> int:
        """Index of the video segment."""
        return self.roles.index("video")

    @property
    def keys(self) -> int:
        """Tokens of k and v."""
        return sum(self.segments)

    @property
    def queries(self) -> int:
        """Tokens of q and of the output."""
        return sum(self._rows)

    @property
    def _rows(self) -> tuple[int, ...]:
        """Queries of each segment."""
        pairs = zip(self.segments, self.roles, strict=True)
        return tuple(0 if role == "keys" else length for length, role in pairs)

    @property
    def video_key(self) -> int:
        """The video's first key."""
        return sum(self.segments[: self.video])

    @property
    def video_query(self) -> int:
        """The video's first query."""
        return sum(self._rows[: self.video])

    @property
    def contexts(self) -> tuple[Run, ...]:
        """Keys (start, length) of each segment beside the video, empty ones included."""
        return self._beside(self.segments)

    @property
    def context_queries(self) -> tuple[Run, ...]:
        """Queries (start, length) of each segment beside the video; of length 0 for keys only."""
        return self._beside(self._rows)

    def _beside(self, lengths: tuple[int, ...]) -> tuple[Run, ...]:
        starts = accumulate(lengths, initial=0)
        runs = enumerate(zip(starts, lengths, strict=False))
        return tuple(run for index, run in runs if index != self.video)

    @property
    def context_keys(self) -> int:
        """Tokens of k and v beside the video."""
        return self.keys - self.tiling.tokens

    def pairs(self, heads: int) -> int:
        """(query, key) pairs of so many heads that are computed when all context keys are valid."""
        video = self.tiling.tokens
        beside = video * self.context_keys + (self.queries - video) * self.keys
        kept = sum(kept_pairs(self.tiling, window) for window in self.windows)
        return heads * beside + heads // len(self.windows) * kept

    @property
    def windows(self) -> tuple[Window, ...]:
        """One for each head, or one that all have."""
        return windows_of(self.window, self.head_windows)

    def by_window(self) -> dict[Window, tuple[int, ...]]:
        """Heads that have the same window; only where heads have windows of their own."""
        found: dict[Window, tuple[int, ...]] = {}
        for head, window in enumerate(self.head_windows):
            found[window] = (*found.get(window, ()), head)
        return found

    def with_window(self, window: Window) -> Geometry:
        """The same sequence for heads that all have this window."""
        return replace(self, window=window, head_windows=())

    @property
    def largest_tile(self) -> int:
        """Tokens of the largest tile: that of tile (0, 0, 0)."""
        return self.tiling.count(0, 0, 0)

    def full(self) -> Geometry:
        """The same sequence with a full window: one tile, one run."""
        one = (1, 1, 1)
        return Geometry(self.segments, self.roles, Tiling(self.tiling.grid, one), Window(one))
