"""The token sequence that one attention call works on: segments, and the video's tiling and window.

A sequence of 512 text tokens and a 3x4x4 video in 1x2x2 tiles has segments (512, 48) with video
index 0 or 1; with the text first, the video starts at token 512. Axis order is (frames, rows,
cols); video tokens are in tile order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ..errors import StaError
from .runs import Run
from .tiling import Tiling
from .window import Window, kept_pairs


@dataclass(frozen=True)
class Geometry:
    """segments: tokens per segment in sequence order. video: index of the video segment."""

    segments: tuple[int, ...]
    video: int
    tiling: Tiling
    window: Window

    def __post_init__(self) -> None:
        if self.segments[self.video] != self.tiling.tokens:
            raise StaError(
                f"the video segment has {self.segments[self.video]} tokens and its grid "
                f"{self.tiling.grid} has {self.tiling.tokens}; pass the (T, H, W) token grid of "
                "this video"
            )

    @property
    def tokens(self) -> int:
        return sum(self.segments)

    @property
    def starts(self) -> tuple[int, ...]:
        """First token of each segment."""
        return tuple(accumulate(self.segments, initial=0))[:-1]

    @property
    def video_start(self) -> int:
        return self.starts[self.video]

    @property
    def contexts(self) -> tuple[Run, ...]:
        """(start, length) of each context segment, empty ones included."""
        runs = zip(self.starts, self.segments, strict=True)
        return tuple(run for index, run in enumerate(runs) if index != self.video)

    @property
    def pairs(self) -> int:
        """(query, key) pairs that are computed when all context keys are valid."""
        video, context = self.tiling.tokens, self.tokens - self.tiling.tokens
        return kept_pairs(self.tiling, self.window) + video * context + context * self.tokens

    @property
    def largest_tile(self) -> int:
        """Tokens of the largest tile: that of tile (0, 0, 0)."""
        return self.tiling.count(0, 0, 0)

    def full(self) -> Geometry:
        """The same sequence with a full window: one tile, one run."""
        one = (1, 1, 1)
        return Geometry(self.segments, self.video, Tiling(self.tiling.grid, one), Window(one))
