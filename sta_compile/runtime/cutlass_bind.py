"""From tensors to the launch of the forward kernel: its parameters and its thread blocks."""

from __future__ import annotations

from typing import NamedTuple

from ..codegen.cutlass_blocks import GROUP
from ..codegen.cutlass_layout import FORWARD, POINTERS
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from .cutlass_parameters import Arguments, map_of, strides
from .cutlass_problem import problem_tables, problem_values, thread_blocks
from .tensors import Tensors, may_be_dense

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
