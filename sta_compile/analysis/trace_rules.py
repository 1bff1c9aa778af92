"""How the axes of an operation's output follow from the axes of its inputs; one function per kind of operation.

A rule returns the output's axes, or None when it can't tell, which makes the node opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx

from .attention_names import MULTIHEAD, ORDERS
from .axes import (
    Axis,
    axis_size,
    fresh,
    resolve,
    same_size,
    size_of,
)
from .frames_in_turn import joined_pieces
from .graph_view import argument, canonical_name, fake_value, is_tensor
from .joined_axes import concat
from .reshaped_axes import regroup
from .trace_dims import DimTrace, Traced, broadcast, fresh_dims, operand, pointwise, shape_of
from .trace_index import (
    gather,
    getitem,
    index_select,
    narrow,
    select,
    slices,
    split_dim,
    write_rows,
)
from .trace_padding import pad, pad_sequence
from .trace_products import (
    attention,
    conv,
    einsum,
    linear,
    matmul,
    mixed_linear,
    multihead,
    outer,
    row_quantize,
)

Rule = Callable[[DimTrace, torch.fx.Node], "Traced | None"]


def _dim_args(node: torch.fx.Node, first: int, name: str) -> list[int]:
    """Integers given as `op(x, 0, 2, 1)`, `op(x, (0, 2, 1))` or `op(x, dims=(0, 2, 1))`."""
    value: Any = node.kwargs.get(name, node.args[first:])
    if isinstance(value, (tuple, list)) and len(value) == 1 and isinstance(value[0], (tuple, list)):
        value = value[0]
    return [int(v) for v in (value if isinstance(value, (tuple, list)) else [value])]


def same(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    return operand(trace, node)


def transform(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """A norm over the last axes, whose weight and bias have these axes too."""
    dims = operand(trace, node)
    for position, name in ((2, "weight"), (3, "bias")):
        parameter = trace.dims(argument(node, position, name))
        for axis, other in zip(reversed(dims or ()), reversed(parameter or ()), strict=False):
            if axis and other:
                trace.relate(node, axis, other)
    return dims


def group_norm(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """Groups are ranges of the second axis, so nothing of it can be told from one channel's place."""
    dims = operand(trace, node)
    return None if dims is None else (dims[0], fresh(axis_size(dims[1])), *dims[2:])


