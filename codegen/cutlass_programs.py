"""What each C++ kernel's source is made of: the template, the constants and matrix products that depend on its spec, the
layouts of its parameters, and the shared memory that it asks for.

A product is a warpgroup's 64 rows by `columns`, 32 bytes deep: `left` operand from shared memory ("SS") or registers ("RS"),
and which dimension of each operand is contiguous, "K" or "MN" (PTX ISA, "wgmma.mma_async"); of 8-bit operands always "K".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..ir.kernel_spec import KernelSpec
from .cutlass_blocks import BOX, BYTE_STAGES, FP8_KEYS, QUERY_UNIT, row_bytes
from .cutlass_layout import (
    FORWARD,
    FORWARD_FP8,
    FORWARD_TIERS,
    KEY_GRADIENTS,
    QUERY_GRADIENTS,
    ROWS,
    Layout,
)

EXTRA = 1024  # barriers, and the list of the packed rest
TIER_EXTRA = 2048  # those of a second kind of keys, and scores' biases
PART = 64  # columns of dQ that are summed at a time
ONES = 8  # columns of ones beside values in e4m3
KEY_ROWS = 128  # keys of a thread block that owns keys
# Gradients that a kernel whose thread blocks own keys computes, by direction: dK, dV, and the sum of dQ.
KEY_DIRECTIONS = {
    "backward": (True, True, True),
    "backward_kv": (True, True, False),
    "backward_k": (True, False, False),
    "backward_v": (False, True, False),
}


class Product(NamedTuple):
    """bytes: of elements in e4m3, and not of 16 bits."""

    name: str
    columns: int
    form: str
    left: str = "K"
    right: str = "K"
    bytes: bool = False


@dataclass(frozen=True)
class Program:
    """header: of the template. entries: kernels by name and the layout of their parameters. shared: dynamic shared memory of
    each, in bytes.
    """

    header: str
    entries: dict[str, Layout]
    constants: dict[str, int]
    products: tuple[Product, ...]
    shared: int


def program_of(spec: KernelSpec) -> Program:
    """For specs of the "cutlass" emitter, by their direction."""
    if spec.precision != "native":
        return _forward_fp8(spec) if spec.precision == "fp8" else _forward_tiers(spec)
    make = {"forward": _forward, "backward_q": _query_gradients, "backward_rows": _rows}
    return make.get(spec.direction, _key_gradients)(spec)


def _forward(spec: KernelSpec) -> Program:
    return _of_queries(spec, "attention_forward", FORWARD, tensors=1)


def _forward_fp8(spec: KernelSpec) -> Program:
    """Weights times values in two products: the registers don't hold the output of one."""
    head_dim, blocks = spec.head_dim, spec.blocks
    first = head_dim // 2 // 8 * 8
    shared = FP8_KEYS * blocks.m + _byte_stages(spec, blocks.stages) + EXTRA
    products = (
        Product("ByteScoresMma", blocks.n, "SS", bytes=True),
        Product("FirstMma", first, "RS", bytes=True),
        Product("LastMma", head_dim - first + ONES, "RS", bytes=True),
    )
    constants = _constants(spec, shared, blocks.m // QUERY_UNIT)
    constants |= {"kKeys": blocks.n, "kFirst": first, "kByteStages": constants.pop("kStages")}
    entries = {"sta_attention_forward_fp8": FORWARD_FP8}
    return Program("sm90/attention_forward_fp8.cuh", entries, constants, products, shared)


def _forward_tiers(spec: KernelSpec) -> Program:
    """Both of the above in one: stages of keys in e4m3 take the place of those of 16 bits."""
    rows, keys = _forward(spec), _forward_fp8(spec)
    m, n, stages = spec.blocks.m, spec.blocks.n, spec.blocks.stages
    row = row_bytes(spec.head_dim)
    both = max(2 * stages * n * row, _byte_stages(spec, BYTE_STAGES))
    shared = m * (row + FP8_KEYS) + both + EXTRA + TIER_EXTRA
    constants = {**keys.constants, **rows.constants, "kByteStages": BYTE_STAGES}
    constants["kSharedBytes"] = shared
    entries = {"sta_attention_forward_tiers": FORWARD_TIERS}
    products = rows.products + keys.products
    return Program("sm90/attention_forward_tiers.cuh", entries, constants, products, shared)


def _query_gradients(spec: KernelSpec) -> Program:
    return _of_queries(spec, "query_gradients", QUERY_GRADIENTS, tensors=2)


def _of_queries(spec: KernelSpec, name: str, layout: Layout, tensors: int) -> Program:
    """Thread blocks own query rows, of so many tensors."""
    shared = _key_walk_bytes(spec, tensors)
    products = (
        Product("ScoresMma", spec.blocks.n, "SS", "K", "K"),
        Product("OutputMma", spec.head_dim, "RS", "K", "MN"),
    )
    warpgroups = spec.blocks.m // QUERY_UNIT
    constants = _constants(spec, shared, warpgroups, kKeys=spec.blocks.n)
    return Program(f"sm90/{name}.cuh", {f"sta_{name}": layout}, constants, products, shared)


def _key_gradients(spec: KernelSpec) -> Program:
    keys, values, queries = KEY_DIRECTIONS[spec.direction]
    shared = _query_walk_bytes(spec)
    products = (
        Product("ScoresMma", spec.blocks.m, "SS", "K", "K"),
        Product("GradientMma", spec.head_dim, "RS", "K", "MN"),
        Product("QueryMma", PART, "SS", "MN", "MN"),
    )
    flags = {"kKeyGradient": keys, "kValueGradient": values, "kQuerySum": queries}
    constants = _constants(spec, shared, KEY_ROWS // QUERY_UNIT, **flags)
    entries = {"sta_key_gradients": KEY_GRADIENTS}
    return Program("sm90/key_gradients.cuh", entries, constants, products, shared)


def _rows(spec: KernelSpec) -> Program:
    constants = {
        "kBfloat16": spec.dtype == "bf16",
        "kHeadDim": spec.head_dim,
        "kBlockRows": spec.blocks.m,
    }
    entries = {"sta_row_statistics": ROWS, "sta_convert_sum": ROWS}
    return Program("sm90/backward_rows.cuh", entries, constants, (), 0)


def _constants(spec: KernelSpec, shared: int, warpgroups: int, **others: int) -> dict[str, int]:
    return {
        "kBfloat16": spec.dtype == "bf16",
        "kHeadDim": spec.head_dim,
        "kWarpgroups": warpgroups,
        "kStages": spec.blocks.stages,
        "kHeadWindows": spec.head_windows,
        "kSharedBytes": shared,
        **others,
    }


def _key_walk_bytes(spec: KernelSpec, tensors: int) -> int:
    """Query rows of so many tensors, and stages of keys and of values."""
    blocks = spec.blocks
    rows = tensors * blocks.m + 2 * blocks.stages * blocks.n
    return rows * row_bytes(spec.head_dim) + EXTRA


def _byte_stages(spec: KernelSpec, stages: int) -> int:
    """Stages of keys and of values in e4m3, with columns of ones."""
    return stages * FP8_KEYS * (spec.blocks.n + spec.head_dim + ONES)


def _query_walk_bytes(spec: KernelSpec) -> int:
    """Keys and values, stages of queries and of their gradients; dS twice, and float parts of dQ."""
    blocks = spec.blocks
    rows = 2 * KEY_ROWS + 2 * blocks.stages * blocks.m
    parts = -(-spec.head_dim // PART)
    sums = 2 * KEY_ROWS * BOX * 2 + parts * blocks.m * PART * 4
    if spec.direction != "backward":
        sums = 2 * 1024
    # Of each stage: lse and the sum over dO * O of each row; rows of four steps, of 16 each.
    notes = blocks.stages * (blocks.m * 8 + 4 * 4 * 10)
    return rows * row_bytes(spec.head_dim) + sums + notes + EXTRA // 2
