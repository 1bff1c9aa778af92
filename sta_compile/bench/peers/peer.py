"""What a peer is, and what peers have in common."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

from ...ir.attention_spec import Triple
from ...ir.tiling import Tiling
from ...ir.window import Window
from ..inputs import Contestant, Inputs
from ..patterns import Neighbourhood, Tiles


class Peer(Protocol):
    @property
    def name(self) -> str:
        """As workloads name it."""

    @property
    def dense(self) -> bool:
        """Does it compute all pairs? Speed-ups are over the fastest peer that does."""

    def refuse(self, inputs: Inputs) -> str:
        """Why it can't run here, or on these, or ""."""

    def prepare(self, inputs: Inputs) -> Contestant:
        """May raise whatever the peer raises: that is then the reason why it is not measured."""


def missing(module: str, package: str) -> str:
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # its parent is missing
        found = None
    return "" if found else f"the package {package} is not installed"


def needs_gpu(inputs: Inputs) -> str:
    return "" if inputs.q.is_cuda else "it needs an NVIDIA GPU"


def window_in_tokens(inputs: Inputs) -> Triple:
    """Extents of the window, in tokens: what it keeps of tiles of the nominal size."""
    w = inputs.workload
    kept = w.tile_window.effective(w.tiling)
    axes = zip(kept, w.tiling.extents, w.grid, strict=True)
    t, h, c = (min(tiles * extent, length) for tiles, extent, length in axes)
    return (t, h, c)


def neighbourhood(inputs: Inputs) -> Neighbourhood:
    """NATTEN's window of the same extents."""
    return Neighbourhood(inputs.workload.grid, window_in_tokens(inputs))


def swin(inputs: Inputs) -> Tiles:
    """Swin's windows of about the same extents: they cut the grid in even parts and do not overlap."""
    grid = inputs.workload.grid
    t, h, w = (
        max(1, round(length / extent))
        for length, extent in zip(grid, window_in_tokens(inputs), strict=True)
    )
    return Tiles(Tiling(grid, (t, h, w)), Window((1, 1, 1)))
