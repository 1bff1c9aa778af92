"""Every private torch API that sta_compile uses, with the versions that it was tested on.

| API | torch |
| --- | --- |
| `torch._inductor.compile_fx.compile_fx`, `torch._inductor.list_mode_options` | 2.11, 2.13 |
| higher-order operator calls (`tag_activation_checkpoint`, `invoke_subgraph`, `wrap`) in Dynamo graphs | 2.11, 2.13 |
| `torch._guards.TracingContext`, `CompileContext` | 2.11, 2.13 |
| `torch._inductor.custom_graph_pass.CustomGraphPass` | 2.11, 2.13 |
| `torch._logging.trace_structured` | 2.11, 2.13 |
| `torch.fx.experimental.symbolic_shapes.statically_known_true` | 2.11, 2.13 |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["body_of_call", "is_higher_order", "statically_known_true"]

# name of the operator -> position of its first tensor operand
_CALLS_WITH_BODY = {"tag_activation_checkpoint": 1, "invoke_subgraph": 2, "wrap": 1}


def is_higher_order(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, HigherOrderOperator)


def body_of_call(
    gm: torch.fx.GraphModule, node: torch.fx.Node
) -> tuple[torch.fx.GraphModule, tuple[Any, ...]] | None:
    """The body of a higher-order call that runs it once, and the operands that its placeholders take; else None."""
    first = _CALLS_WITH_BODY.get(getattr(node.target, "_name", ""))
    if first is None or not node.args:
        return None
    attribute = node.args[0]
    if not isinstance(attribute, torch.fx.Node) or attribute.op != "get_attr":
        return None
    body = gm.get_submodule(str(attribute.target))
    return (body, tuple(node.args[first:])) if isinstance(body, torch.fx.GraphModule) else None
