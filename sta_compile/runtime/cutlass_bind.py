"""From tensors to the parameters of a C++ kernel.

A launch copies the parameters, so the bytes that describe one set of addresses serve every later launch on them. They
are kept, and so are the tensor maps: a model's tensors come back to the same addresses call after call.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import Any

from torch import Tensor

from ..codegen.cutlass_blocks import BOX, GROUP, QUERY_UNIT
from ..codegen.cutlass_source import FIELDS, MAPS, params_bytes
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from .driver import checked, driver
from .tensors import Tensors

LOG2_E = log2(2.718281828459045)
ALIGNMENT = 64  # of a tensor map
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
        q, k, v, out, lse, *_ = tensors
        key = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()
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
        data = (maps + struct.pack("<2Q", *addresses[3:5]) + self._numbers).ljust(
            params_bytes(), b"\0"
        )
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
        "k_tail": GROUP,
        "v_tail": GROUP,
    }
    sources = {"q": 0, "k": 1, "v": 2, "k_tail": 1, "v_tail": 2}
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
    q, k, _, out, *_ = tensors
    tiling = geometry.tiling
    values: dict[str, float] = {
        "out_batch": out.stride(0),
        "out_head": out.stride(1),
        "out_token": out.stride(2),
        "scale": scale * LOG2_E,
        "heads": q.shape[1],
        "share": q.shape[1] // k.shape[1],
        "queries": geometry.queries,
        "tile_blocks": -(-geometry.largest_tile // spec.blocks.m),
    }
    values |= zip(("frames", "rows", "cols"), tiling.grid, strict=True)
    values |= zip(("tiles_t", "tiles_h", "tiles_w"), tiling.tiles, strict=True)
    values |= zip(("window_t", "window_h", "window_w"), geometry.window.tiles, strict=True)
    fields = FIELDS[2:]  # out and lse are addresses
    form = "<" + "".join(kind for _, kind in fields)
    return struct.pack(form, *(values[name] for name, _ in fields))


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
