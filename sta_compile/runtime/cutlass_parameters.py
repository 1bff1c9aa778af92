"""The parameters of one launch of a C++ kernel, in memory.

A launch copies them, so the bytes that describe one set of addresses serve every later launch on them. They are kept, and so
are the tensor maps: a model's tensors come back to the same addresses call after call.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from ..codegen.cutlass_blocks import BOX
from ..codegen.cutlass_layout import MAP_ALIGNMENT, MAP_BYTES, Layout
from .driver import checked, driver

MOST_KEPT = 512  # of maps, and of parameters: under 2 KB each
Values = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Map:
    """A tensor map but for its address. Axes come with the contiguous one first.

    kind: of the elements, "bf16", "fp16" or "fp8". strides: in bytes, of all axes but the first.
    """

    kind: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzled: bool = True


@dataclass(frozen=True)
class Parameters:
    """address: of an array of one pointer, to the parameters: what a launch takes. memory: holds both; never rewritten."""

    address: int
    memory: tuple[Any, ...]


class Arguments:
    """Parameters in memory, for each set of addresses that was launched with.

    maps: in the order of the layout's, each with the index of its tensor. pointers: for fields that are addresses, the index
    of the tensor. tables: tensors that launches share, by the field of their address. values: of all other fields.
    """

    def __init__(
        self,
        layout: Layout,
        maps: Sequence[tuple[int, Map]],
        pointers: Mapping[str, int],
        values: Values,
        tables: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._maps = tuple(maps)
        self._pointers = [(layout.offsets[name], index) for name, index in pointers.items()]
        self._tables = dict(tables or {})  # kept alive
        addresses = {name: [table.data_ptr()] for name, table in self._tables.items()}
        self._template = _packed(layout, {**values, **addresses})
        self._encoded: dict[tuple[int, int], bytes] = {}
        self._kept: dict[tuple[int, ...], Parameters] = {}

    def of(self, tensors: tuple[Tensor | None, ...]) -> Parameters:
        key = tuple([0 if x is None else x.data_ptr() for x in tensors])  # faster than a generator
        found = self._kept.get(key)
        if found is None:
            found = self._make(key)
            if len(self._kept) >= MOST_KEPT:
                self._kept = {}  # another thread's launch holds what it uses
            self._kept[key] = found
        return found

    def _make(self, addresses: tuple[int, ...]) -> Parameters:
        data = bytearray(self._template)
        for index, (source, _) in enumerate(self._maps):
            at = MAP_BYTES * index
            data[at : at + MAP_BYTES] = self._encode(index, addresses[source])
        for offset, source in self._pointers:
            struct.pack_into("<Q", data, offset, addresses[source])
        buffer = ctypes.create_string_buffer(len(data) + MAP_ALIGNMENT)
        at = -(-ctypes.addressof(buffer) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        ctypes.memmove(at, bytes(data), len(data))
        pointer = (ctypes.c_void_p * 1)(at)
        return Parameters(ctypes.addressof(pointer), (buffer, pointer))

    def _encode(self, index: int, address: int) -> bytes:
        key = index, address
        found = self._encoded.get(key)
        if found is None:
            if len(self._encoded) >= MOST_KEPT:
                self._encoded = {}
            found = self._encoded[key] = encode(self._maps[index][1], address)
        return found


def _packed(layout: Layout, values: Values) -> bytes:
    data = bytearray(layout.size)
    for name, kind, count in layout.fields:
        if name in values:
            struct.pack_into(f"<{count}{kind}", data, layout.offsets[name], *values[name])
    return bytes(data)


def strides(name: str, x: Tensor) -> Values:
    """The fields of a tensor [batch, heads, tokens, head_dim] but for its address."""
    axes = zip(("batch", "head", "token"), x.stride()[:3], strict=True)
    return {f"{name}.{axis}": [stride] for axis, stride in axes}


def map_of(x: Tensor, kind: str, rows: int, columns: int = BOX, swizzled: bool = True) -> Map:
    """Of [batch, heads, tokens, head_dim]. rows: tokens of a box. columns: elements of each."""
    batch, heads, tokens, head_dim = x.shape
    # An axis of length 1 may have any stride, of which the driver would still want 16 bytes.
    steps = [
        stride * x.itemsize if size > 1 else -(-head_dim * x.itemsize // 16) * 16
        for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
    ]
    sizes, strides = (head_dim, tokens, heads, batch), (steps[2], steps[1], steps[0])
    return Map(kind, sizes, strides, (columns, rows, 1, 1), swizzled)


def encode(m: Map, address: int) -> bytes:
    """The driver's tensor map: zeros outside of the tensor."""
    cu, kinds, (flat, swizzles, *how) = _encoding()
    sizes, steps, box, ones = (
        list(map(kind, values))
        for kind, values in (
            (cu.cuuint64_t, m.sizes),
            (cu.cuuint64_t, m.strides),
            (cu.cuuint32_t, m.box),
            (cu.cuuint32_t, (1,) * len(m.sizes)),
        )
    )
    made = checked(
        cu.cuTensorMapEncodeTiled(
            *(kinds[m.kind], len(m.sizes), address, sizes, steps, box, ones),
            *(flat, swizzles[m.swizzled], *how),
        )
    )
    return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)


@lru_cache(maxsize=1)
def _encoding() -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """The driver, its names of data types, and how maps are encoded: the swizzle is one of two."""
    cu = driver()
    kinds = {
        "bf16": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp16": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "fp8": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }
    how = (
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        {
            True: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            False: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        },
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return cu, kinds, how
