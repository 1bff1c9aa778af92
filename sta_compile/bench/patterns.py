"""Which keys does each query see? The definitions that outputs are checked against, and that FlexAttention compiles.

A pattern's `sees(device)` is a function (batch, head, query, key) -> bool of index tensors that broadcast, which is what
FlexAttention calls a mask_mod. It is written from the definition of a window, token by token, and shares nothing with
the runs of keys that kernels walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ..ir.attention_spec import Triple
from ..ir.tiling import Tiling
from ..ir.window import Window, kept_pairs

Sees = Callable[[Any, Any, Tensor, Tensor], Tensor]
EVERYWHERE = 1 << 30


class Pattern(Protocol):
    @property
    def pairs(self) -> int:
        """(query, key) pairs that are seen, of all samples."""

    def sees(self, device: torch.device) -> Sees:
        """Its tables lie on `device`."""


@dataclass(frozen=True)
class Everything:
    """Every query sees the first `keys` keys: dense attention, with what pads the text left out."""

    queries: int
    keys: int

    @property
    def pairs(self) -> int:
        return self.queries * self.keys

    def sees(self, device: torch.device) -> Sees:
        return lambda b, h, q, k: (k < self.keys) & (q >= 0)


@dataclass(frozen=True)
class Tiles:
    """A window of tiles around each tile, in tile order; then `text` tokens, of which `valid` are keys of everyone.

    Text queries see every valid key. Swin's windows are tiles of which each sees itself only.
    """

    tiling: Tiling
    window: Window
    text: int = 0
    valid: int = 0

    @property
    def pairs(self) -> int:
        video = self.tiling.tokens
        return (
            kept_pairs(self.tiling, self.window)
            + video * self.valid
            + self.text * (video + self.valid)
        )

    def sees(self, device: torch.device) -> Sees:
        """Without text no table of it is read, so that FlexAttention's masks stay as cheap as they can be."""
        (tile_t, low_t, high_t), (tile_h, low_h, high_h), (tile_w, low_w, high_w) = (
            self._axis(axis, device) for axis in range(3)
        )

        def inside(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
            frames = (low_t[q] <= tile_t[k]) & (tile_t[k] < high_t[q])
            rows = (low_h[q] <= tile_h[k]) & (tile_h[k] < high_h[q])
            cols = (low_w[q] <= tile_w[k]) & (tile_w[k] < high_w[q])
            return frames & rows & cols

        if not self.text:
            return inside
        video = self.tiling.tokens
        return lambda b, h, q, k: (
            inside(b, h, q, k) | ((k >= video) & (k < video + self.valid) & (q >= 0))
        )

    def _axis(self, axis: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token: its tile, and the first tile that it sees and the one after the last. Text keys are in no tile."""
        tiling = self.tiling
        n, width = tiling.tiles[axis], self.window.effective(tiling)[axis]
        raster = torch.tensor(tiling.order())
        below = prod(tiling.grid[axis + 1 :])
        position = raster // below % tiling.grid[axis]
        sizes = tiling.sizes(axis)
        tile = torch.repeat_interleave(torch.arange(n), torch.tensor(sizes))[position]
        low = (tile - self.window.tiles[axis] // 2).clamp(0, n - width)
        beside = torch.full((self.text,), -1)
        table = (
            torch.cat([tile, beside]),
            torch.cat([low, torch.zeros_like(beside)]),
            torch.cat([low + width, torch.full_like(beside, EVERYWHERE)]),
        )
        tile, low, high = (x.to(torch.int32).to(device) for x in table)
        return tile, low, high


@dataclass(frozen=True)
class Samples:
    """A pattern for each sample; `sees` takes the number of one sample."""

    patterns: tuple[Pattern, ...]

    @property
    def pairs(self) -> int:
        return sum(pattern.pairs for pattern in self.patterns)

    def sees(self, device: torch.device) -> Sees:
        each = [pattern.sees(device) for pattern in self.patterns]
        return lambda b, h, q, k: each[b](b, h, q, k)


@dataclass(frozen=True)
class Heads:
    """A pattern for each head. pairs: of one head, on average."""

    patterns: tuple[Pattern, ...]

    @property
    def pairs(self) -> int:
        return sum(pattern.pairs for pattern in self.patterns) // len(self.patterns)

    def sees(self, device: torch.device) -> Sees:
        each = [pattern.sees(device) for pattern in self.patterns]
        return lambda b, h, q, k: each[h](b, h, q, k)


@dataclass(frozen=True)
class Neighbourhood:
    """NATTEN's: a window of `window` tokens around each token, moved inward at borders, in raster order."""

    grid: Triple
    window: Triple

    @property
    def pairs(self) -> int:
        axes = zip(self.grid, self.window, strict=True)
        return prod(length * min(length, w) for length, w in axes)

    def sees(self, device: torch.device) -> Sees:
        _, rows, cols = self.grid

        def inside(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
            frame = self._near(0, q // (rows * cols), k // (rows * cols))
            row = self._near(1, q // cols % rows, k // cols % rows)
            return frame & row & self._near(2, q % cols, k % cols)

        return inside

    def _near(self, axis: int, q: Tensor, k: Tensor) -> Tensor:
        length, width = self.grid[axis], min(self.grid[axis], self.window[axis])
        low = (q - width // 2).clamp(0, length - width)
        return (low <= k) & (k < low + width)
