"""From tensors to the parameters of a C++ kernel.

A launch copies the parameters, so the bytes that describe one set of addresses serve every later launch on them. They
are kept, and so are the tensor maps: a model's tensors come back to the same addresses call after call.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import log2
from typing import Any

from torch import Tensor

from ..codegen.cutlass_blocks import BOX, GROUP, QUERY_UNIT
from ..codegen.cutlass_source import CONTEXTS, FIELDS, MAPS, POINTERS, parameters_bytes
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from ..ir.window_groups import group_blocks, groups_of
from .driver import checked, driver
from .tensors import Tensors

LOG2_E = log2(2.718281828459045)
ALIGNMENT = 64  # of a tensor map
ADDRESSES = 10  # of Tensors: q, k and v, which have maps, and what POINTERS names
MOST_KEPT = 512  # of maps, and of parameters: under 1 KB each


@dataclass(frozen=True)
class Map:
    """A 4-D tensor map but for its address. source: index in Tensors. Axes are (head_dim, tokens, heads, batch)."""

    source: int
    kind: str
    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]  # in bytes, of the last three axes
    rows: int  # of a box, of BOX elements each


@dataclass(frozen=True)
class Parameters:
    """address: of an array of one pointer, to the parameters: what a launch takes. memory: holds both; never rewritten."""

    address: int
    memory: tuple[Any, ...]


class Arguments:
    """Parameters in memory, for each set of addresses that was launched with."""

    def __init__(self, maps: tuple[Map, ...], numbers: bytes) -> None:
        self._maps = maps
        self._numbers = numbers
        self._encoded: dict[tuple[int, int], bytes] = {}
        self._kept: dict[tuple[int, ...], Parameters] = {}

    def of(self, tensors: Tensors) -> Parameters:
        key = tuple(0 if x is None else x.data_ptr() for x in tensors[:ADDRESSES])
        found = self._kept.get(key)
        if found is None:
            found = self._make(key)
            if len(self._kept) >= MOST_KEPT:
                self._kept = {}  # another thread's launch holds what it uses
            self._kept[key] = found
        return found

    def _make(self, addresses: tuple[int, ...]) -> Parameters:
        maps = b"".join(
            self._encode(index, addresses[m.source]) for index, m in enumerate(self._maps)
        )
        pointers = struct.pack(f"<{len(POINTERS)}Q", *addresses[-len(POINTERS) :])
        data = (maps + pointers + self._numbers).ljust(parameters_bytes(), b"\0")
        buffer = ctypes.create_string_buffer(len(data) + ALIGNMENT)
        at = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
        ctypes.memmove(at, data, len(data))
        pointer = (ctypes.c_void_p * 1)(at)
        return Parameters(ctypes.addressof(pointer), (buffer, pointer))

    def _encode(self, index: int, address: int) -> bytes:
        key = index, address
        found = self._encoded.get(key)
        if found is None:
            if len(self._encoded) >= MOST_KEPT:
                self._encoded = {}
            found = self._encoded[key] = encode(self._maps[index], address)
        return found


def maps_of(spec: KernelSpec, tensors: Tensors) -> tuple[Map, ...]:
    """In the order of MAPS."""
    rows = {
        "q": QUERY_UNIT,
        "k": spec.blocks.n,
        "v": spec.blocks.n,
        "k_group": GROUP,
        "v_group": GROUP,
    }
    sources = {"q": 0, "k": 1, "v": 2, "k_group": 1, "v_group": 2}
    return tuple(
        map_of(tensors[sources[name]], sources[name], spec.dtype, rows[name])  # type: ignore[arg-type]
        for name in MAPS
    )


def map_of(x: Tensor, source: int, kind: str, rows: int) -> Map:
    batch, heads, tokens, head_dim = x.shape
    # An axis of length 1 may have any stride, of which the driver would still want 16 bytes.
    steps = [
        stride * x.itemsize if size > 1 else -(-head_dim * x.itemsize // 16) * 16
        for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
    ]
    return Map(source, kind, (head_dim, tokens, heads, batch), (steps[2], steps[1], steps[0]), rows)


def numbers(spec: KernelSpec, tensors: Tensors, geometry: Geometry, scale: float) -> bytes:
    """The parameters behind the addresses."""
    q, k, _, out, _, key_lengths, *_ = tensors
    batch, heads, *_ = q.shape
    tiling, window = geometry.tiling, geometry.window
    blocks = group_blocks(tiling, window, QUERY_UNIT, spec.blocks.m // QUERY_UNIT)
    contexts, video = thread_blocks(spec, geometry, may_be_dense(tensors))
    keys, rows = list(geometry.contexts), list(geometry.context_queries)
    unused = [0] * (CONTEXTS - len(keys))
    values: dict[str, list[float]] = {
        "out_batch": [out.stride(0)],
        "out_head": [out.stride(1)],
        "out_token": [out.stride(2)],
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
        "by_share": divisor(heads // k.shape[1]),
        "by_heads": divisor(heads),
        "by_context_blocks": divisor(contexts),
        "by_video_blocks": divisor(video),
        "context_blocks": [contexts],
        "video_blocks": [video],
        "slab_blocks": [x for n in blocks.slab for x in divisor(n)],
        "band_blocks": [x for band in blocks.band for n in band for x in divisor(n)],
        "group_blocks": [x for t in blocks.group for h in t for n in h for x in divisor(n)],
        "contexts": [len(keys)],
        "context_keys": [geometry.context_keys],
        "context_column": [*list(accumulate((n for _, n in keys), initial=0))[:-1], *unused],
        "context_key": [*(start for start, _ in keys), *unused],
        "context_length": [*(length for _, length in keys), *unused],
        "context_query": [*(start for start, _ in rows), *unused],
        "context_rows": [*(length for _, length in rows), *unused],
    }
    fields = FIELDS[len(POINTERS) :]
    form = "<" + "".join(f"{count}{kind}" for _, kind, count in fields)
    return struct.pack(form, *(x for name, _, _ in fields for x in values[name]))


def may_be_dense(tensors: Tensors) -> bool:
    """A sample whose video_mask hides keys is dense."""
    return tensors.dense is not None or tensors.video_mask is not None


def thread_blocks(spec: KernelSpec, geometry: Geometry, dense: bool) -> tuple[int, int]:
    """(blocks of all contexts, blocks of the video) of one head. dense: some samples may be."""
    m = spec.blocks.m
    tiling = geometry.tiling
    video = group_blocks(tiling, geometry.window, QUERY_UNIT, m // QUERY_UNIT).video
    if dense:  # then the video is one run of rows
        video = max(video, -(-tiling.tokens // m))
    return sum(-(-rows // m) for _, rows in geometry.context_queries), video


def divisor(value: int) -> list[float]:
    """(value, multiplier, shift) for an exact division of numbers below 2^31: see key_runs.cuh."""
    if value < 2:
        return [value, 0, 0]
    bits = (value - 1).bit_length()
    return [value, -(-(2 ** (31 + bits)) // value), bits - 1]


def encode(m: Map, address: int) -> bytes:
    """The driver's tensor map: 128-byte swizzle, zeros outside of the tensor."""
    cu, kinds, how = _encoding()
    sizes, strides, box, steps = (
        list(map(kind, values))
        for kind, values in (
            (cu.cuuint64_t, m.sizes),
            (cu.cuuint64_t, m.strides),
            (cu.cuuint32_t, (BOX, m.rows, 1, 1)),
            (cu.cuuint32_t, (1, 1, 1, 1)),
        )
    )
    made = checked(
        cu.cuTensorMapEncodeTiled(kinds[m.kind], 4, address, sizes, strides, box, steps, *how)
    )
    return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)


@lru_cache(maxsize=1)
def _encoding() -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """The driver, its names of data types, and what all maps have in common."""
    cu = driver()
    kinds = {
        "bf16": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp16": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }
    how = (
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return cu, kinds, how
