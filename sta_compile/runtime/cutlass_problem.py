"""The part of the parameters that all C++ kernels share: `struct Problem` of cutlass_templates/sm90/problem.cuh."""

from __future__ import annotations

from itertools import accumulate
from math import log2
from typing import NamedTuple

import torch
from torch import Tensor

from ..codegen.cutlass_blocks import GROUP
from ..codegen.cutlass_layout import CONTEXTS
from ..ir.geometry import Geometry
from ..ir.window_groups import group_blocks, groups_of
from .cutlass_parameters import Values
from .window_tables import listed_blocks, packed_blocks, table_of

LOG2_E = log2(2.718281828459045)


class ThreadBlocks(NamedTuple):
    """contexts: of all contexts of one head. video: of one head, or of a sample if heads have windows of their own.

    Then listed of these are in the list that a sample reads which is not dense, and whole are of one head in a dense one.
    """

    contexts: int
    video: int
    listed: int = 0
    whole: int = 0

    def total(self, batch: int, heads: int) -> int:
        return batch * (heads * self.contexts + (self.video if self.listed else heads * self.video))


def thread_blocks(rows: int, geometry: Geometry, heads: int, may_be_dense: bool) -> ThreadBlocks:
    """Thread blocks of `rows` query rows each.

    may_be_dense: some samples may see the whole video; a sample whose video_mask hides keys does.
    """
    tiling = geometry.tiling
    whole = -(-tiling.tokens // rows)  # the video of a dense sample is one run of rows
    contexts = sum(-(-length // rows) for _, length in geometry.context_queries)
    if geometry.head_windows:
        listed = len(listed_blocks(geometry, rows))
        return ThreadBlocks(
            contexts, max(listed, heads * whole) if may_be_dense else listed, listed, whole
        )
    video = group_blocks(tiling, geometry.window, GROUP, rows // GROUP).video
    return ThreadBlocks(contexts, max(video, whole) if may_be_dense else video)


def problem_tables(
    geometry: Geometry, device: torch.device, rows: int | None = None
) -> dict[str, Tensor]:
    """What addresses in the problem point to, but for the call's own tensors. rows: query rows that a thread block owns."""
    if not geometry.head_windows:
        return {}
    tables = {"problem.windows": table_of(geometry.head_windows, device)}
    if rows is not None:
        tables["problem.listed"] = packed_blocks(geometry, rows, device)
    return tables


def problem_values(
    rows: int,
    geometry: Geometry,
    blocks: ThreadBlocks,
    shape: tuple[int, int, int],
    scale: float,
    key_lengths: Tensor | None,
) -> Values:
    """rows: query rows of a thread block. shape: (batch, heads, key heads)."""
    tiling, window = geometry.tiling, geometry.window
    grouped = group_blocks(tiling, window, GROUP, rows // GROUP)
    batch, heads, kv_heads = shape
    keys, queries = list(geometry.contexts), list(geometry.context_queries)
    unused = [0] * (CONTEXTS - len(keys))
    values: dict[str, list[float]] = {
        "scale": [scale * LOG2_E],
        "length_bytes": [0 if key_lengths is None else key_lengths.element_size()],
        "batch_heads": [batch * heads],
        "heads": [heads],
        "queries": [geometry.queries],
        "video_key": [geometry.video_key],
        "video_query": [geometry.video_query],
        "axis": [
            x
            for length, n in zip(tiling.grid, tiling.tiles, strict=True)
            for x in (length, n, length // n, length % n)
        ],
        "groups": [
            x for a in groups_of(tiling, window) for x in (a.tiles, a.half, a.width, a.count)
        ],
        "by_share": divisor(heads // kv_heads),
        "by_heads": divisor(heads),
        "by_context_blocks": divisor(blocks.contexts),
        "by_video_blocks": divisor(blocks.video),
        "context_blocks": [blocks.contexts],
        "video_blocks": [blocks.video],
        "slab_blocks": [x for n in grouped.slab for x in divisor(n)],
        "band_blocks": [x for band in grouped.band for n in band for x in divisor(n)],
        "group_blocks": [x for t in grouped.group for h in t for n in h for x in divisor(n)],
        "contexts": [len(keys)],
        "context_keys": [geometry.context_keys],
        "context_column": [*list(accumulate((n for _, n in keys), initial=0))[:-1], *unused],
        "context_key": [*(start for start, _ in keys), *unused],
        "context_length": [*(length for _, length in keys), *unused],
        "context_query": [*(start for start, _ in queries), *unused],
        "context_rows": [*(length for _, length in queries), *unused],
        "listed_blocks": [blocks.listed],
        "whole_blocks": [blocks.whole],
    }
    return {f"problem.{name}": value for name, value in values.items()}


def divisor(value: int) -> list[float]:
    """(value, multiplier, shift) for an exact division of numbers below 2^31: see key_runs.cuh."""
    if value < 2:
        return [value, 0, 0]
    bits = (value - 1).bit_length()
    return [value, -(-(2 ** (31 + bits)) // value), bits - 1]
