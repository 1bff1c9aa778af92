"""From tensors to the launches of the backward kernels: their parameters and their thread blocks."""

from __future__ import annotations

from ..codegen.cutlass_blocks import GROUP, QUERY_UNIT
from ..codegen.cutlass_layout import KEY_GRADIENTS, QUERY_GRADIENTS, ROWS
from ..codegen.cutlass_programs import KEY_ROWS
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from .cutlass_bind import Binding, pointers_of
from .cutlass_parameters import Arguments, Map, Values, map_of, strides
from .cutlass_problem import ThreadBlocks, problem_tables, problem_values, thread_blocks
from .tensors import GradientTensors, may_be_dense

FIELDS = GradientTensors._fields


def bind_gradients(
    spec: KernelSpec, entry: str, tensors: GradientTensors, geometry: Geometry, scale: float
) -> Binding:
    """entry: a kernel of the spec's program."""
    if spec.direction == "backward_rows":
        return _rows(spec, entry, tensors, scale)
    if spec.direction == "backward_q":
        return _query_gradients(spec, tensors, geometry, scale)
    return _key_gradients(spec, tensors, geometry, scale)


def _rows(spec: KernelSpec, entry: str, tensors: GradientTensors, scale: float) -> Binding:
    batch, heads, queries, _ = tensors.q.shape
    values: Values = {
        **strides("out", tensors.out),
        **strides("dout", tensors.dout),
        **strides("dq", tensors.dq),
        **{"softmax_scale": [scale], "batch_heads": [batch * heads], "heads": [heads]},
        "queries": [queries],
    }
    names = ("out", "dout", "lse", "statistics", "dq_sum", "dq")
    at = {f"{x}.data" if x in ("out", "dout", "dq") else x: FIELDS.index(x) for x in names}
    # Statistics have one more row.
    rows = batch * heads * queries + (entry == "sta_row_statistics")
    return Binding(-(-rows // spec.blocks.m), Arguments(ROWS, (), at, values))


def _query_gradients(
    spec: KernelSpec, tensors: GradientTensors, geometry: Geometry, scale: float
) -> Binding:
    m, n = spec.blocks.m, spec.blocks.n
    batch, heads, *_ = tensors.q.shape
    blocks = thread_blocks(m, geometry, heads, may_be_dense(tensors))
    arguments = Arguments(
        QUERY_GRADIENTS,
        _maps(spec, tensors, q=GROUP, dout=GROUP, k=n, v=n, k_group=GROUP, v_group=GROUP),
        pointers_of(FIELDS, ("statistics", "statistics"), ("dq.data", "dq")),
        {
            **strides("dq", tensors.dq),
            "softmax_scale": [scale],
            **_problem(m, tensors, geometry, blocks, scale),
        },
        problem_tables(geometry, tensors.q.device, m),
    )
    return Binding(blocks.total(batch, heads), arguments)


def _key_gradients(
    spec: KernelSpec, tensors: GradientTensors, geometry: Geometry, scale: float
) -> Binding:
    batch, heads, queries, _ = tensors.q.shape
    kv_heads = tensors.k.shape[1]
    tile_blocks = -(-geometry.largest_tile // KEY_ROWS)
    contexts = sum(-(-length // KEY_ROWS) for _, length in geometry.contexts)
    blocks = ThreadBlocks(contexts, geometry.tiling.count_tiles * tile_blocks)
    m = spec.blocks.m
    arguments = Arguments(
        KEY_GRADIENTS,
        _maps(
            spec,
            tensors,
            **{"q": m, "dout": m, "k": QUERY_UNIT, "v": QUERY_UNIT},
            **{"q_group": GROUP, "dout_group": GROUP},
        ),
        pointers_of(
            FIELDS,
            *(("statistics", "statistics"), ("dq_sum", "dq_sum")),
            *(("dk.data", "dk"), ("dv.data", "dv")),
        ),
        {
            **strides("dk", tensors.dk),
            **strides("dv", tensors.dv),
            **{"part_rows": [batch * heads * queries], "softmax_scale": [scale]},
            **{"kv_heads": [kv_heads], "tile_blocks": [tile_blocks]},
            **_problem(QUERY_UNIT, tensors, geometry, blocks, scale),
        },
        problem_tables(geometry, tensors.q.device),
    )
    return Binding(blocks.total(batch, kv_heads), arguments)


def _maps(spec: KernelSpec, tensors: GradientTensors, **rows: int) -> list[tuple[int, Map]]:
    """(index of the tensor, map) by rows of a box; a name's part before "_" is the tensor."""
    names = [(name.partition("_")[0], count) for name, count in rows.items()]
    return [
        (FIELDS.index(name), map_of(getattr(tensors, name), spec.dtype, count))
        for name, count in names
    ]


def _problem(
    rows: int,
    tensors: GradientTensors,
    geometry: Geometry,
    blocks: ThreadBlocks,
    scale: float,
) -> Values:
    batch, heads, *_ = tensors.q.shape
    shape = batch, heads, tensors.k.shape[1]
    return problem_values(rows, geometry, blocks, shape, scale, tensors.key_lengths)
