"""The (T, H, W) grid of video tokens: what shape do N consecutive tokens have?

A video of 81 frames of 720x1280 pixels is a latent of 21x90x160 and, after a (1, 2, 2) patch embed, a token grid of
21x45x80: 75,600 tokens in raster order (frame, then row, then column; columns are contiguous).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenGrid:
    """Token grid after patchify; an image has one frame."""

    frames: int
    rows: int
    cols: int
    evidence: str = ""  # how it was found, for the report: "conv3d patch embed", "option grid", ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, H, W)"""
        return (self.frames, self.rows, self.cols)

    @property
    def tokens(self) -> int:
        return self.frames * self.rows * self.cols

    def __str__(self) -> str:
        return f"{self.frames}x{self.rows}x{self.cols}"
