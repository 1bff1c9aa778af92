"""Which pairs of a row of queries and a key block does a window show? All others are skipped, whatever the router thinks."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from ..ir.tiling import Tiling
from ..ir.window import Window, effective, lo


def inside_window(
    tiling: Tiling, windows: tuple[Window, ...], rows: Tensor, blocks: Tensor
) -> Tensor:
    """bool [windows, rows, blocks]. rows, blocks: int32 [n, 2], runs of tokens of the video, each within a tile."""
    tiles = list(product(*map(range, tiling.tiles)))
    starts = torch.tensor([tiling.start(*tile) for tile in tiles], device=rows.device)
    places = torch.tensor(tiles, device=rows.device)

    def place(runs: Tensor) -> Tensor:
        """[n, 3]: the tile that a run begins in; that of an empty run may begin behind the last tile."""
        return places[torch.searchsorted(starts, runs[:, 0].long(), right=True) - 1]

    of_rows, of_blocks = place(rows), place(blocks)
    found = []
    for window in windows:
        inside = torch.ones(len(rows), len(blocks), dtype=torch.bool, device=rows.device)
        for axis, (n, w) in enumerate(zip(tiling.tiles, window.tiles, strict=True)):
            first = torch.tensor([lo(tile, w, n) for tile in range(n)], device=rows.device)
            first = first[of_rows[:, axis], None]
            inside &= (first <= of_blocks[:, axis]) & (of_blocks[:, axis] < first + effective(n, w))
        found.append(inside)
    return torch.stack(found)
