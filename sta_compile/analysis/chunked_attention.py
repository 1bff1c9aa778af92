"""Queries in chunks, each attending to all keys: one attention, cut up to save memory.

    torch.cat([attention(q[:, a:b], k, v) for a, b in chunks], 1)     is     attention(q, k, v)

The chunks have to be all of q, one after the other, along its tokens, and the outputs are put together along theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx

from .attention_site import AttentionSite, DimOrder
from .axes import Size, same_size, size_of
from .graph_view import GraphView, argument, canonical_name, fake_value, is_tensor
from .matrix_products import moved

_COPIES = ("contiguous", "clone")


@dataclass(frozen=True)
class _Seen:
    """A value behind transposes and copies, and the nodes on the way."""

    node: torch.fx.Node
    order: DimOrder
    way: tuple[torch.fx.Node, ...]


def merge_chunks(view: GraphView, sites: Sequence[AttentionSite]) -> list[AttentionSite]:
    """The sites, with those that are the chunks of one attention put together."""
    by_node = {site.node: site for site in sites}
    if len(sites) > 1:
        for node in view.nodes:
            if canonical_name(node) == "cat":
                _merge(node, by_node)
    return sorted(by_node.values(), key=lambda site: view.position[site.node])


def _merge(cat: torch.fx.Node, by_node: dict[torch.fx.Node, AttentionSite]) -> None:
    tensors, dim = argument(cat, 0, "tensors"), argument(cat, 1, "dim", 0)
    outputs = [_output(tensor, by_node) for tensor in tensors]
    if len(outputs) < 2 or any(output is None for output in outputs):
        return
    chunks = [by_node[output.node] for output in outputs if output is not None]
    order = outputs[0].order  # type: ignore[union-attr]
    same_orders = all(output is not None and output.order == order for output in outputs)
    if not same_orders or dim % fake_value(cat).dim() != order.tokens:
        return
    whole = _whole_queries(chunks)
    keys, values = (_same([_behind(*chunk.operands[i]) for chunk in chunks]) for i in (1, 2))
    first = chunks[0]
    alike = all(
        (c.scale, c.causal, c.dropout, c.gqa, c.mask, c.projections)
        == (first.scale, False, first.dropout, first.gqa, None, None)
        for c in chunks
    )
    if whole is None or keys is None or values is None or not alike or first.q_order.packed:
        return
    steps = [x for output in outputs if output is not None for x in (*output.way, output.node)]
    for chunk in chunks:
        del by_node[chunk.node]
    by_node[cat] = replace(
        first,
        node=cat,
        q=whole.node,
        k=keys.node,
        v=values.node,
        q_order=whole.order,
        k_order=keys.order,
        v_order=values.order,
        out_order=order,
        steps=(
            *whole.way,
            *keys.way,
            *values.way,
            *(step for chunk in chunks for step in chunk.steps),
            *steps,
        ),
        private=frozenset(node for chunk in chunks for node in chunk.private),
        problem=next((chunk.problem for chunk in chunks if chunk.problem is not None), None),
    )


def _output(tensor: Any, by_node: Mapping[torch.fx.Node, AttentionSite]) -> _Seen | None:
    """The attention behind a part of a concatenation, and the order of the part."""
    way: list[torch.fx.Node] = []
    node = tensor
    while isinstance(node, torch.fx.Node) and node not in by_node:
        way.append(node)
        if len(node.users) != 1 or not _passes(node):
            return None
        node = node.args[0]
    if not isinstance(node, torch.fx.Node) or len(node.users) != 1 or by_node[node].opaque:
        return None
    order = by_node[node].out_order
    for step in reversed(way):
        dims = moved(step, fake_value(step).dim())
        order = order if dims is None else order.after(dims)
    return _Seen(node, order, tuple(way))


def _passes(node: torch.fx.Node) -> bool:
    return canonical_name(node) in _COPIES or moved(node, fake_value(node).dim()) is not None


def _behind(node: torch.fx.Node, order: DimOrder) -> _Seen:
    """The value behind transposes and copies that each chunk may make of its own."""
    way = []
    while canonical_name(node) and is_tensor(node.args[0]) and _passes(node):
        dims = moved(node, fake_value(node).dim())
        way.append(node)
        order = order if dims is None else order.before(dims)
        node = node.args[0]  # type: ignore[assignment]
    return _Seen(node, order, tuple(way))


def _same(seen: Sequence[_Seen]) -> _Seen | None:
    """The one value of all chunks."""
    first = seen[0]
    if any(x.node is not first.node or x.order != first.order for x in seen):
        return None
    return replace(first, way=tuple(step for x in seen for step in x.way))


def _whole_queries(chunks: Sequence[AttentionSite]) -> _Seen | None:
    """What the chunks' queries are consecutive parts of."""
    end: Size = 0
    way: list[torch.fx.Node] = []
    whole: _Seen | None = None
    for chunk in chunks:
        seen = _behind(chunk.q, chunk.q_order)
        part = _part(seen.node, seen.order.tokens)
        if part is None:
            return None
        source, start, steps = part
        behind = _behind(source, seen.order)
        if not same_size(start, end) or (
            whole is not None and (whole.node, whole.order) != (behind.node, behind.order)
        ):
            return None
        end = start + size_of(fake_value(seen.node).shape[seen.order.tokens])
        way += [*seen.way, *steps, *behind.way]
        whole = behind
    if whole is None:
        return None
    total = size_of(fake_value(whole.node).shape[whole.order.tokens])
    return replace(whole, way=tuple(way)) if same_size(end, total) else None


def _part(
    node: torch.fx.Node, dim: int
) -> tuple[torch.fx.Node, Size, tuple[torch.fx.Node, ...]] | None:
    """(x, start, nodes) if a node is a part of x along a dimension."""
    name, source = canonical_name(node), node.args[0] if node.args else None
    if not isinstance(source, torch.fx.Node):
        return None
    rank = fake_value(node).dim()
    if name == "narrow" and argument(node, 1, "dim") % rank == dim:
        start = fake_value(argument(node, 2, "start"))
        return (source, size_of(start), (node,)) if isinstance(start, int) else None
    if name != "getitem":
        return None
    index = node.args[1]
    if canonical_name(source) in ("split", "chunk", "tensor_split") and isinstance(index, int):
        x = source.args[0]
        if not isinstance(x, torch.fx.Node) or argument(source, 2, "dim", 0) % rank != dim:
            return None
        pieces = fake_value(source)[:index]
        return x, sum(size_of(piece.shape[dim]) for piece in pieces), (node, source)
    start = _slice_start(index, rank, dim)
    return (source, start, (node,)) if start is not None and is_tensor(source) else None


def _slice_start(index: Any, rank: int, dim: int) -> int | None:
    """Where an index that cuts one dimension only begins."""
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (rank - len(items) + 1)
    items += [slice(None)] * (rank - len(items))
    if len(items) != rank or not all(isinstance(item, slice) for item in items):
        return None
    cut = items.pop(dim)
    start = 0 if cut.start is None else cut.start
    plain = cut.step in (None, 1) and isinstance(start, int) and start >= 0
    return start if plain and all(item == slice(None) for item in items) else None
