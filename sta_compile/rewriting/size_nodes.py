"""Nodes that hold sizes which are known as expressions.

8                       8
s0, a value has it      x.size(1)
s0, a value has s0 + 8  x.size(1) - 8: any sum of what is there, times numbers
s0, in a body           one more operand of the body, if nothing in there gives it
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import sympy
import torch
import torch.fx

from .. import _torch
from .._sizes import Combinations, simplified
from ..analysis.axes import Axis, Size, resolve, same_size, size_of
from ..analysis.graph_view import fake_value
from ..analysis.trace_dims import DimTrace
from .fake_values import add_call
from .thread_value import ValueThreads

Number = int | torch.fx.Node


class SizeNodes:
    """Nodes that hold sizes; each is made once per graph, as early as it can be."""

    def __init__(self, trace: DimTrace, threads: ValueThreads) -> None:
        self.trace, self.view, self.threads = trace, trace.view, threads
        self._env = _torch.shape_env_of(self.view.gm)
        self._known: dict[tuple[Size, torch.fx.GraphModule], torch.fx.Node] = {}
        self._stated: list[tuple[Size, torch.fx.Node]] = []

    def state(self, size: Size, node: torch.fx.Node) -> None:
        """Says which node of the root graph holds a size that no value has; before whatever asks for it."""
        self._stated.append((simplified(size, self._env), node))

    def of_axis(self, axis: Axis, before: torch.fx.Node) -> torch.fx.Node | None:
        """The length of an axis, read in the root graph before a node; None if no value there has it alone."""
        wanted = resolve(axis)
        limit = self.view.position.get(before, len(self.view.nodes))
        for node in self.view.nodes:
            if self.view.owner[node] is not self.view.gm or self.view.position[node] >= limit:
                continue
            dims = self.trace.dims(node)
            for dim, candidate in enumerate(dims or ()):
                if candidate == wanted:
                    return self._size_node(node, dim)
        return None

    def of_size(self, size: Size, owner: torch.fx.GraphModule, before: torch.fx.Node) -> Number:
        """A number known as an expression, as a node of `owner` before its node `before`.

        Raises LookupError where neither that graph nor those around it have the sizes that it is made of.
        """
        size = simplified(size, self._env)
        if isinstance(size, int):
            return size
        known = self._known.get((size, owner))
        if known is not None and known < before:
            return known
        for stated, node in self._stated:
            if same_size(stated, size):
                return self.threads.reach(node, owner)
        found = self._dimension(size, owner, before) or self._sum(size, owner, before)
        if found is None:
            found = self._from_outside(size, owner, before)
        self._known[size, owner] = found
        return found

    def _dimension(
        self, size: Size, owner: torch.fx.GraphModule, before: torch.fx.Node
    ) -> torch.fx.Node | None:
        """The size, where a value has a dimension of it."""
        for candidate, node, dim in _sizes_in(owner, before):
            if same_size(candidate, size):
                return self._read(node, dim)
        return None

    def _sum(
        self, size: Size, owner: torch.fx.GraphModule, before: torch.fx.Node
    ) -> torch.fx.Node | None:
        """The size, computed of others: text in front of 216 tokens of video has a dimension of s0 + 216 in common."""
        sums, places = Combinations(), []
        for candidate, node, dim in _sizes_in(owner, before):
            places.append((node, dim))
            if not sums.add(candidate):
                continue
            found = sums.of(size)
            if found is None:
                continue
            constant, factors, divisor = found
            after = node.next
            while after.op == "placeholder":
                after = after.next
            terms = [(self._read(*places[i]), factor) for i, factor in factors.items()]
            with owner.graph.inserting_before(after):
                return _weighted(terms, constant, divisor, like=before)
        return None

    def _from_outside(
        self, size: Size, owner: torch.fx.GraphModule, before: torch.fx.Node
    ) -> torch.fx.Node:
        """The size, as an operand of a body that is computed before its first call."""
        calls = self.view.calls.get(owner)
        if not calls:
            raise LookupError(
                f"no value has a dimension of {sympy.sstr(size)} before {before.name}"
            )
        around = {self.view.owner[call] for call in calls}
        outer = next(iter(around)) if len(around) == 1 else self.view.gm
        first = calls[0] if len(around) == 1 else self.view.in_root(calls[0])
        number = self.of_size(size, outer, first)
        assert isinstance(number, torch.fx.Node), "an int is known in all graphs"
        return self.threads.reach(number, owner)

    def _read(self, node: torch.fx.Node, dim: int | None) -> torch.fx.Node:
        return node if dim is None else self._size_node(node, dim)

    def _size_node(self, node: torch.fx.Node, dim: int) -> torch.fx.Node:
        following = node.next
        while following.op == "placeholder":
            following = following.next
        if (
            following.op == "call_method"
            and following.target == "size"
            and following.args == (node, dim)
        ):
            return following
        with node.graph.inserting_before(following):
            return add_call(node.graph, "call_method", "size", (node, dim), like=node)


def _sizes_in(
    owner: torch.fx.GraphModule, before: torch.fx.Node
) -> Iterator[tuple[Size, torch.fx.Node, int | None]]:
    """Sizes that a graph has before a node: (size, value, dimension), or None for the dimension of a value that is one."""
    for node in list(owner.graph.nodes):
        if node is before:
            return
        value = fake_value(node)
        if isinstance(value, torch.SymInt):
            yield size_of(value), node, None
        elif isinstance(value, torch.Tensor):
            for dim, candidate in enumerate(value.shape):
                yield size_of(candidate), node, dim


def _weighted(
    terms: list[tuple[torch.fx.Node, int]], constant: int, divisor: int, *, like: torch.fx.Node
) -> torch.fx.Node:
    """(the sum of nodes times factors, and a constant) / divisor, at the graph's insertion point."""

    def call(target: Any, a: Any, b: int | torch.fx.Node) -> torch.fx.Node:
        return add_call(like.graph, "call_function", target, (a, b), like=like)

    total: torch.fx.Node | None = None
    for node, factor in sorted(terms, key=lambda term: -term[1]):  # what is added comes first
        term = node if abs(factor) == 1 else call(operator.mul, node, abs(factor))
        if total is None:
            total = term if factor > 0 else call(operator.mul, term, -1)
        else:
            total = call(operator.add if factor > 0 else operator.sub, total, term)
    assert total is not None
    if constant:
        total = call(operator.add if constant > 0 else operator.sub, total, abs(constant))
    return total if divisor == 1 else call(operator.floordiv, total, divisor)
