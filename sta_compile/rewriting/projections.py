"""The linear layers of an attention that has its own, written out around the operator."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch.fx
import torch.nn.functional as F

from ..analysis.attention_site import DimOrder, Projections
from ..analysis.graph_view import fake_value
from .fake_values import add_call


def with_heads(order: DimOrder) -> DimOrder:
    """The order of [.., width] once the width is split into [.., heads, features]."""
    return DimOrder(order.batch, order.features, order.tokens, order.features + 1)


def project(
    weights: Projections, tokens: Sequence[torch.fx.Node], before: torch.fx.Node
) -> list[torch.fx.Node]:
    """q, k and v [.., heads, features] of the tokens that each is made of, inserted before a node."""

    def call(op: str, target: Any, *args: Any) -> torch.fx.Node:
        return add_call(before.graph, op, target, args, like=before)

    def pieces(x: torch.fx.Node | None, dim: int) -> list[torch.fx.Node | None]:
        if x is None:
            return [None] * 3
        chunks = call("call_method", "chunk", x, 3, dim)
        return [call("call_function", operator.getitem, chunks, i) for i in range(3)]

    with before.graph.inserting_before(before):
        if tokens[0] is tokens[1] is tokens[2]:
            joint = call("call_function", F.linear, tokens[0], weights.in_weight, weights.in_bias)
            parts = pieces(joint, -1)
        else:
            matrices, biases = pieces(weights.in_weight, 0), pieces(weights.in_bias, 0)
            parts = [
                call("call_function", F.linear, *each)
                for each in zip(tokens, matrices, biases, strict=True)
            ]
        return [call("call_method", "unflatten", x, -1, (weights.heads, -1)) for x in parts]


def project_back(weights: Projections, x: torch.fx.Node, before: torch.fx.Node) -> torch.fx.Node:
    """The output [.., width] of heads [.., heads, features]."""
    with before.graph.inserting_before(before):
        last = fake_value(x).dim() - 1
        joined = add_call(x.graph, "call_method", "flatten", (x, last - 1, last), like=before)
        args = (joined, weights.out_weight, weights.out_bias)
        return add_call(x.graph, "call_function", F.linear, args, like=before)
