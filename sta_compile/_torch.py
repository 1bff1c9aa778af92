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

from collections.abc import Callable
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


def specialise(size: Any, shape_env: Any) -> int:
    """The value of a symbolic size, with a guard: another value compiles again. Raises if it depends on data."""
    if isinstance(size, int):
        return size
    return int(shape_env.create_symintnode(size, hint=None))


def shape_env_of(gm: torch.fx.GraphModule) -> Any:
    """The shape environment of a graph's fake values; None if it has no fake tensor."""
    for node in gm.graph.nodes:
        mode = getattr(node.meta.get("example_value"), "fake_mode", None)
        if mode is not None:
            return mode.shape_env
    return None


def last_compile_of_frame() -> bool:
    """Is this the last compile that the frame's recompile limit allows? False outside a compile."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    count = getattr(compile_id, "frame_compile_id", None)
    return count is not None and count >= torch._dynamo.config.recompile_limit - 1


def root_module() -> torch.nn.Module | None:
    """The outermost module whose call led to this compile: the model, whatever part of it is compiled."""
    import sys

    frame = sys._getframe(1)
    found = None
    call = torch.nn.Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is call:
            found = frame.f_locals.get("self", found)
        frame = frame.f_back  # type: ignore[assignment]
    return getattr(found, "_orig_mod", found)


def save_artifact(name: str, payload: Callable[[], str]) -> None:
    """Writes JSON text beside the graphs of a TORCH_TRACE log; does nothing when tracing is off."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload
    )
