"""What value does a node have, and how does a new node get one?

Dynamo leaves the FakeTensor of each node in `node.meta["example_value"]`. Later stages read shapes
and dtypes there, so whoever adds a node fills it in by running the operator on the values of its
inputs, and copies the provenance (module path, source line) of the node it is added for:

    with graph.inserting_before(norm):
        y = add_call(graph, "call_method", "unsqueeze", (x, 0), like=norm)
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .._torch import python_dispatcher

VALUE = "example_value"
_PROVENANCE = ("nn_module_stack", "stack_trace", "custom")


def fake_mode_of(graph: Graph) -> FakeTensorMode | None:
    """The mode that made the graph's values; None for a graph without tensors."""
    for node in graph.nodes:
        if isinstance(value := node.meta.get(VALUE), FakeTensor):
            return value.fake_mode
    return None


def add_call(
    graph: Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: Node | None = None,
    name: str | None = None,
) -> Node:
    """Insert a call_function or call_method at the insertion point, with its value filled in."""
    node = graph.create_node(op, target, args, kwargs or {}, name=name)
    if like is not None:
        node.meta.update({key: like.meta[key] for key in _PROVENANCE if key in like.meta})
    node.meta[VALUE] = run(node, _fake_mode_of_inputs(node))
    return node


def run(node: Node, mode: FakeTensorMode | None, target: Any = None) -> Any:
    """Call `node` (or `target` in its place) on the values of its inputs.

    Whether gradients are recorded is up to the caller, as it was to Dynamo's.
    """
    args = map_arg(node.args, value_of)
    kwargs = map_arg(node.kwargs, value_of)
    target = node.target if target is None else target
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            stack.enter_context(python_dispatcher())
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        assert node.op == "call_function", f"{node.format_node()} can't be run"
        return target(*args, **kwargs)


def _fake_mode_of_inputs(node: Node) -> FakeTensorMode | None:
    values = (source.meta.get(VALUE) for source in node.all_input_nodes)
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def body_of(node: Node) -> GraphModule | None:
    """The GraphModule that a get_attr node names (the body of a checkpoint or nested region)."""
    module = node.graph.owning_module
    if node.op != "get_attr" or module is None:
        return None
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, GraphModule) else None


def value_of(node: Node) -> Any:
    """The value that an operator reads from `node`: a fake, a number, or a body."""
    body = body_of(node)
    return node.meta.get(VALUE) if body is None else body
