"""ATen's slices as Python writes them, which is what the analyses read.

    aten.slice(x, 1, 0, 9223372036854775807, 2)                  ->   x[:, 0::2]
    aten.slice_scatter(x, part, 1, 0, 9223372036854775807, 2)    ->   y = x.clone(); y[:, 0::2] = part; y

Programs of torch.export are of ATen operators; once edited they are traced to them again.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from ..analysis.graph_view import fake_value
from .fake_values import add_call

_END = 2**63 - 1


def index_in_python(gm: torch.fx.GraphModule) -> None:
    """Edits a graph of ATen operators in place."""
    aten = torch.ops.aten
    for node in list(gm.graph.nodes):
        if node.target == aten.slice.Tensor:
            x, index = node.args[0], _index(node, *node.args[1:])
            with gm.graph.inserting_before(node):
                new = add_call(gm.graph, "call_function", operator.getitem, (x, index), like=node)
        elif node.target == aten.slice_scatter.default:
            (x, part), index = node.args[:2], _index(node, *node.args[2:])
            with gm.graph.inserting_before(node):
                new = add_call(gm.graph, "call_method", "clone", (x,), like=node)
                gm.graph.call_function(operator.setitem, (new, index, part))
        else:
            continue
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)


def _index(
    node: torch.fx.Node, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> tuple[slice, ...]:
    """What stands in brackets. A missing start is the first element, and the largest integer the end."""
    cut = slice(start, None if end == _END else end, None if step == 1 else step)
    return (*[slice(None)] * (dim % fake_value(node).dim()), cut)
