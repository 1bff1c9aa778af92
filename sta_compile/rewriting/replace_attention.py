"""Puts `sta::attention` in the place of an attention that was proved to be over a token grid."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from ..analysis.attention_site import DimOrder
from ..analysis.graph_view import GraphView, fake_value, is_inplace
from ..analysis.infer_grid import VideoAttention
from .fake_values import add_call
from .projections import project, project_back, with_heads
from .size_nodes import Number
from .tensor_order import from_batch_heads_tokens, to_batch_heads_tokens


def replace_attention(
    view: GraphView,
    found: VideoAttention,
    spec: str,
    grid: Sequence[Number],
    segments: Sequence[Number],
    key_lengths: torch.fx.Node | None,
    key_mask: torch.fx.Node | None,
    video_mask: torch.fx.Node | None,
    dense: torch.fx.Node | None,
    copies: Mapping[tuple[torch.fx.Node, torch.fx.Node], torch.fx.Node],
) -> torch.fx.Node:
    """Rewires the readers of an attention to `sta::attention` and removes what nothing reads any more.

    grid: (T, H, W); segments: tokens per segment; key_lengths: int32 [batch, segments beside the video]; key_mask: bool
    [batch, tokens beside the video]; video_mask: bool [batch, tokens of the video]; dense: bool [batch]. All nodes belong to
    the site's graph; copies: operands in tile order by (site node, value). Returns the node of the new output, which has
    the old one's shape and dtype.
    """
    site = found.site
    graph, old = site.node.graph, site.node
    dtype = fake_value(old).dtype

    def call(op: str, target: Any, *args: Any) -> torch.fx.Node:
        return add_call(graph, op, target, args, like=old)

    def operand(node: torch.fx.Node, order: DimOrder) -> torch.fx.Node:
        node = to_batch_heads_tokens(node, order, site.samples, old)
        if fake_value(node).dtype != dtype:  # what autocast does to SDPA's inputs
            node = call("call_method", "to", node, dtype)
        return node

    with graph.inserting_before(old):
        read = [copies.get((old, node), node) for node, _ in site.operands]
        orders = [order for _, order in site.operands]
        if site.projections is not None:
            read = project(site.projections, read, old)
            orders = list(map(with_heads, orders))
        q, k, v = map(operand, read, orders)
        result = call(
            "call_function",
            torch.ops.sta.attention.default,
            q,
            k,
            v,
            key_lengths,
            dense,
            list(segments),
            list(grid),
            spec,
            site.scale,
            *([] if key_mask is None and video_mask is None else [key_mask, video_mask]),
        )
        out = call("call_function", operator.getitem, result, 0)
        if site.projections is None:
            out = from_batch_heads_tokens(out, site.out_order, old)
        else:
            out = from_batch_heads_tokens(out, with_heads(site.out_order), old)
            out = project_back(site.projections, out, old)
    old.replace_all_uses_with(out)
    _erase_unread(old, site.private)
    view.owner[out] = view.owner[old]
    return out


def _erase_unread(node: torch.fx.Node, private: Collection[torch.fx.Node]) -> None:
    """Removes a node without readers, then what only it read. private: writes that nothing else sees."""
    stack, erased = [node], set()
    while stack:
        unread = stack.pop()
        if unread in erased or unread.users:
            continue
        if unread.op not in ("call_function", "call_method"):
            continue
        if is_inplace(unread) and unread not in private:
            continue
        inputs = list(unread.all_input_nodes)
        unread.graph.erase_node(unread)
        erased.add(unread)
        stack += inputs
