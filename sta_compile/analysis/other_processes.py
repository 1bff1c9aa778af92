"""Which attention reads tokens of other processes? Context parallelism cuts a sequence and moves its parts about.

    ulysses  q, k, v of a part of the tokens -> all_to_all -> some heads of all tokens -> attention -> all_to_all
    ring     keys of a part of the tokens are sent on; each process attends to one part after the other

A graph shows what one process has, so the order in which parts come together is not known. Sums over processes (all_reduce)
keep the tokens, a gather of weights moves none, and a gather behind all attention is no matter.
"""

from __future__ import annotations

import torch.fx

from .attention_calls import operands_of
from .attention_site import AttentionSite, Problem
from .graph_view import GraphView, canonical_name, is_parameter
from .token_streams import MIXING

SHARDED = Problem(
    "its tokens are sharded: context parallelism moves parts of the sequence between processes",
    "nothing to do: it stays exact; to make it sparse run without context parallelism",
)
_MOVING = (
    "all_to_all_single",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)


class OtherProcesses:
    """Answers for the attention sites of one graph."""

    def __init__(self, view: GraphView) -> None:
        received: set[torch.fx.Node] = set()
        moved = {n for n in view.nodes if view.is_root_input(n) and not is_parameter(n)}
        moves = []
        for node in view.nodes:
            sources = view.producers(node)
            if moved.isdisjoint(sources):
                continue
            moved.add(node)
            if canonical_name(node) in _MOVING:
                moves.append(node)
                received.add(node)
            elif not received.isdisjoint(sources):
                received.add(node)
        self._moved = received | _before(view, moves)

    def has(self, site: AttentionSite) -> bool:
        """Are keys or values from other processes, or sent to them?"""
        return not self._moved.isdisjoint({site.k, site.v})


def _before(view: GraphView, moves: list[torch.fx.Node]) -> set[torch.fx.Node]:
    """What is moved, back to the products that made it."""
    found: set[torch.fx.Node] = set()
    stack = list(moves)
    while stack:
        for source in view.producers(stack.pop()):
            made = canonical_name(source) in MIXING or operands_of(source) is not None
            if source not in found:
                found.add(source)
                if not made:
                    stack.append(source)
    return found
