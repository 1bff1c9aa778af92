"""From the arguments of an operator to values: what do `segments`, `grid` and `spec` describe?

Worked example: segments [48, 7], grid [3, 4, 4] and "v1 roles=video,context tiles=3,2,2
window=1,3,3 kernel=auto" give a Geometry of 55 tokens whose video, tokens 0..47, is cut into 3x2x2
tiles of 1x2x2 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import StaError
from ..ir.attention_spec import AttentionSpec, Triple
from ..ir.geometry import Geometry
from ..ir.tiling import Tiling
from ..ir.visibility import Visibility
from ..planning.resolve import resolve


def tiling_of(grid: Sequence[int], spec: str) -> Tiling:
    """The tiling of a token grid (T, H, W)."""
    return _tiling(_triple(grid), spec)


def geometry_of(segments: Sequence[int], grid: Sequence[int], spec: str) -> Geometry:
    """Segments, tiling and window of one call; a window that keeps everything is one tile."""
    return _geometry(tuple(map(int, segments)), _triple(grid), spec)


@lru_cache(maxsize=4096)
def _tiling(grid: Triple, spec: str) -> Tiling:
    return resolve(AttentionSpec.parse(spec), grid).tiling


@lru_cache(maxsize=4096)
def _geometry(segments: tuple[int, ...], grid: Triple, spec: str) -> Geometry:
    parsed = AttentionSpec.parse(spec)
    if len(segments) != len(parsed.roles):
        raise StaError(
            f"{len(segments)} segments for the roles {parsed.roles}; pass one length per role"
        )
    plan = resolve(parsed, grid)
    geometry = Geometry(segments, parsed.roles, plan.tiling, plan.window, plan.head_windows)
    tiled = parsed.precision == "tiered"  # which chooses by tiles whatever the window is
    return geometry.full() if plan.is_full and not tiled else geometry


def _triple(grid: Sequence[int]) -> Triple:
    frames, rows, cols = map(int, grid)
    if frames < 1:
        raise StaError(
            f"no frames are left beside those of always_keep: {frames} of {rows}x{cols} tokens; keep fewer, or pass a "
            "longer video"
        )
    return (frames, rows, cols)


def check_kinds(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What can be checked without reading a size: fake tensors with unknown sizes pass too."""
    if not q.dim() == k.dim() == v.dim() == 4:
        raise StaError(
            f"q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dimensions; pass 4-D tensors "
            "[batch, heads, tokens, head_dim]"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise StaError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; cast them to one floating-point dtype"
        )


def check_sizes(q: Tensor, k: Tensor, v: Tensor, visible: Visibility) -> None:
    """Real sizes agree with each other and with the geometry."""
    batch, heads, tokens, _ = q.shape
    kv_heads, geometry = k.shape[1], visible.geometry
    if k.shape != v.shape or (batch, q.shape[3]) != (k.shape[0], k.shape[3]):
        raise StaError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must agree in batch and "
            "head_dim; pass tensors [batch, heads, tokens, head_dim]"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise StaError(
            f"{heads} query heads can't share {kv_heads} key heads; pass a multiple of the key heads"
        )
    if geometry.head_windows and len(geometry.head_windows) != heads:
        raise StaError(
            f"there are {len(geometry.head_windows)} windows for {heads} query heads; pass one for each head"
        )
    for name, have, want in (("q", tokens, geometry.queries), ("k", k.shape[2], geometry.keys)):
        if have != want:
            raise StaError(
                f"{name} has {have} tokens and the segments {geometry.segments} of roles "
                f"{geometry.roles} have {want}; pass segments that add up to the sequence"
            )
    contexts, key_lengths = len(geometry.contexts), visible.key_lengths
    if key_lengths is not None and tuple(key_lengths.shape) != (batch, contexts):
        raise StaError(
            f"key_lengths {tuple(key_lengths.shape)} must be [batch, context segments] = "
            f"[{batch}, {contexts}]; pass one valid length per sample and context segment"
        )
    for name, mask, where, width in (
        ("key_mask", visible.key_mask, "beside", geometry.context_keys),
        ("video_mask", visible.video_mask, "of", geometry.tiling.tokens),
    ):
        if mask is not None and (tuple(mask.shape), mask.dtype) != ((batch, width), torch.bool):
            raise StaError(
                f"{name} {mask.dtype} {tuple(mask.shape)} must be bool [batch, tokens {where} the "
                f"video] = [{batch}, {width}]; pass one flag per sample and key"
            )
    dense = visible.dense
    if dense is not None and (tuple(dense.shape) != (batch,) or dense.dtype != torch.bool):
        raise StaError(
            f"dense {dense.dtype} {tuple(dense.shape)} must be bool [{batch}]; pass one flag per "
            "sample"
        )
