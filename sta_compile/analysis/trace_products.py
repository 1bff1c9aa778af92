"""How axes go through products: linear layers, matrix products, convolutions and attention.

A product keeps the axes that it does not sum over, and states that the two axes it sums over are one.
"""

from __future__ import annotations

import torch.fx

from .attention_calls import operands_of
from .axes import Axis, fresh, set_apart, size_of, unify
from .graph_view import argument, canonical_name, fake_value
from .matrix_products import letters_of
from .trace_dims import DimTrace, Traced, fresh_dims, operand, shape_of


def linear(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims = operand(trace, node)
    return None if dims is None else (*dims[:-1], fresh(shape_of(node)[-1]))


def mixed_linear(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """bitsandbytes::int8_mixed_scaled_mm: the product, and what is kept of the columns too large for int8."""
    dims, made = operand(trace, node), fresh_dims(fake_value(node))
    if dims is None or not isinstance(made, list) or made[0] is None:
        return None
    return [(*dims[:-1], made[0][-1]), *made[1:]]


def row_quantize(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """bitsandbytes::int8_vectorwise_quant: int8 rows, a scale for each, and the columns left out."""
    dims, made = operand(trace, node), fresh_dims(fake_value(node))
    if dims is None or not isinstance(made, list):
        return None
    return [dims, dims[:-1], *made[2:]]


def matmul(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    offset = 1 if canonical_name(node) in ("baddbmm", "addmm") else 0
    a, b = trace.dims(node.args[offset]), trace.dims(node.args[offset + 1])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    if not unify(a[-1], b[-2]):
        return None
    rank = max(len(a), len(b))
    batch: list[Axis] = []
    for position in range(-rank, -2):
        axes = [d[position] for d in (a, b) if len(d) >= -position and d[position]]
        if len(axes) == 2 and not unify(*axes):
            return None
        batch.append(axes[0] if axes else ())
    out = (*batch, a[-2], b[-1])
    extra = trace.dims(node.args[0]) if offset else None
    if extra is not None:
        for axis, other in zip(reversed(out), reversed(extra), strict=False):
            if axis and other:
                trace.relate(node, axis, other)
    return out


def einsum(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    text = str(equation).replace(" ", "")
    if "->" not in text:
        return None
    inputs, output = text.split("->")
    named: dict[str, Axis] = {}
    for letters, tensor in zip(inputs.split(","), operands, strict=True):
        dims = trace.dims(tensor)
        labels = None if dims is None else letters_of(letters, len(dims))
        if dims is None or labels is None:
            return None
        for label, axis in zip(labels, dims, strict=True):
            stretched = label.startswith("...") and not (axis and named.get(label))
            if label in named and not stretched and not unify(named[label], axis):
                return None
            named[label] = named.get(label) or axis
    result = letters_of(output, len(shape_of(node)))
    return None if result is None else tuple(named[label] for label in result)


def outer(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    a, b = operand(trace, node), trace.dims(argument(node, 1, "vec2"))
    return None if a is None or b is None else (*a, *b)


def conv(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """A convolution's output axes; those of a patch embed (stride = kernel) are proved grid axes."""
    dims, name = operand(trace, node), canonical_name(node)
    kernel = shape_of(argument(node, 1, "weight"))[2:]
    stride = argument(node, 3, "stride", 1)
    padding = argument(node, 4, "padding", 0)
    if dims is None or len(dims) != len(kernel) + 2:
        return None
    strides = [stride] * len(kernel) if isinstance(stride, int) else list(stride)
    paddings = [padding] * len(kernel) if isinstance(padding, (int, str)) else list(padding)
    patch = (
        len(kernel) > 1
        and list(kernel) == strides
        and not any(p not in (0, "valid") for p in paddings)
    )
    origin = f"{name} patch embed" if patch else ""
    shape = shape_of(node)
    out: list[Axis] = [dims[0], fresh(shape[1])]
    for axis, size, k in zip(dims[2:], shape[2:], kernel, strict=True):
        new = fresh(size, origin=origin)
        if patch and k == 1 and axis:
            trace.relate(node, new, axis)
        out.append(new)
    if patch:
        set_apart(out[2:])
    return tuple(out)


def multihead(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """F.multi_head_attention_forward: the tokens of its queries, and probabilities that nothing is known of."""
    dims, (out, *_) = operand(trace, node, 0, "query"), fake_value(node)
    return None if dims is None else [(*dims[:-1], fresh(size_of(out.shape[-1]))), None]


def attention(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    operands = operands_of(node)
    if operands is None:
        return None
    q, k, v = map(trace.dims, (operands.q, operands.k, operands.v))
    tokens = operands.order.tokens
    if q is None or k is None or v is None or not unify(k[tokens], v[tokens]):
        return None
    mask = None if operands.mask is None else trace.dims(operands.mask)
    for axis, other in zip((k[tokens], q[tokens]), reversed(mask or ()), strict=False):
        if axis and other:
            trace.relate(node, axis, other)
    trace.relate(node, q[-1], k[-1])
    out, value = (*q[:-1], v[-1]), fake_value(node)
    if not isinstance(value, (tuple, list)):
        return out
    rest = map(fresh_dims, value[1:])
    return [out, *(dims if isinstance(dims, tuple) else None for dims in rest)]
