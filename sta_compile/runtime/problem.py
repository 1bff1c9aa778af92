"""From tensors to the problem that emitters are asked about."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import product

import torch

from ..codegen.emitter import Problem
from ..ir.geometry import Geometry
from ..ir.runs import key_runs
from .target import detect
from .tensors import DTYPES, LENGTHS, Tensors, boxed, map_of


def problem_of(
    tensors: Tensors,
    geometry: Geometry,
    scale: float,
    device: torch.device | None = None,
    precision: str = "native",
) -> Problem:
    """device: what the tensors stand for, if they are on meta. precision: as in AttentionSpec."""
    q, k, v, _, _, key_lengths, dense, key_mask, video_mask, _ = tensors
    return Problem(
        target=detect(device or q.device),
        dtype=DTYPES.get(q.dtype, str(q.dtype)),
        head_dim=q.shape[3],
        contexts=len(geometry.contexts),
        lengths="" if key_lengths is None else LENGTHS.get(key_lengths.dtype, "i64"),
        dense=dense is not None,
        masked=key_mask is not None,
        video_masked=video_mask is not None,
        head_windows=bool(geometry.head_windows),
        scale=scale,
        query_rows=query_rows(geometry),
        key_runs=runs_of_tiles(geometry),
        mapped=all(map_of(x) is not None for x in (q, k, v)),
        boxed=all(boxed(x) for x in (q, k, v)),
        precision=precision,
    )


@lru_cache(maxsize=4096)
def query_rows(geometry: Geometry) -> tuple[tuple[int, int], ...]:
    """(rows, how many units) of tiles, by size class, and contexts."""
    tiling = geometry.tiling
    sizes = [Counter(tiling.sizes(axis)) for axis in range(3)]
    units: Counter[int] = Counter()
    for (t, a), (h, b), (w, c) in product(*(axis.items() for axis in sizes)):
        units[t * h * w] += a * b * c
    for _, length in geometry.context_queries:
        units[length] += 1
    return tuple(units.items())


@lru_cache(maxsize=4096)
def runs_of_tiles(geometry: Geometry) -> tuple[tuple[tuple[int, ...], int], ...]:
    """(lengths of the video runs that a tile reads, how many tiles, of all heads if windows differ, read such runs)."""
    found: Counter[tuple[int, ...]] = Counter()
    heads = Counter(geometry.windows)
    for tile, (window, count) in product(
        product(*map(range, geometry.tiling.tiles)), heads.items()
    ):
        runs = key_runs(geometry.tiling, window, tile)
        found[tuple(sorted((length for _, length in runs), reverse=True))] += count
    return tuple(found.items())
