"""Attention inside a region that can't be edited from outside.

With gradients, an `autograd.Function` is one node with a graph for each direction: to replace what is in the one is to
contradict the other. nn.TransformerEncoderLayer is one node without gradients. Their attention is told of, and left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx

from .._torch import is_higher_order
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
    if not is_higher_order(node) or node in view.body:
        return None
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


def _hidden(node: torch.fx.Node, tensors: Sequence[Any], hint: str) -> AttentionSite:
    q, k, v = tensors[:3]
    problem = Problem(f"its attention is inside `{canonical_name(node)}`", hint)
    return AttentionSite(node, q, k, v, 1.0, module_path(node), problem=problem, opaque=True)
