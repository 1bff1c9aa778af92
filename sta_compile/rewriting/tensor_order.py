"""Views between the order in which an attention is written and the operator's [batch, heads, tokens, features].

q [batch, tokens, heads, features] is permuted; q [batch * heads, tokens, features] gets heads of one; packed samples
[batch * tokens, heads, features] are taken apart first. All are views, but for taking together what isn't dense.
"""

from __future__ import annotations

import torch.fx

from ..analysis.attention_site import DimOrder
from ..analysis.graph_view import fake_value
from .fake_values import add_call


def to_batch_heads_tokens(
    x: torch.fx.Node, order: DimOrder, samples: int, before: torch.fx.Node
) -> torch.fx.Node:
    """A view of `x` as [batch, heads, tokens, features], inserted before a node."""
    with x.graph.inserting_before(before):
        if order.packed:
            x = add_call(x.graph, "call_method", "unflatten", (x, 0, (samples, -1)), like=before)
            order = _taken_apart(order)
        dims = [order.batch, order.heads, order.tokens, order.features]
        x = _permuted(x, [d for d in dims if d is not None], before)
        for place, dim in enumerate(dims):
            if dim is None:
                x = add_call(x.graph, "call_method", "unsqueeze", (x, place), like=before)
    return x


def from_batch_heads_tokens(
    x: torch.fx.Node, order: DimOrder, before: torch.fx.Node
) -> torch.fx.Node:
    """The inverse for an output of that order."""
    with x.graph.inserting_before(before):
        packed = order.packed
        order = _taken_apart(order) if packed else order
        dims = [order.batch, order.heads, order.tokens, order.features]
        for place in (1, 0):
            if dims[place] is None:
                x = add_call(x.graph, "call_method", "squeeze", (x, place), like=before)
        kept = [d for d in dims if d is not None]
        x = _permuted(x, [kept.index(d) for d in range(len(kept))], before)
        if packed:
            x = add_call(x.graph, "call_method", "flatten", (x, 0, 1), like=before)
    return x


def _taken_apart(order: DimOrder) -> DimOrder:
    """The order once samples have a dimension of their own, the first."""
    heads = None if order.heads is None else order.heads + 1
    return DimOrder(0, heads, order.tokens + 1, order.features + 1)


def _permuted(x: torch.fx.Node, dims: list[int], before: torch.fx.Node) -> torch.fx.Node:
    if dims == sorted(dims):
        return x
    assert len(dims) == fake_value(x).dim()
    return add_call(x.graph, "call_method", "permute", (x, *dims), like=before)
