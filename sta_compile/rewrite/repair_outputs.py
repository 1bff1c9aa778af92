"""Give graph outputs the strides that they had before the edits.

Tokens that come out of a patch embed as a transposed [batch, channels, tokens] keep these strides through every residual
addition, and a caller may rely on them; a conversion returns contiguous tokens. The repair is one copy:

    x [2, 144, 16], strides (2304, 16, 1), was (2304, 1, 144)   ->   x.permute(0, 2, 1).contiguous().permute(0, 2, 1)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from .fake_values import VALUE, add_call
from .signature import TensorSignature, differs, signature
from .verify import Recorded, Violation


def repair_outputs(
    module: GraphModule, violations: Iterable[Violation], before: Recorded
) -> list[Violation]:
    """Copy outputs to their old strides where these are dense; return the violations that are left."""
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
    """A dense copy of a value in the order of the wanted strides; None if that does not give these strides."""
    strides = wanted.strides or ()
    if not strides or not all(isinstance(stride, int) for stride in strides):
        return None
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    inverse = [order.index(dim) for dim in range(len(order))]
    with output.graph.inserting_before(output):
        permuted = add_call(output.graph, "call_method", "permute", (value, order), like=value)
        dense = add_call(output.graph, "call_method", "contiguous", (permuted,), like=value)
        copy = add_call(output.graph, "call_method", "permute", (dense, inverse), like=value)
    if differs(wanted, signature(copy.meta[VALUE]), "strides") is None:
        return copy
    for node in (copy, dense, permuted):
        output.graph.erase_node(node)
    return None