def new_axes(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    return fresh_dims(fake_value(node))


def view(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims = operand(trace, node)
    value = fake_value(node)
    if dims is None or not isinstance(value, torch.Tensor):
        return None
    if value.dtype != fake_value(argument(node, 0, "input")).dtype:  # view(dtype)
        return dims if len(dims) == value.dim() else None
    return regroup(dims, shape_of(node))


def permute(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims = operand(trace, node)
    return None if dims is None else tuple(dims[d] for d in _dim_args(node, 1, "dims"))


def transpose(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims = operand(trace, node)
    if dims is None:
        return None
    name = canonical_name(node)
    if name in ("t", "T", "mT"):
        if len(dims) > 2 and name != "mT":
            return None
        first, second = (-2, -1) if len(dims) > 1 else (0, 0)
    else:
        first, second = int(argument(node, 1, "dim0")), int(argument(node, 2, "dim1"))
    out = list(dims)
    out[first], out[second] = out[second], out[first]
    return tuple(out)


def movedim(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims = operand(trace, node)
    source, target = argument(node, 1, "source"), argument(node, 2, "destination")
    if dims is None:
        return None
    sources = [source] if isinstance(source, int) else list(source)
    targets = [target] if isinstance(target, int) else list(target)
    rank = len(dims)
    moved = {t % rank: s % rank for s, t in zip(sources, targets, strict=True)}
    rest = iter(d for d in range(rank) if d not in moved.values())
    return tuple(dims[moved[d]] if d in moved else dims[next(rest)] for d in range(rank))


def expand(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims = operand(trace, node)
    if dims is None:
        return None
    shape = shape_of(node)
    dims = ((),) * (len(shape) - len(dims)) + dims
    return tuple(
        axis if same_size(axis_size(axis), size) else fresh(size)
        for axis, size in zip(dims, shape, strict=True)
    )


def repeat(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """`repeat` puts copies one after the other: axis n -> (copies, n)."""
    dims = operand(trace, node)
    if dims is None:
        return None
    shape = shape_of(node)
    dims = ((),) * (len(shape) - len(dims)) + dims
    out: list[Axis] = []
    for axis, size in zip(dims, shape, strict=True):
        have = axis_size(axis)
        if same_size(have, size):
            out.append(axis)
        elif not axis:
            out.append(fresh(size))
        elif isinstance(have, int) and isinstance(size, int) and have and size % have == 0:
            out.append(fresh(size // have) + axis)
        else:
            return None
    return tuple(out)


def repeat_interleave(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """Each element is repeated in place: axis n -> (n, copies)."""
    dims, dim = operand(trace, node), argument(node, 2, "dim")
    copies = argument(node, 1, "repeats")
    if dim is None and dims is not None and len(dims) == 1:
        dim = 0
    if dims is None or dim is None or is_tensor(copies):
        return None
    out = list(dims)
    out[dim] = dims[dim] + fresh(size_of(fake_value(copies)))
    return tuple(out)


def squeeze_or_unsqueeze(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims = operand(trace, node)
    return None if dims is None else regroup(dims, shape_of(node))


def cat(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    tensors = [t for t in argument(node, 0, "tensors") if trace.dims(t) is not None]
    tensors = [t for t in tensors if fake_value(t).dim() > 1 or shape_of(t) != (0,)]
    dim = argument(node, 1, "dim", 0)
    known = [trace.dims(t) for t in tensors]
    if not known or any(d is None for d in known):
        return None
    dim %= len(known[0])  # type: ignore[arg-type]
    out: list[Axis] = []
    for position in range(len(known[0])):  # type: ignore[arg-type]
        axes = [d[position] for d in known if d is not None]
        if position == dim:
            out.append(concat(joined_pieces(trace, node, tensors, axes)))
        else:
            for other in axes[1:]:
                trace.relate(node, axes[0], other)
            out.append(resolve(axes[0]))
    return tuple(out)


def stack(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    tensors = argument(node, 0, "tensors")
    dims = broadcast(trace, node, tensors)
    if dims is None:
        return None
    dim = argument(node, 1, "dim", 0) % (len(dims) + 1)
    return (
        (*dims[:dim], fresh(len(tensors)), *dims[dim:])
        if len(tensors) > 1
        else (*dims[:dim], (), *dims[dim:])
    )


def split(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    return slices(trace, argument(node, 0, "input"), split_dim(node), fake_value(node))


def unbind(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims, dim = operand(trace, node), argument(node, 1, "dim", 0)
    if dims is None:
        return None
    dim %= len(dims)
    return [dims[:dim] + dims[dim + 1 :] for _ in fake_value(node)]


def reduction(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims = operand(trace, node)
    if dims is None:
        return None
    value = fake_value(node)
    first = 2 if canonical_name(node) in ("linalg_vector_norm", "norm", "quantile") else 1
    which = argument(node, first, "dim", node.kwargs.get("axis"))
    if is_tensor(which) or "other" in node.kwargs:  # max(x, y)
        return pointwise(trace, node)
    which = range(len(dims)) if which is None else [which] if isinstance(which, int) else which
    reduced = {d % len(dims) for d in which} if len(dims) else set()
    keep = bool(argument(node, first + 1, "keepdim", False))
    out = tuple(() if i in reduced else a for i, a in enumerate(dims) if keep or i not in reduced)
    return [out] * len(value) if isinstance(value, (tuple, list)) else out


def meshgrid(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    tensors = node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args
    known = [trace.dims(t) for t in tensors]
    if node.kwargs.get("indexing") != "ij" or any(d is None or len(d) != 1 for d in known):
        return None
    axes = tuple(d[0] for d in known if d is not None)
    return [axes for _ in known]


def complex_view(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims = operand(trace, node)
    if dims is None:
        return None
    return dims[:-1] if canonical_name(node) == "view_as_complex" else (*dims, fresh(2))


def pixel_unshuffle(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """[*, c, h p, w q] -> [*, c p q, h, w], for patches of p x q pixels."""
    dims = operand(trace, node)
    if dims is None:
        return None
    patch = size_of(fake_value(argument(node, 1, "downscale_factor")))
    rows, columns = shape_of(node)[-2:]
    cut = regroup(dims[-2:], (rows, patch, columns, patch))
    return (*dims[:-3], (*dims[-3], *cut[1], *cut[3]), cut[0], cut[2])


def pixel_shuffle(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """[*, c p q, h, w] -> [*, c, h p, w q], for patches of p x q pixels."""
    dims = operand(trace, node)
    if dims is None:
        return None
    patch = size_of(fake_value(argument(node, 1, "upscale_factor")))
    channels, p, q = regroup(dims[-3:-2], (shape_of(node)[-3], patch, patch))
    return (*dims[:-3], channels, (*dims[-2], *p), (*dims[-1], *q))


def embedding(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """Rows of a table by index: `F.embedding(index, table)` and `aten.embedding(table, index)`."""
    first, second = (
        node.args[0],
        node.args[1] if len(node.args) > 1 else argument(node, 1, "weight"),
    )
    index = first if not fake_value(first).is_floating_point() else second
    dims = trace.dims(index)
    return None if dims is None else (*dims, fresh(shape_of(node)[-1]))


_GROUPS: Sequence[tuple[Rule, str]] = (
    (view, "view reshape flatten unflatten view_as reshape_as ravel"),
    (squeeze_or_unsqueeze, "squeeze unsqueeze"),
    (permute, "permute"),
    (transpose, "transpose t T mT"),
    (movedim, "movedim"),
    (expand, "expand expand_as broadcast_to"),
    (repeat, "repeat tile"),
    (repeat_interleave, "repeat_interleave"),
    (cat, "cat"),
    (stack, "stack"),
    (pad_sequence, "pad_sequence"),
    (pad, "pad constant_pad_nd"),
    (
        split,
        "split chunk tensor_split split_with_sizes unsafe_split unsafe_chunk hsplit vsplit dsplit",
    ),
    (unbind, "unbind"),
    (getitem, "getitem"),
    (narrow, "narrow"),
    (index_select, "index_select"),
    (gather, "gather take_along_dim"),
    (write_rows, "index_copy index_add index_fill scatter scatter_add scatter_reduce"),
    (select, "select"),
    (
        reduction,
        "sum mean amax amin max min any all prod std var norm linalg_vector_norm argmax argmin "
        "logsumexp",
    ),
    (same, "softmax log_softmax normalize"),
    (transform, "layer_norm rms_norm"),
    (group_norm, "group_norm"),
    (linear, "linear"),
    (mixed_linear, "int8_mixed_scaled_mm"),
    (row_quantize, "int8_vectorwise_quant"),
    (matmul, "matmul bmm mm baddbmm addmm"),
    (einsum, "einsum"),
    (outer, "outer"),
    (conv, "conv1d conv2d conv3d"),
    (attention, " ".join(ORDERS)),
    (multihead, MULTIHEAD),
    (pixel_unshuffle, "pixel_unshuffle"),
    (pixel_shuffle, "pixel_shuffle"),
    (meshgrid, "meshgrid"),
    (complex_view, "view_as_complex view_as_real"),
    (embedding, "embedding"),
    (same, "zeros_like ones_like full_like empty_like"),
    (new_axes, "zeros ones full empty new_zeros new_ones new_full new_empty scalar_tensor"),
    (new_axes, "arange linspace tensor rand randn logspace"),
)
RULES: dict[str, Rule] = {name: rule for rule, names in _GROUPS for name in names.split()}
