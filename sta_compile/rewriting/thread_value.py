"""Brings a value of the root graph into the body of a checkpoint or nested region.

A body sees only its operands. A flag that is computed once in the root (which samples are dense, how many text tokens are
valid) becomes one more operand of every call of the body, and one more placeholder inside, once per body and value.
"""

from __future__ import annotations

import torch.fx

from ..analysis.graph_view import GraphView


class ValueThreads:
    """Placeholders that stand for outer values, made on demand."""

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self._inner: dict[tuple[torch.fx.GraphModule, torch.fx.Node], torch.fx.Node] = {}

    def reach(self, value: torch.fx.Node, owner: torch.fx.GraphModule) -> torch.fx.Node:
        """A node of `owner`'s graph that holds `value`, which belongs to `owner` or to a graph around it."""
        if value.graph is owner.graph:
            return value
        key = (owner, value)
        if key not in self._inner:
            calls = self.view.calls[owner]
            operands = [self.reach(value, self.view.owner[call]) for call in calls]
            last = [n for n in owner.graph.nodes if n.op == "placeholder"]
            anchor = last[-1] if last else None
            with (
                owner.graph.inserting_after(anchor)
                if anchor is not None
                else owner.graph.inserting_before(next(iter(owner.graph.nodes)))
            ):
                inner = owner.graph.placeholder(f"sta_{value.name}")
            inner.meta["example_value"] = value.meta["example_value"]
            for call, operand in zip(calls, operands, strict=True):
                call.args = (*call.args, operand)
            self.view.sources[inner] = operands
            self.view.owner[inner] = owner
            self._inner[key] = inner
        return self._inner[key]
