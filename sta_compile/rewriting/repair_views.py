"""Let views copy where an inserted conversion made their input non-viewable.

A `view` of a transposed tensor works only for some strides. If the edit changed them, `verify`
reports a violation "view", and the repair is `reshape`, which copies:

    q.view(2, 48, 4, 8)      ->      q.reshape(2, 48, 4, 8)

A copy is the same value, but not the same memory. So a view stays as it is, and its violation
stands, if any node after it writes to the memory that it shares with other nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from ..analysis.graph_view import is_inplace
from .fake_values import body_of
from .verify import COPYING_FORM, Recorded, Violation


def repair_views(violations: Iterable[Violation], before: Recorded) -> list[Violation]:
    """Turn the views among the violations into reshapes; return the violations that are left.

    `verify` went on with the reshaped values, so nothing has to be propagated again.
    """
    left = []
    for violation in violations:
        node = violation.node
        if violation.kind != "view" or node is None or _is_written_after(node, before):
            left.append(violation)
        else:
            node.target = COPYING_FORM[str(node.target)]
    return left


def _is_written_after(view: Node, before: Recorded) -> bool:
    memory = memory_of(view, before)
    node = view.next
    while node.op != "output":
        if any(memory & memory_of(source, before) for source in _written(node)):
            return True
        node = node.next
    return False


def memory_of(node: Node, before: Recorded) -> set[int]:
    """The storages behind the value that Dynamo recorded, which views of it share."""
    entry = before.entries.get(node)
    found: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            found.add(value.untyped_storage()._cdata)
        elif isinstance(value, (list, tuple)):
            for part in value:
                visit(part)

    visit(entry.value if entry is not None else None)
    return found


def _written(node: Node) -> list[Node]:
    """The nodes whose values `node` may write to."""
    sources = node.all_input_nodes
    bodies = [body for source in sources if (body := body_of(source)) is not None]
    if bodies:
        writes = any(_written(inner) for body in bodies for inner in body.graph.nodes)
        return sources if writes else []
    return sources if is_inplace(node) else []
