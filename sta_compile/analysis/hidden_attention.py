"""Attention inside a region that can't be edited from outside.

With gradients, an `autograd.Function` is one node with a graph for each direction: to replace what is in the one is to
contradict the other. nn.TransformerEncoderLayer is one node without gradients, and a Triton kernel is one always. Inside of
torch.vmap a tensor is that of one sample. Their attention is told of, and left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.fx

from .._torch import is_higher_order, triton_kernel
from .attention_names import LOOKS_LIKE, ORDERS, SET_NATIVE
from .attention_site import AttentionSite, Problem
from .graph_view import GraphView, canonical_name, fake_value, is_tensor, module_path

_ENCODER_LAYER = (
    "_transformer_encoder_layer_fwd"  # what nn.TransformerEncoderLayer takes for its fast path
)


def hidden_attention(
    view: GraphView, node: torch.fx.Node, find: Callable[[GraphView], list[AttentionSite]]
) -> AttentionSite | None:
    """The attention of a higher-order operator's first body. find: what looks for attention in a graph."""
    if canonical_name(node) == _ENCODER_LAYER and is_tensor(node.args[0]):
        return _hidden(
            node, [node.args[0]] * 3, "call torch.backends.mha.set_fastpath_enabled(False)"
        )
    if canonical_name(node) == "_remove_batch_dim" and is_tensor(node):
        return _vmapped(node)
    if not is_higher_order(node) or node in view.body:
        return None
    kernel = triton_kernel(node)
    if kernel is not None:
        return _of_kernel(node, *kernel)
    body: Any = None
    for argument in node.args:
        if isinstance(argument, torch.fx.Node) and argument.op == "get_attr":
            body = getattr(view.owner[node], str(argument.target), None)
            break
    if not isinstance(body, torch.fx.GraphModule) or not find(GraphView(body)):
        return None
    tensors = [a for a in node.args if is_tensor(a) and fake_value(a).dim() > 2]
    if len(tensors) < 3:
        return None
    return _hidden(
        node,
        tensors,
        "run the model under torch.no_grad(), or call torch.nn.functional.scaled_dot_product_attention outside",
    )


def _of_kernel(
    node: torch.fx.Node, name: str, arguments: Mapping[str, Any]
) -> AttentionSite | None:
    """A Triton kernel that is called attention, or that reads q, k and v."""
    named = {key.lower().removesuffix("_ptr") for key in arguments}
    if not LOOKS_LIKE.search(name) and not {"q", "k", "v"} <= named:
        return None
    tensors = [a for a in arguments.values() if is_tensor(a) and fake_value(a).dim() > 2]
    tensors = [a for a in tensors if fake_value(a).is_floating_point()]
    if len(tensors) < 3:
        return None
    return _site(node, tensors, f"its attention is the Triton kernel `{name}`", SET_NATIVE)


def _vmapped(node: torch.fx.Node) -> AttentionSite | None:
    """What leaves the outermost torch.vmap, if there is attention in it."""
    tensors: list[torch.fx.Node] = []
    seen, stack, found = {node}, [node.args[0]], False
    while stack:
        inner = stack.pop()
        if not isinstance(inner, torch.fx.Node) or inner in seen:
            continue
        seen.add(inner)
        if is_tensor(inner):
            tensors.append(inner)
            continue
        found |= canonical_name(inner) == "softmax" or canonical_name(inner) in ORDERS
        stack += inner.all_input_nodes
    tensors = [t for t in tensors if fake_value(t).dim() > 2]
    if not found or len(tensors) < 3:
        return None
    hint = "call torch.nn.functional.scaled_dot_product_attention on [batch, heads, tokens, head_dim] instead"
    return _site(node, tensors, "its attention is inside `torch.vmap`", hint)


def _hidden(node: torch.fx.Node, tensors: Sequence[Any], hint: str) -> AttentionSite:
    return _site(node, tensors, f"its attention is inside `{canonical_name(node)}`", hint)


def _site(node: torch.fx.Node, tensors: Sequence[Any], reason: str, hint: str) -> AttentionSite:
    q, k, v = tensors[:3]
    problem = Problem(reason, hint)
    return AttentionSite(node, q, k, v, 1.0, module_path(node), problem=problem, opaque=True)
