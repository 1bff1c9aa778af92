"""Give graph outputs the strides that they had before the edits.

Tokens that come out of a patch embed as a transposed [batch, channels, tokens] keep these strides through every residual
addition, and a caller may rely on them; a conversion returns contiguous tokens. The repair is one copy:

    x [2, 144, 16], strides (2304, 16, 1), was (2304, 1, 144)   ->   x.permute(0, 2, 1).contiguous().permute(0, 2, 1)

An output that was a slice (the video of a block's [text, video]) becomes the slice of a padded copy.

    x [2, 144, 16], strides (2304, 16, 1), was (2416, 16, 1)    ->   pad(x, (0, 0, 0, 7)).narrow(1, 0, 144)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.nn import functional as F

from .fake_values import VALUE, add_call
from .signature import TensorSignature, differs, signature
from .verify import Recorded, Violation


def repair_outputs(
    module: GraphModule, violations: Iterable[Violation], before: Recorded
) -> list[Violation]:
    """Copy outputs to their old strides where these are those of a slice or dense; return the violations that are left."""
    violations = list(violations)
    changed = {v.node for v in violations if v.kind == "strides"}
    if not changed:
        return violations
    output = module.graph.output_node()
    was: list[Any] = []
    map_aggregate(before.entries[output].args, was.append)
    old = iter(was)
    copies: dict[Node, Node] = {}
    failed: set[Node] = set()

    def repaired(value: Any) -> Any:
        source = next(old)
        if value not in changed or not isinstance(source, Node):
            return value
        wanted = before.entries[source].signature
        if differs(wanted, signature(value.meta[VALUE]), "strides") is None:
            return value
        if value not in copies or differs(wanted, signature(copies[value].meta[VALUE]), "strides"):
            copy = _copy(output, value, wanted)
            if copy is None:
                failed.add(value)
                return value
            copies[value] = copy
        return copies[value]

    output.args = map_aggregate(output.args, repaired)
    return [v for v in violations if v.kind != "strides" or v.node in failed]


def _copy(output: Node, value: Node, wanted: TensorSignature) -> Node | None:
    """A copy of a value in the order of the wanted strides; None if that does not give these strides."""
    strides = wanted.strides or ()
    if not strides or not all(isinstance(stride, int) for stride in strides):
        return None
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    inverse = [order.index(dim) for dim in range(len(order))]
    nodes: list[Node] = []

    def call(name: str, *args: Any) -> None:
        read = nodes[-1] if nodes else value
        nodes.append(add_call(output.graph, "call_method", name, (read, *args), like=value))

    with output.graph.inserting_before(output):
        call("permute", order)
        padding = _padding([wanted.shape[dim] for dim in order], [strides[dim] for dim in order])
        if any(padding):
            amounts = [amount for more in reversed(padding) for amount in (0, more)]
            padded = (nodes[-1], amounts)
            nodes.append(add_call(output.graph, "call_function", F.pad, padded, like=value))
            for dim, more in enumerate(padding):
                if more:
                    call("narrow", dim, 0, wanted.shape[order[dim]])
        else:
            call("contiguous")
        call("permute", inverse)
    if differs(wanted, signature(nodes[-1].meta[VALUE]), "strides") is None:
        return nodes[-1]
    for node in reversed(nodes):
        output.graph.erase_node(node)
    return None


def _padding(sizes: list[Any], strides: list[int]) -> list[int]:
    """How much longer each dimension, outermost first, was in the dense tensor that these strides are a slice of."""
    longer = [0] * len(sizes)
    for dim in range(1, len(sizes)):
        inner, size = strides[dim], sizes[dim]
        if isinstance(size, int) and inner > 0 and strides[dim - 1] % inner == 0:
            longer[dim] = max(0, strides[dim - 1] // inner - size)
    return longer
