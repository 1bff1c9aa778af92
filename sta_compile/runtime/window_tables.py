"""What kernels read where heads have windows of their own: small tables in the GPU's memory, made once for a geometry."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from ..codegen.cutlass_blocks import GROUP
from ..ir.geometry import Geometry
from ..ir.runs import box_runs
from ..ir.tiling import Tiling
from ..ir.window import Window, kept_pairs
from ..ir.window_groups import groups_of

MOST_KEPT = 256
ListedBlock = tuple[
    int, int, int, int, int
]  # head, block of the group, group of frames, of rows, of columns


@lru_cache(maxsize=MOST_KEPT)
def table_of(windows: tuple[Window, ...], device: torch.device) -> Tensor:
    """int32 [heads, 3]: windows in tiles."""
    return torch.tensor([window.tiles for window in windows], dtype=torch.int32, device=device)


@lru_cache(maxsize=MOST_KEPT)
def listed_blocks(geometry: Geometry, rows: int) -> tuple[ListedBlock, ...]:
    """Thread blocks of `rows` query rows that all heads of a sample need; heads with the most keys come first."""
    tiling = geometry.tiling
    by_work = sorted(
        geometry.by_window().items(), key=lambda item: kept_pairs(tiling, item[0]), reverse=True
    )
    found: list[ListedBlock] = []
    for window, heads in by_work:
        of_head = _blocks_of_head(tiling, window, rows)
        found += [(head, *block) for head in heads for block in of_head]
    return tuple(found)


def _blocks_of_head(tiling: Tiling, window: Window, rows: int) -> list[tuple[int, int, int, int]]:
    axes = groups_of(tiling, window)
    found = []
    for t, h, w in product(*(range(axis.count) for axis in axes)):
        boxes = [axis.queries(group) for axis, group in zip(axes, (t, h, w), strict=True)]
        (a, i), (b, j), (c, k) = boxes
        runs = box_runs(tiling, (a, b, c), (i, j, k))
        units = sum(-(-length // GROUP) for _, length in runs)
        found += [(block, t, h, w) for block in range(-(-units * GROUP // rows))]
    return found


@lru_cache(maxsize=MOST_KEPT)
def packed_blocks(geometry: Geometry, rows: int, device: torch.device) -> Tensor:
    """int32 [blocks, 4]: `ListedBlock` of cutlass_templates/sm90/work.cuh, whose groups take 16 bits each."""
    packed = [
        (head, block, t | h << 16, w) for head, block, t, h, w in listed_blocks(geometry, rows)
    ]
    return torch.tensor(packed, dtype=torch.int32, device=device)
