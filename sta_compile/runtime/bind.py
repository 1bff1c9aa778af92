"""From tensors to the arguments of the Triton forward kernel.

Works on tensors of any device, so that the interpreter can run what a GPU would be given. What does
not depend on addresses is a `Binding`, which serves all calls of the same shapes and strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Any

import torch
from torch import Tensor

from ..codegen.tensor_map import TensorMap, tensor_map
from ..ir.geometry import Geometry
from ..ir.kernel_spec import STRIDE_UNIT, KernelSpec

MAX_CONTEXTS = 4
LOG2_E = log2(2.718281828459045)
NO_MAP = TensorMap(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Binding:
    """programs: size of the launch grid. numbers: the kernel's arguments between tensors and constants.

    descriptors: shape, strides and block shape of the TMA descriptors of q, k, v; or none.
    """

    programs: int
    descriptors: tuple[tuple[list[int], list[int], list[int]], ...]
    numbers: tuple[float, ...]

    def arguments(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        key_lengths: Tensor | None,
        dense: Tensor | None,
        key_mask: Tensor | None,
        video_mask: Tensor | None,
        shown: Tensor | None,
    ) -> list[Any]:
        """In the kernel's order, up to its constants. shown: bool [batch], samples whose video_mask hides nothing."""
        flags = [
            None if x is None else x.view(torch.uint8) for x in (dense, key_mask, video_mask, shown)
        ]
        described: list[Any] = [None, None, None]
        if self.descriptors:
            from triton.tools.tensor_descriptor import TensorDescriptor

            pairs = zip((q, k, v), self.descriptors, strict=True)
            described = [TensorDescriptor(x, *descriptor) for x, descriptor in pairs]
        return [*described, q, k, v, out, lse, key_lengths, *flags, *self.numbers]


def bind(
    spec: KernelSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    geometry: Geometry,
    scale: float,
) -> Binding:
    """The tensors are read for their shapes and strides only."""
    batch, heads, _, _ = q.shape
    maps = [NO_MAP, NO_MAP, NO_MAP]
    descriptors: list[tuple[list[int], list[int], list[int]]] = []
    if spec.loads == "tma":
        found = [map_of(x) for x in (q, k, v)]
        maps = [m for m in found if m is not None]
        assert len(maps) == 3, "the TMA emitter refuses tensors that are not one matrix"
        for m, rows in zip(maps, (spec.blocks.m, spec.blocks.n, spec.blocks.n), strict=True):
            descriptors.append(([m.rows, m.cols], [m.stride, 1], [rows, spec.padded_head_dim]))
    strides = [s // STRIDE_UNIT for x in (q, k, v, out) for s in x.stride()[:3]]
    offsets = [o for m in maps for o in (m.row_batch, m.row_head, m.col_head)]
    count, per_tile, contexts = programs(spec, geometry, batch * heads)
    pairs = zip(geometry.contexts, geometry.context_queries, strict=True)
    segments = [n for keys, queries in pairs for n in (*keys, *queries)]
    segments += [0] * (4 * MAX_CONTEXTS - len(segments))
    numbers = (
        scale * LOG2_E,
        heads,
        heads // k.shape[1],
        *strides,
        *offsets,
        geometry.queries,
        geometry.video_key,
        geometry.video_query,
        geometry.context_keys,
        *geometry.tiling.grid,
        *geometry.tiling.tiles,
        *geometry.window.tiles,
        batch * heads,
        per_tile,
        contexts,
        *segments,
    )
    return Binding(count, tuple(descriptors), numbers)


def map_of(x: Tensor) -> TensorMap | None:
    return tensor_map(tuple(x.shape), x.stride(), x.itemsize, x.data_ptr())


def is_aligned(x: Tensor) -> bool:
    """Whether a kernel can read x: contiguous rows that start at 16 bytes and at 8 elements."""
    batch, head, token, last = x.stride()
    apart = (batch | head | token) % STRIDE_UNIT == 0
    return last == 1 and apart and x.data_ptr() % 16 == 0


def programs(spec: KernelSpec, geometry: Geometry, batch_heads: int) -> tuple[int, int, int]:
    """(programs in all, blocks of a tile, blocks of all contexts of one head)."""
    m = spec.blocks.m
    per_tile = -(-geometry.largest_tile // m)
    contexts = sum(-(-length // m) for _, length in geometry.context_queries)
    per_head = geometry.tiling.count_tiles * per_tile + contexts
    return batch_heads * per_head, per_tile, contexts
