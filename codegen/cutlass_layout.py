"""The parameters of C++ kernels, byte by byte: the twin of the structs in cutlass_templates/sm90.

A launch copies them, tensor maps first. Fields are aligned as in C; an axis and a group of tiles are four integers, a
divisor is three. The source of each kernel asserts these offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

MAP_BYTES = 128
MAP_ALIGNMENT = 64
CONTEXTS = 4  # segments beside the video at most
SIZES = {"Q": 8, "q": 8, "f": 4, "i": 4, "I": 4}


class Field(NamedTuple):
    """number: how many of `kind`, a format character of `struct`."""

    name: str
    kind: str
    number: int = 1


@dataclass(frozen=True)
class Layout:
    """struct: its name in C++. maps: names of its tensor maps, which come first."""

    struct: str
    maps: tuple[str, ...]
    fields: tuple[Field, ...]

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each map and field."""
        found = {name: MAP_BYTES * index for index, name in enumerate(self.maps)}
        at = MAP_BYTES * len(self.maps)
        for name, kind, number in self.fields:
            at = _align(at, SIZES[kind])
            found[name] = at
            at += SIZES[kind] * number
        return found

    @cached_property
    def size(self) -> int:
        """Bytes of the struct."""
        last = self.fields[-1]
        used = self.offsets[last.name] + SIZES[last.kind] * last.number
        return _align(used, MAP_ALIGNMENT if self.maps else 8)


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _tensor(name: str) -> tuple[Field, ...]:
    """An address, and strides of [batch, heads, tokens, head_dim] in elements but for the last."""
    return (
        Field(f"{name}.data", "Q"),
        *(Field(f"{name}.{axis}", "q") for axis in ("batch", "head", "token")),
    )


POINTERS = ("lengths", "dense", "key_mask", "video_mask", "shown")
PROBLEM = tuple(
    Field(f"problem.{name}", kind, number)
    for name, kind, number in (
        *((name, "Q", 1) for name in POINTERS),
        ("scale", "f", 1),
        *((name, "i", 1) for name in ("length_bytes", "batch_heads", "heads", "queries")),
        *((name, "i", 1) for name in ("video_key", "video_query")),
        *((name, "i", 12) for name in ("axis", "groups")),
        *((name, "I", 3) for name in ("by_share", "by_heads")),
        *((name, "I", 3) for name in ("by_context_blocks", "by_video_blocks")),
        *((name, "i", 1) for name in ("context_blocks", "video_blocks")),
        *(("slab_blocks", "I", 9), ("band_blocks", "I", 27), ("group_blocks", "I", 81)),
        *((name, "i", 1) for name in ("contexts", "context_keys")),
        *((f"context_{name}", "i", CONTEXTS) for name in ("column", "key", "length", "query")),
        ("context_rows", "i", CONTEXTS),
        *((name, "Q", 1) for name in ("listed", "windows")),
        *((name, "i", 1) for name in ("listed_blocks", "whole_blocks")),
    )
)
KEY_MAPS = ("keys.k", "keys.v", "keys.k_group", "keys.v_group")
FORWARD = Layout("Parameters", ("q", *KEY_MAPS), (*_tensor("out"), Field("lse", "Q"), *PROBLEM))
SCALES = ("q_scale", "k_scale", "v_scale", "shift")  # addresses
FORWARD_FP8 = Layout(
    "Parameters",
    ("q", *KEY_MAPS),
    (
        *(*_tensor("out"), Field("lse", "Q"), *(Field(name, "Q") for name in SCALES)),
        *(Field("kv_heads", "i"), *PROBLEM),
    ),
)
BYTE_KEY_MAPS = tuple(f"byte_{name}" for name in KEY_MAPS)
LISTS = ("bias", "order", "counts", "blocks", "byte_blocks")  # addresses
FORWARD_TIERS = Layout(
    "TierParameters",
    ("q", *KEY_MAPS, "mean_k", "mean_v", "slope", "q_bytes", *BYTE_KEY_MAPS),
    (
        *(*_tensor("out"), Field("lse", "Q"), *(Field(name, "Q") for name in (*SCALES, *LISTS))),
        *(Field(name, "i") for name in ("kv_heads", "key_blocks", "mean_blocks")),
        *PROBLEM,
    ),
)
KEY_GRADIENTS = Layout(
    "BackwardParameters",
    ("q", "dout", "k", "v", "q_group", "dout_group"),
    (
        *(Field("statistics", "Q"), Field("dq_sum", "Q"), Field("part_rows", "q")),
        *(*_tensor("dk"), *_tensor("dv"), Field("softmax_scale", "f")),
        *(Field("kv_heads", "i"), Field("tile_blocks", "i"), *PROBLEM),
    ),
)
QUERY_GRADIENTS = Layout(
    "QueryGradientParameters",
    ("q", "dout", *KEY_MAPS),
    (Field("statistics", "Q"), *_tensor("dq"), Field("softmax_scale", "f"), *PROBLEM),
)
ROWS = Layout(
    "RowParameters",
    (),
    (
        *(*_tensor("out"), *_tensor("dout"), Field("lse", "Q"), Field("statistics", "Q")),
        *(Field("dq_sum", "Q"), *_tensor("dq"), Field("softmax_scale", "f")),
        *(Field(name, "i") for name in ("batch_heads", "heads", "queries")),
    ),
)
