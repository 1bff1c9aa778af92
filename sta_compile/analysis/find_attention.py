"""Where does a graph compute attention, and what are q, k, v, the scale and the mask?

    sites = find_attention(view)

Each kind of spelling has a module of its own: one call (`attention_calls`), one call with its projections
(`multihead_attention`), steps (`decomposed_attention`), queries in chunks (`chunked_attention`), a region that can't be
edited (`hidden_attention`). An attention that is one beyond doubt, but can't be replaced, is a site with a `problem`.
"""

from __future__ import annotations

from dataclasses import replace

import torch.fx

from .attention_calls import attention_call
from .attention_names import MULTIHEAD
from .attention_site import AttentionSite, Problem
from .chunked_attention import merge_chunks
from .copied_heads import without_copied_heads
from .decomposed_attention import decomposed
from .graph_view import GraphView, argument, canonical_name, is_inplace
from .hidden_attention import hidden_attention
from .multihead_attention import multihead_attention
from .softmax import softmax_of
from .token_values import storage_of, written_storages
from .unread_softmax import unread_softmax

__all__ = ["AttentionSite", "find_attention"]


def find_attention(view: GraphView) -> list[AttentionSite]:
    """Every attention of the graph, in execution order."""
    sites = []
    written = written_storages(view)
    for node in view.nodes:
        site = _site(view, node)
        if site is not None:
            sites.append(without_copied_heads(site))
    return [_settled(view, site, written) for site in merge_chunks(view, sites)]


def _site(view: GraphView, node: torch.fx.Node) -> AttentionSite | None:
    """The attention that ends at a node, or whose softmax it is."""
    softmax = softmax_of(node)
    if softmax is not None:
        return decomposed(softmax) or unread_softmax(softmax)
    if canonical_name(node) == MULTIHEAD:
        return multihead_attention(node)
    return attention_call(node) or hidden_attention(view, node, find_attention)


Written = dict[int, list[torch.fx.Node]]


def _settled(view: GraphView, site: AttentionSite, written: Written) -> AttentionSite:
    """The site, with what writes in place between its steps taken into account."""
    steps = {*site.steps, site.node}
    reads = [site.q, site.k, site.v, *([] if site.mask is None else [site.mask]), *steps]
    memory = {s for node in reads for s in storage_of(node)} & written.keys()
    if not site.steps or not memory or site.problem is not None:
        return site
    private = memory - {s for n in view.nodes if n not in steps for s in storage_of(n)}
    meanwhile = _written_meanwhile(view, site, steps, memory, private, written)
    if meanwhile or _mask_written(view, site, written):
        return replace(
            site,
            problem=Problem(
                "tensors are written in place between its steps",
                "write new tensors instead, or call torch.nn.functional.scaled_dot_product_attention",
            ),
        )
    return replace(site, private=frozenset(n for n in steps if is_inplace(n)))


def _mask_written(view: GraphView, site: AttentionSite, written: Written) -> bool:
    """Is a mask written after its negation, which hid keys in one of the steps, was made of it?"""
    negations = [argument(n, 1, "mask") for n in site.steps if canonical_name(n) == "masked_fill"]
    if site.mask is None or not negations:
        return False
    first, last = min(map(view.position.__getitem__, negations)), view.position[site.node]
    writes = [w for storage in storage_of(site.mask) for w in written.get(storage, ())]
    return any(first < view.position[write] <= last for write in writes)


def _written_meanwhile(
    view: GraphView,
    site: AttentionSite,
    steps: set[torch.fx.Node],
    memory: set[int],
    private: set[int],
    written: Written,
) -> bool:
    """Is memory that the steps read written between them? The one operator that replaces them reads all at the end.

    private: memory that only the steps see, which they may write.
    """
    first, last = min(map(view.position.__getitem__, steps)), view.position[site.node]
    return any(
        first < view.position[write] <= last and not (write in steps and storage in private)
        for storage in memory
        for write in written[storage]
    )
