"""Give the operands of a shared body the strides that they have at its first call.

A body that 40 blocks share is compiled once, for the layout of its first call. If a conversion stands before that call only,
its tokens may lie in memory in another order than those of the next, or only count the strides of a batch of one otherwise:

    first call x [72, 1, 16], strides (16, 1152, 1); second call (16, 16, 1), which becomes a copy with those of the first

An operand that the body writes to stays as it is, and so does the violation.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule, Node

from .._torch import body_of_call
from ..analysis.graph_view import is_inplace
from .copy_strides import copy_before
from .fake_values import value_of
from .repair_views import memory_of
from .signature import TensorSignature, differs, signature
from .verify import Recorded, Violation


def repair_calls(violations: Iterable[Violation], before: Recorded) -> list[Violation]:
    """Copy operands at the calls among the violations; return the violations that are left."""
    return [v for v in violations if v.kind != "call sites" or not _repaired(v.node, before)]


def _repaired(node: Node | None, before: Recorded) -> bool:
    module = None if node is None else node.graph.owning_module
    call = None if module is None or node is None else body_of_call(module, node)
    if node is None or call is None:
        return False
    body, operands = call
    inputs = body.graph.find_nodes(op="placeholder")
    args = list(node.args)
    first = len(args) - len(inputs)
    for place, (inner, outer) in enumerate(zip(inputs, operands, strict=True)):
        wanted = signature(value_of(inner))
        now = signature(value_of(outer)) if isinstance(outer, Node) else outer
        if not isinstance(wanted, TensorSignature) or not differs(wanted, now, "strides"):
            continue
        copy = None if _writes(body, inner, before) else copy_before(node, outer, wanted)
        if copy is None:
            return False
        args[first + place] = copy
    node.args = tuple(args)
    return all(
        not differs(signature(value_of(inner)), signature(value_of(outer)), aspect)
        for inner, outer in zip(inputs, args[first:], strict=True)
        if isinstance(outer, Node)
        for aspect in ("shape", "dtype", "device", "strides")
    )


def _writes(body: GraphModule, source: Node, before: Recorded) -> bool:
    """May a body write to one of its inputs?"""
    memory = memory_of(source, before)
    written = [n for node in body.graph.nodes if is_inplace(node) for n in node.all_input_nodes]
    return any(memory & memory_of(node, before) for node in written)
