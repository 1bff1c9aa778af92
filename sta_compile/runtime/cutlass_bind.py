"""From tensors to the launch of the forward kernel: its parameters and its thread blocks."""

from __future__ import annotations

from typing import NamedTuple

from ..codegen.cutlass_blocks import FP8_KEYS, GROUP
from ..codegen.cutlass_layout import FORWARD, FORWARD_FP8, POINTERS, SCALES
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from .cutlass_parameters import Arguments, map_of, strides
from .cutlass_problem import problem_tables, problem_values, thread_blocks
from .tensors import QuantizedTensors, Tensors, may_be_dense

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
    m, n = spec.blocks.m, spec.blocks.n
    blocks = thread_blocks(m, geometry, heads, may_be_dense(tensors))
    boxes = ((0, q, GROUP), (1, k, n), (2, v, n), (1, k, GROUP), (2, v, GROUP))
    arguments = Arguments(
        FORWARD,
        [(index, map_of(x, spec.dtype, rows)) for index, x, rows in boxes],
        pointers_of(Tensors._fields, ("out.data", "out"), ("lse", "lse")),
        {
            **strides("out", out),
            **problem_values(m, geometry, blocks, (batch, heads, k.shape[1]), scale, key_lengths),
        },
        problem_tables(geometry, q.device, m),
    )
    return Binding(blocks.total(batch, heads), arguments)


def bind_fp8(
    spec: KernelSpec, tensors: QuantizedTensors, geometry: Geometry, scale: float
) -> Binding:
    q, k, v, out = tensors[:4]
    batch, heads, *_ = q.shape
    m = spec.blocks.m
    blocks = thread_blocks(m, geometry, heads, may_be_dense(tensors))
    maps = (
        (0, map_of(q, "fp8", GROUP, FP8_KEYS)),
        (1, map_of(k, "fp8", FP8_KEYS, FP8_KEYS)),
        (2, map_of(v, "fp8", spec.head_dim, FP8_KEYS)),
        (1, map_of(k, "fp8", GROUP, FP8_KEYS)),
        (2, map_of(v, "fp8", spec.head_dim, GROUP, swizzled=False)),
    )
    shape = batch, heads, k.shape[1]
    named = *((name, name) for name in ("lse", *SCALES)), ("out.data", "out")
    arguments = Arguments(
        FORWARD_FP8,
        maps,
        pointers_of(QuantizedTensors._fields, *named),
        {
            **strides("out", out),
            "kv_heads": [k.shape[1]],
            **problem_values(m, geometry, blocks, shape, scale, tensors.key_lengths),
        },
        problem_tables(geometry, out.device, m),
    )
    return Binding(blocks.total(batch, heads), arguments)
