"""Attention that is told by its softmax over the products of queries and keys, though what is done to them is not known.

It stays as it is: soft-capped scores, a sink beside the keys, probabilities that heads exchange.
"""

from __future__ import annotations

from typing import Any

import torch.fx

from .attention_site import AttentionSite, Problem
from .axes import same_size, size_of
from .decomposed_attention import is_followed
from .graph_view import canonical_name, fake_value, is_pointwise, is_tensor, module_path
from .matrix_products import Product, product_of
from .softmax import Softmax

_HINT = "if it is plain attention, call torch.nn.functional.scaled_dot_product_attention"
_MOVES = (
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "mT", "movedim", "cat",
    "getitem", "narrow", "pad", "expand",
)  # fmt: skip
_FARTHEST = 24  # nodes that are looked at


def unread_softmax(softmax: Softmax) -> AttentionSite | None:
    """The attention of a softmax, left alone; None if its input is not made of products of tokens and tokens."""
    product, unknown = _product(softmax.source)
    if product is None:
        return None
    reason = (
        f"its scores go through `{unknown}`"
        if unknown
        else "its softmax is over other dimensions than its keys, or not of values that are multiplied by it"
    )
    node, q, k = softmax.node, product.left, product.right
    problem = Problem(reason, _HINT)
    return AttentionSite(node, q, k, k, 1.0, module_path(node), problem=problem, opaque=True)


def _product(source: Any) -> tuple[Product | None, str]:
    """The product behind a softmax's input, and the first operation on the way that no attention has."""
    seen: set[torch.fx.Node] = set()
    stack, unknown = [source], ""
    while stack and len(seen) < _FARTHEST:
        node = stack.pop(0)
        if not is_tensor(node) or node in seen:
            continue
        seen.add(node)
        product, value = product_of(node), fake_value(node)
        if product is not None:
            if same_size(*(size_of(s) for s in value.shape[-2:])):
                return product, unknown
            continue
        name = canonical_name(node)
        if is_pointwise(name) or name in _MOVES:
            unknown = unknown or ("" if is_followed(name) else name)
            stack += node.all_input_nodes
    return None, ""
