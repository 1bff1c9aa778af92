"""A copy of a value with the strides that a reader expects.

Expected of [2, 144, 16] are strides (2304, 1, 144): `x.permute(0, 2, 1).clone().permute(0, 2, 1)`. Where a dimension is
that of a slice, the copy is padded and sliced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from .fake_values import VALUE, add_call
from .signature import TensorSignature, differs, signature


def copy_before(reader: Node, value: Node, wanted: TensorSignature) -> Node | None:
    """A copy of a value in the order of the wanted strides; None if that does not give these strides."""
    strides = wanted.strides or ()
    if not strides or not all(isinstance(stride, int) for stride in strides):
        return None
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    inverse = [order.index(dim) for dim in range(len(order))]
    nodes: list[Node] = []

    def call(name: str, *args: Any, **kwargs: Any) -> None:
        read = (nodes[-1] if nodes else value, *args)
        nodes.append(add_call(reader.graph, "call_method", name, read, kwargs, like=value))

    with reader.graph.inserting_before(reader):
        call("permute", order)
        padding = _padding([wanted.shape[dim] for dim in order], [strides[dim] for dim in order])
        if any(padding):
            amounts = [amount for more in reversed(padding) for amount in (0, more)]
            padded = (nodes[-1], amounts)
            nodes.append(add_call(reader.graph, "call_function", F.pad, padded, like=value))
            for dim, more in enumerate(padding):
                if more:
                    call("narrow", dim, 0, wanted.shape[order[dim]])
        else:
            call("clone", memory_format=torch.contiguous_format)
        call("permute", inverse)
    if differs(wanted, signature(nodes[-1].meta[VALUE]), "strides") is None:
        return nodes[-1]
    for node in reversed(nodes):
        reader.graph.erase_node(node)
    return None


def _padding(sizes: list[Any], strides: list[int]) -> list[int]:
    """How much longer each dimension, outermost first, was in the dense tensor that these strides are a slice of."""
    longer = [0] * len(sizes)
    for dim in range(1, len(sizes)):
        inner, size = strides[dim], sizes[dim]
        if isinstance(size, int) and inner > 0 and strides[dim - 1] % inner == 0:
            longer[dim] = max(0, strides[dim - 1] // inner - size)
    return longer
