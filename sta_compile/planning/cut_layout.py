"""Which values of the graph live in tile order, and where are tokens reordered?

Every value with a token axis is a variable: raster order or tile order. Some are pinned (a graph
input is raster, what an attention site reads is tile), some are tied (both operands of an in-place
write), the others are free. A consumer whose order differs from the value it reads needs a
converted copy; one copy serves all consumers of that value in that order. The cheapest assignment
is a minimum cut between raster (source) and tile (sink).

Two blocks with a residual stream, values numbered in graph order, pinned ones in brackets:

    [0 raster] -> 1 -> [2 tile] -> 3 -> [4 tile] -> 5 -> [6 raster]
                  1 ------------> 3 ------------> 5

With equal sizes the answer is 1..5 in tile order and two conversions, (0, to tile) and (5, to
raster), for any number of blocks between.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

_RASTER, _TILE = 0, 1  # nodes of the flow network: source and sink


@dataclass(frozen=True)
class Use:
    """Variable `consumer` reads `value`. A conversion of `value` moves `bytes`.

    `order` is the position of the read in the graph (>= 0): of equally cheap cuts, the one whose
    conversions stand earliest wins.
    """

    value: int
    consumer: int
    bytes: float
    order: int


@dataclass(frozen=True)
class LayoutProblem:
    """Variables 0 .. variables-1, each to be put in raster or tile order."""

    variables: int
    ties: Sequence[tuple[int, int]] = ()  # pairs that must have the same order
    raster: AbstractSet[int] = field(default_factory=frozenset)  # pinned to raster order
    tile: AbstractSet[int] = field(default_factory=frozenset)  # pinned to tile order
    uses: Sequence[Use] = ()


@dataclass(frozen=True)
class LayoutSolution:
    """order[i] is True where variable i is in tile order; conversions holds (value, to_tile)."""

    order: tuple[bool, ...]
    cost: float  # bytes that the conversions move
    conversions: frozenset[tuple[int, bool]]


class LayoutConflict(Exception):
    """Tied variables are pinned to both orders; the caller drops what pinned one of them."""

    def __init__(self, raster: frozenset[int], tile: frozenset[int], tied: frozenset[int]) -> None:
        self.raster = raster  # variables of the class that are pinned to raster
        self.tile = tile  # variables of the class that are pinned to tile
        self.tied = tied  # the whole class
        super().__init__(
            f"variables {sorted(raster)} are pinned to raster order and {sorted(tile)} to tile "
            f"order, but ties force one order on all of {sorted(tied)}; drop one of the pins"
        )


def solve(problem: LayoutProblem) -> LayoutSolution:
    """The assignment that converts the fewest bytes, then the fewest values, then the earliest.

    The cost of a value is the largest `bytes` of its uses and its position the smallest `order`.
    What is still undecided stays in raster order, so the answer doesn't depend on the flow
    algorithm or on hash seeds.
    """
    node_of, nodes = _contract(problem)
    readers: dict[int, set[int]] = defaultdict(set)
    moved: dict[int, float] = defaultdict(float)
    position: dict[int, int] = {}
    for use in problem.uses:
        assert use.order >= 0, use
        assert 0 <= use.bytes < math.inf, use
        readers[use.value].add(node_of[use.consumer])
        moved[use.value] = max(moved[use.value], use.bytes)
        position[use.value] = min(position.get(use.value, use.order), use.order)

    network = _Network(nodes)
    capacity = _exact_costs(moved, position)
    for value in sorted(readers):
        network.connect(node_of[value], readers[value], capacity[value])
    in_tile = network.tile_side()

    order = tuple(in_tile[node] for node in node_of)
    conversions = frozenset(
        (use.value, order[use.consumer])
        for use in problem.uses
        if order[use.value] != order[use.consumer]
    )
    cost = math.fsum(moved[value] for value, _ in conversions)
    return LayoutSolution(order, cost, conversions)


def _contract(problem: LayoutProblem) -> tuple[list[int], int]:
    """Network node of each variable, and the number of nodes.

    Tied variables share a node; pinned ones are in _RASTER or _TILE.
    """
    parent = list(range(problem.variables))
    for a, b in problem.ties:
        parent[_root(parent, a)] = _root(parent, b)
    roots = [_root(parent, i) for i in range(problem.variables)]
    raster = {roots[i] for i in problem.raster}
    tile = {roots[i] for i in problem.tile}
    if clash := raster & tile:
        first = next(root for root in roots if root in clash)
        tied = frozenset(i for i, root in enumerate(roots) if root == first)
        raise LayoutConflict(tied & problem.raster, tied & problem.tile, tied)
    node_of_root = dict.fromkeys(raster, _RASTER) | dict.fromkeys(tile, _TILE)
    nodes = 2
    for root in roots:
        if root not in node_of_root:
            node_of_root[root] = nodes
            nodes += 1
    return [node_of_root[root] for root in roots], nodes


def _root(parent: list[int], i: int) -> int:
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


def _exact_costs(moved: Mapping[int, float], position: Mapping[int, int]) -> dict[int, int]:
    """One integer per value whose sums compare as (bytes, number of conversions, positions) do.

    Floats would make equal cuts differ by rounding. A value converts in two directions, but never
    in both at once.
    """
    ratios = {value: float(size).as_integer_ratio() for value, size in moved.items()}
    denominator = math.lcm(*(d for _, d in ratios.values()))
    per_conversion = 1 + sum(position.values())
    per_byte = (1 + len(ratios)) * per_conversion
    return {
        value: n * (denominator // d) * per_byte + per_conversion + position[value]
        for value, (n, d) in ratios.items()
    }


class _Network:
    """Flow network whose minimum cut is the layout: the source's side is in raster order."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes  # auxiliary nodes follow
        self.parts = list(range(nodes))  # union-find: what hangs together without source and sink
        self.edges: dict[tuple[int, int], int | None] = {}  # None: infinite

    def connect(self, value: int, readers: AbstractSet[int], capacity: int) -> None:
        """Charge `capacity` once if any reader is not in the order of `value`."""
        others = readers - {value}
        if value != _TILE:
            for target in self._shared(others, settled=_TILE, moot=_RASTER, outward=True):
                self._add(value, target, capacity)
        if value != _RASTER:
            for target in self._shared(others, settled=_RASTER, moot=_TILE, outward=False):
                self._add(target, value, capacity)

    def _shared(
        self, readers: AbstractSet[int], settled: int, moot: int, outward: bool
    ) -> Iterable[int]:
        """The node that stands for "some reader is in that order", if any may be.

        A reader pinned to that order settles it for all; one pinned to the other order never asks.
        """
        if settled in readers:
            return (settled,)
        free = sorted(readers - {moot})
        if len(free) < 2:
            return free
        auxiliary = len(self.parts)
        self.parts.append(auxiliary)
        for reader in free:
            self._add(*((auxiliary, reader) if outward else (reader, auxiliary)), None)
        return (auxiliary,)

    def _add(self, tail: int, head: int, capacity: int | None) -> None:
        if tail < 2 and head < 2:
            return  # both pinned: the cost is paid in every assignment
        before = self.edges.get((tail, head), 0)
        self.edges[tail, head] = None if capacity is None or before is None else before + capacity
        if tail >= 2 and head >= 2:
            self.parts[_root(self.parts, tail)] = _root(self.parts, head)

    def tile_side(self) -> list[bool]:
        """For each node, is it on the sink's side of the minimum cut? If several, the smallest."""
        in_tile = [node == _TILE for node in range(self.nodes)]
        components: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for tail, head in self.edges:
            components[_root(self.parts, max(tail, head))].append((tail, head))
        for component in components.values():
            if not any(head == _TILE for _, head in component):
                continue  # nothing draws it out of raster order
            for node in self._cut(component):
                if node < self.nodes:
                    in_tile[node] = True
        return in_tile

    def _cut(self, component: Sequence[tuple[int, int]]) -> Iterable[int]:
        """Nodes that still reach the sink when the flow through `component` is maximal."""
        from networkx import DiGraph  # here, since its import is slow and most graphs need no cut
        from networkx.algorithms.flow import boykov_kolmogorov

        graph: Any = DiGraph()  # networkx is typed in some versions and environments only
        graph.add_nodes_from((_RASTER, _TILE))
        for tail, head in component:
            capacity = self.edges[tail, head]
            graph.add_edge(tail, head, **({} if capacity is None else {"capacity": capacity}))
        # The fastest of networkx's algorithms on long chains, on random graphs and on hubs alike:
        # at 6,000 variables and 10,000 uses it takes 0.1-0.6 s, where dinitz and preflow_push vary
        # from 0.1 to 30 s.
        residual = boykov_kolmogorov(graph, _RASTER, _TILE)
        reached = {_TILE}
        frontier = [_TILE]
        while frontier:
            for tail, edge in residual.pred[frontier.pop()].items():
                if tail not in reached and edge["flow"] < edge["capacity"]:
                    reached.add(tail)
                    frontier.append(tail)
        return reached
