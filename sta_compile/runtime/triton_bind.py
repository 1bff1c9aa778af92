"""From tensors to the arguments of the Triton forward kernel.

Works on tensors of any device, so that the interpreter can run what a GPU would be given. What does
not depend on addresses is a `Binding`, which serves all calls of the same shapes and strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import Any

import torch
from torch import Tensor

from ..codegen.tensor_map import TensorMap
from ..ir.geometry import Geometry
from ..ir.kernel_spec import STRIDE_UNIT, KernelSpec
from .tensors import Nvfp4Tensors, Tensors, map_of
from .window_tables import table_of

MAX_CONTEXTS = 4
LOG2_E = log2(2.718281828459045)
NO_MAP = TensorMap(0, 0, 0, 0, 0, 0)
FLAGS = Tensors._fields[5:]
NO_SCALES = [None] * 6


@dataclass(frozen=True)
class Binding:
    """programs: size of the launch grid. numbers: the kernel's arguments between tensors and constants.

    descriptors: the fields of the TMA descriptors of q, k, v but for their memory, of those that have one
    (KernelSpec.boxes). windows: int32 [heads, 3].
    """

    programs: int
    descriptors: tuple[dict[str, Any], ...]
    numbers: tuple[float, ...]
    windows: Tensor | None

    def arguments(self, tensors: Tensors | Nvfp4Tensors) -> list[Any]:
        """In the kernel's order, up to its constants."""
        q, k, v, out, lse, *rest = tensors
        scales = rest[: -len(FLAGS)] or NO_SCALES
        key_lengths, *flags = rest[-len(FLAGS) :]
        described: list[Any] = [None, None, None]
        for index, (x, fields) in enumerate(zip((q, k, v), self.descriptors, strict=False)):
            described[index] = _descriptor(x, fields)
        bytes_ = [None if x is None else x.view(torch.uint8) for x in flags]
        tables = key_lengths, *bytes_, self.windows, *scales
        return [*described, q, k, v, out, lse, *tables, *self.numbers]


def _descriptor(base: Tensor, fields: dict[str, Any]) -> Any:
    """A Triton TensorDescriptor, without its checks: the same fields passed them with another base."""
    descriptor = object.__new__(_class_of_descriptors())
    descriptor.__dict__.update(fields, base=base)
    return descriptor


@lru_cache(maxsize=1)
def _class_of_descriptors() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


def _checked_fields(base: Tensor, m: TensorMap, block: list[int]) -> dict[str, Any]:
    made = _class_of_descriptors()(base, [m.rows, m.cols], [m.stride, 1], block)
    return {name: value for name, value in vars(made).items() if name != "base"}


def bind(
    spec: KernelSpec, tensors: Tensors | Nvfp4Tensors, geometry: Geometry, scale: float
) -> Binding:
    """The tensors are read for their shapes and strides only, and `out` for its device."""
    q, k, v, out, *_ = tensors
    batch, heads, _, _ = q.shape
    maps = [NO_MAP, NO_MAP, NO_MAP]
    descriptors: list[dict[str, Any]] = []
    if spec.loads == "tma":
        found = [map_of(x) for x in (q, k, v)]
        maps = [m for m in found if m is not None]
        assert len(maps) == 3, "the TMA emitter refuses tensors that are not one matrix"
        for x, m, box in zip((q, k, v), maps, spec.boxes, strict=False):
            descriptors.append(_checked_fields(x, m, list(box)))
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
    windows = table_of(geometry.head_windows, out.device) if geometry.head_windows else None
    return Binding(count, tuple(descriptors), numbers, windows)


def programs(spec: KernelSpec, geometry: Geometry, batch_heads: int) -> tuple[int, int, int]:
    """(programs in all, blocks of a tile, blocks of all contexts of one head)."""
    m = spec.blocks.m
    per_tile = -(-geometry.largest_tile // m)
    contexts = sum(-(-length // m) for _, length in geometry.context_queries)
    per_head = geometry.tiling.count_tiles * per_tile + contexts
    return batch_heads * per_head, per_tile, contexts
