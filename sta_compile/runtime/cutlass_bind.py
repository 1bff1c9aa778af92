"""From tensors to the launch of the forward kernel: its parameters and its thread blocks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..codegen.cutlass_blocks import FP8_KEYS, GROUP
from ..codegen.cutlass_layout import FORWARD, FORWARD_FP8, FORWARD_TIERS, LISTS, POINTERS, SCALES
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from ..ir.window import Window
from .cutlass_parameters import Arguments, Map, map_of, strides
from .cutlass_problem import problem_tables, problem_values, thread_blocks
from .tensors import QuantizedTensors, Tensors, TieredTensors, may_be_dense

FLAGS = ("key_lengths", "dense", "key_mask", "video_mask", "shown")  # of Tensors, by POINTERS


class Binding(NamedTuple):
    """blocks: thread blocks of a launch. arguments: take the tensors, in the order of their tuple."""

    blocks: int
    arguments: Arguments


def pointers_of(fields: tuple[str, ...], *named: tuple[str, str]) -> dict[str, int]:
    """Index in `fields` of the tensor behind each address of the problem and of (parameter, tensor) `named`."""
    pairs = [(f"problem.{p}", name) for p, name in zip(POINTERS, FLAGS, strict=True)]
    return {parameter: fields.index(name) for parameter, name in (*pairs, *named)}


def bind_forward(spec: KernelSpec, tensors: Tensors, geometry: Geometry, scale: float) -> Binding:
    q, k, v, out, _, key_lengths, *_ = tensors
    batch, heads, *_ = q.shape
    m = spec.blocks.m
    blocks = thread_blocks(m, geometry, heads, may_be_dense(tensors))
    arguments = Arguments(
        FORWARD,
        _maps(spec, q, k, v),
        pointers_of(Tensors._fields, ("out.data", "out"), ("lse", "lse")),
        {
            **strides("out", out),
            **problem_values(m, geometry, blocks, (batch, heads, k.shape[1]), scale, key_lengths),
        },
        problem_tables(geometry, q.device, m),
    )
    return Binding(blocks.total(batch, heads), arguments)


def _maps(spec: KernelSpec, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[int, Map]]:
    """Of q's rows, and of key blocks and of groups."""
    n = spec.blocks.n
    boxes = ((0, q, GROUP), (1, k, n), (2, v, n), (1, k, GROUP), (2, v, GROUP))
    return [(index, map_of(x, spec.dtype, rows)) for index, x, rows in boxes]


def _byte_maps(q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> list[tuple[int, Map]]:
    """Of q's rows, and of key blocks and of groups, all in e4m3. first: which tensor q is; k and v follow."""
    head_dim = q.shape[-1]
    return [
        (first, map_of(q, "fp8", GROUP, FP8_KEYS)),
        (first + 1, map_of(k, "fp8", FP8_KEYS, FP8_KEYS)),
        (first + 2, map_of(v, "fp8", head_dim, FP8_KEYS)),
        (first + 1, map_of(k, "fp8", GROUP, FP8_KEYS)),
        (first + 2, map_of(v, "fp8", head_dim, GROUP, swizzled=False)),
    ]


def bind_fp8(
    spec: KernelSpec, tensors: QuantizedTensors, geometry: Geometry, scale: float
) -> Binding:
    q, k, v, out = tensors[:4]
    batch, heads, *_ = q.shape
    m = spec.blocks.m
    blocks = thread_blocks(m, geometry, heads, may_be_dense(tensors))
    shape = batch, heads, k.shape[1]
    named = *((name, name) for name in ("lse", *SCALES)), ("out.data", "out")
    arguments = Arguments(
        FORWARD_FP8,
        _byte_maps(q, k, v),
        pointers_of(QuantizedTensors._fields, *named),
        {
            **strides("out", out),
            "kv_heads": [k.shape[1]],
            **problem_values(m, geometry, blocks, shape, scale, tensors.key_lengths),
        },
        problem_tables(geometry, out.device, m),
    )
    return Binding(blocks.total(batch, heads), arguments)


def bind_tiers(
    spec: KernelSpec, tensors: TieredTensors, geometry: Geometry, scale: float
) -> Binding:
    """Thread blocks take the rows of one tile: `tier_rows` has them in this order."""
    named = {name: index for index, name in enumerate(TieredTensors._fields)}
    batch, heads, *_ = tensors.q.shape
    kv_heads, key_blocks = tensors.mean_k.shape[1:3]
    m, n = spec.blocks.m, spec.blocks.n
    geometry = by_tile(geometry)
    blocks = thread_blocks(m, geometry, heads, may_be_dense(tensors))
    means = [
        (named[name], map_of(getattr(tensors, name), spec.dtype, n))
        for name in ("mean_k", "mean_v", "slope")
    ]
    bytes_ = _byte_maps(tensors.q_bytes, tensors.k_bytes, tensors.v_bytes, named["q_bytes"])
    pointers = *((name, name) for name in ("lse", *SCALES, *LISTS)), ("out.data", "out")
    arguments = Arguments(
        FORWARD_TIERS,
        [*_maps(spec, tensors.q, tensors.k, tensors.v), *means, *bytes_],
        pointers_of(TieredTensors._fields, *pointers),
        {
            **strides("out", tensors.out),
            "kv_heads": [kv_heads],
            "key_blocks": [key_blocks],
            "mean_blocks": [-(-key_blocks // n)],
            **problem_values(
                m, geometry, blocks, (batch, heads, kv_heads), scale, tensors.key_lengths
            ),
        },
    )
    return Binding(blocks.total(batch, heads), arguments)


def by_tile(geometry: Geometry) -> Geometry:
    """With windows of one tile, so that no thread block has rows of two."""
    return geometry.with_window(Window((1, 1, 1)))
