"""A copy of a value with the strides that a reader expects.

Expected of [2, 144, 16] are strides (2304, 1, 144): `x.permute(0, 2, 1).clone().permute(0, 2, 1)`. Where a dimension is
that of a slice, the copy is padded and sliced.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.nn import functional as F

from .._sizes import whole_quotient
from .fake_values import VALUE, add_call
from .signature import Symbolic, TensorSignature, differs, signature


def copy_before(reader: Node, value: Node, wanted: TensorSignature) -> Node | None:
    """A copy of a value in the order of the wanted strides; None if that does not give these strides."""
    hints = [n for stride in wanted.strides or () if (n := _hint(stride)) is not None]
    if not hints or len(hints) < len(wanted.shape):
        return None
    order = sorted(range(len(hints)), key=lambda dim: -hints[dim])
    inverse = [order.index(dim) for dim in range(len(order))]
    nodes: list[Node] = []

    def call(name: str, *args: Any, **kwargs: Any) -> None:
        read = (nodes[-1] if nodes else value, *args)
        nodes.append(add_call(reader.graph, "call_method", name, read, kwargs, like=value))

    with reader.graph.inserting_before(reader):
        call("permute", order)
        padding = _padding(wanted, order)
        if any(padding):
            amounts = [amount for more in reversed(padding) for amount in (0, more)]
            padded = (nodes[-1], amounts)
            nodes.append(add_call(reader.graph, "call_function", F.pad, padded, like=value))
            for dim, more in enumerate(padding):
                if more:
                    whole = (slice(None),) * dim
                    index = (nodes[-1], (*whole, slice(None, -more)))
                    nodes.append(
                        add_call(reader.graph, "call_function", operator.getitem, index, like=value)
                    )
        else:
            call("clone", memory_format=torch.contiguous_format)
        call("permute", inverse)
    if differs(wanted, signature(nodes[-1].meta[VALUE]), "strides") is None:
        return nodes[-1]
    for node in reversed(nodes):
        reader.graph.erase_node(node)
    return None


def _padding(wanted: TensorSignature, order: list[int]) -> list[int]:
    """How much longer each dimension, outermost first, was in the dense tensor that the strides are a slice of."""
    sizes = [_expression(wanted.shape[dim]) for dim in order]
    strides = [_expression((wanted.strides or ())[dim]) for dim in order]
    longer = [0] * len(sizes)
    for dim in range(1, len(sizes)):
        whole = None if strides[dim] == 0 else whole_quotient(strides[dim - 1], strides[dim])
        more = 0 if whole is None else sympy.expand(whole - sizes[dim])
        if sympy.sympify(more).is_Integer:
            longer[dim] = max(0, int(more))
    return longer


def _expression(size: Any) -> Any:
    return size.expression if isinstance(size, Symbolic) else size


def _hint(size: Any) -> int | None:
    """A number in this place of the order; None if it depends on data."""
    if not isinstance(size, Symbolic):
        return int(size)
    return int(size.value.node.hint) if size.value.node.has_hint() else None
