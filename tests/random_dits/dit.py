"""What a random video transformer is made of: a value that can be printed, read back and shrunk.

    Dit(grid=(2, 6, 8), text=(0, 5), rope="complex").build()        a module; .inputs() are its inputs

Defaults are the plainest choices, and a drawn Dit prints only what differs from them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.random_dits.model import RandomDit

Triple = tuple[int, int, int]
CHANNELS = 3
FREQUENCIES = (2, 1, 1)  # of frames, rows and columns: half of a head dim of 8

PATCHIFY = ("conv3d", "conv2d", "linear", "packed outside")
UNPATCHIFY = ("reshape", "unflatten", "einsum", "packed")
HELD = ("[batch, tokens, width]", "[tokens, batch, width]", "[batch, frames, rows, cols, width]")
NORM = ("layer", "rms", "spelled out")
ROPE = ("none", "pairs written", "complex", "halves", "stacked", "in place", "per head")
TABLES = ("expand", "meshgrid", "input")
ROPE_OF_TEXT = ("cut", "written", "padded")
POSITIONS = ("none", "once", "in every block")
MODULATION = (
    "none", "broadcast", "per token", "per frame", "frames expanded", "frames apart", "first frame"
)  # fmt: skip
ATTENTION = ("sdpa", "keywords", "matmul", "baddbmm", "einsum", "3-D", "heads beside tokens")
PROJECTION = ("separate", "fused", "fused per head", "fewer key heads")
FEED_FORWARD = ("none", "linear", "gated", "conv2d")
BESIDE = ("none", "residuals", "control", "second stream")
REGION = ("none", "checkpoint", "nested")
OPTIONS = {
    "patchify": PATCHIFY, "unpatchify": UNPATCHIFY, "held": HELD, "norm": NORM, "rope": ROPE, "tables": TABLES,
    "rope_of_text": ROPE_OF_TEXT, "positions": POSITIONS, "modulation": MODULATION, "attention": ATTENTION,
    "projection": PROJECTION, "feed_forward": FEED_FORWARD, "beside": BESIDE, "region": REGION,
}  # fmt: skip


@dataclass(frozen=True)
class Dit:
    """grid: frames, rows and columns of tokens. text: tokens before and after the video in the sequence of attention.

    joined: text and video are one stream from the start; else each has its own and they are joined for attention alone.
    cross: tokens of a prompt with an attention of its own. bodies: names of `bodies.BODIES` as (place, name).
    """

    grid: Triple = (2, 6, 6)
    batch: int = 2
    layers: int = 1
    patch: Triple = (1, 1, 1)
    patchify: str = PATCHIFY[0]
    unpatchify: str = UNPATCHIFY[0]
    text: tuple[int, int] = (0, 0)
    joined: bool = True
    cross: int = 0
    held: str = HELD[0]
    norm: str = NORM[0]
    rope: str = ROPE[0]
    tables: str = TABLES[0]
    rope_of_text: str = ROPE_OF_TEXT[0]
    positions: str = POSITIONS[0]
    modulation: str = MODULATION[0]
    attention: str = ATTENTION[0]
    projection: str = PROJECTION[0]
    normed_heads: bool = False
    feed_forward: str = FEED_FORWARD[0]
    beside: str = BESIDE[0]
    region: str = REGION[0]
    bodies: tuple[tuple[str, str], ...] = ()
    tile: Triple = (1, 2, 2)

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Dit({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @property
    def tokens(self) -> int:
        frames, rows, cols = self.grid
        return frames * rows * cols

    @property
    def options(self) -> dict[str, Any]:
        return {"tile": self.tile, "window": (1, 1, 1)}

    def build(self) -> RandomDit:
        from tests.random_dits.model import RandomDit

        return RandomDit(self)

    def inputs(self) -> dict[str, Any]:
        """Tensors by their name in `RandomDit.forward`; the same for the same Dit."""
        from tests.random_dits.model import HEAD_DIM, WIDTH

        draw = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        def latent() -> Tensor:
            if self.patchify == "packed outside":
                return normal(self.batch, self.tokens, self._patch_size)
            sizes = (g * p for g, p in zip(self.grid, self.patch, strict=True))
            return normal(self.batch, CHANNELS, *sizes)

        frames = self.modulation in ("per frame", "frames expanded", "frames apart")
        steps = (
            (self.tokens,) if self.modulation == "per token" else (self.grid[0],) if frames else ()
        )
        given: dict[str, Any] = {"latent": latent()}
        if self.modulation != "none":
            given["timestep"] = normal(self.batch, *steps).abs()
        if sum(self.text):
            given["text"] = normal(self.batch, sum(self.text), WIDTH)
        if self.cross:
            given["prompt"] = normal(self.batch, self.cross, WIDTH)
        if self.rope not in ("none", "per head") and self.tables == "input":
            given["angles"] = normal(self.tokens, HEAD_DIM // 2)
        if self.beside == "residuals":
            given["residuals"] = [normal(self.batch, self.tokens, WIDTH) for _ in range(2)]
        if self.beside in ("control", "second stream"):
            given["control"] = latent()
        if self.needs_sizes:
            given["sizes"] = list(self.grid)
        return given

    @property
    def _patch_size(self) -> int:
        depth, height, width = self.patch
        return CHANNELS * depth * height * width

    @property
    def needs_sizes(self) -> bool:
        """Are frames, rows and columns given as integers?"""
        return self.patchify == "packed outside"

    @property
    def shows_grid(self) -> bool:
        """Does a graph of this model prove its grid, whatever the bodies do?"""
        made = self.rope not in ("none", "per head") and self.tables != "input"
        return 1 not in self.grid and (self.unpatchify != "packed" or made or self.cuts_latent)

    @property
    def cuts_latent(self) -> bool:
        return self.patchify != "packed outside"
