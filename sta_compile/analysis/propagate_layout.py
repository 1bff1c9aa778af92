"""Which values of the graph should be in tile order?

Builds the minimum cut problem of `planning.cut_layout` for one grid: a variable per value that holds the grid's tokens,
pins for values that exist in raster order only (graph inputs and outputs, operations that cut the grid up or that are not
known) and for what the replaced attentions read and write, ties for values that share written memory, and a use wherever an
operation reads a value, which is where a conversion may go.

In a diffusers Wan, the tokens are converted once after the patch embed, the rope tables once each, and back once before the
unpatchify, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from .._torch import size_hint
from ..planning.cut_layout import LayoutProblem, LayoutSolution, Use, solve
from .axes import Axis, Size
from .graph_view import canonical_name, fake_value, is_inplace, is_tensor
from .infer_grid import VideoAttention
from .partial_values import Pattern, Spread, spreads
from .picked_rows import PickedRows, picked_rows
from .token_values import Place, TokenValues, storage_of, written_storages
from .trace_dims import DimTrace


@dataclass(frozen=True, eq=False)
class Conversion:
    """One value, converted for some of its readers. `readers` are nodes of the value's own graph.

    span: the number of dimensions, from `dim` on, over which the value has the grid cut up.
    lead: grids in these dimensions, one after the other.
    """

    value: torch.fx.Node
    dim: int
    span: int
    lead: Size
    offsets: tuple[Size, ...]  # of each time that the value holds the grid
    to_tile: bool
    readers: tuple[torch.fx.Node, ...]


@dataclass(frozen=True, eq=False)
class LayoutPlan:
    """spreads: partial values whose rows are picked in tile order. picked: tokens in tile order, picked by their numbers."""

    conversions: tuple[Conversion, ...]
    logical: int  # conversions of the cut; a conversion repeated after in-place writes counts once
    spreads: tuple[Spread, ...] = ()
    picked: tuple[PickedRows, ...] = ()


class LayoutBuilder:
    """The layout problem of one grid; `sites` are the attentions over it that are replaced."""

    def __init__(self, trace: DimTrace, grid: Axis, sites: Iterable[VideoAttention]) -> None:
        self.trace, self.view = trace, trace.view
        self.values = TokenValues(trace, grid)
        self.sites = {s.site.node: s.site for s in sites}
        self.variables: dict[torch.fx.Node, int] = {}
        # Variables of lists of numbers: the rows of partial values, and the places of tokens (offset, length).
        self.numbers: dict[Pattern | tuple[int, int], int] = {}
        self.spreads: list[Spread] = []
        self.picked: list[PickedRows] = []
        self.ties: list[tuple[int, int]] = []
        self.raster: set[int] = set()
        self.tile: set[int] = set()
        self.uses: list[Use] = []
        self.reads: list[tuple[torch.fx.Node, torch.fx.Node, int]] = []  # value, reader, variable
        self.places: dict[torch.fx.Node, Place | None] = {}
        self.dead = self._dead_nodes()

    def _place(self, node: torch.fx.Node) -> Place | None:
        if node not in self.places:
            self.places[node] = self.values.place(node)
        return self.places[node]

    def _dead_nodes(self) -> set[torch.fx.Node]:
        """Nodes inside decomposed attentions that nothing else reads once the attentions are replaced."""
        operands = {n for site in self.sites.values() for n in (site.q, site.k, site.v)}
        dead: set[torch.fx.Node] = set()
        private = {node for site in self.sites.values() for node in site.private}
        for node in reversed(self.view.nodes):
            if node in self.sites or node in operands:
                continue
            if is_inplace(node) and node not in private:
                continue
            if node.op in ("output", "placeholder") or not node.users:
                continue
            if all(user in dead or user in self.sites for user in node.users):
                dead.add(node)
        return dead

    def _variable(self, node: torch.fx.Node) -> int:
        return self.variables.setdefault(node, len(self.variables) + len(self.numbers))

    def _numbers(self, key: Pattern | tuple[int, int]) -> int:
        """The variable of a list of numbers, which is made in raster order, once for a graph."""
        if key not in self.numbers:
            self.numbers[key] = len(self.variables) + len(self.numbers)
            self.raster.add(self.numbers[key])
        return self.numbers[key]

    def problem(self, *, around_sites: bool = False) -> LayoutProblem:
        """The cut problem; `around_sites` pins all but the attentions to raster order."""
        for node in self.view.nodes:
            if node not in self.dead:
                self._relate(node)
        self._tie_written_memory()
        if around_sites:
            sites = {self.variables[n] for n in self.sites if n in self.variables}
            self.raster |= set(self.variables.values()) - sites
        return LayoutProblem(
            variables=len(self.variables) + len(self.numbers),
            ties=self.ties,
            raster=frozenset(self.raster),
            tile=frozenset(self.tile),
            uses=self.uses,
        )

    def _relate(self, node: torch.fx.Node) -> None:
        if node in self.sites:
            self._site(node)
        elif node.op == "output":
            self._outputs(node)
        elif node in self.view.sources:
            self._operands(node)
        elif node in self.view.body:
            if self._place(node) is not None:
                variable = self._variable(node)
                if node in self.trace.opaque:
                    self.raster.add(variable)
        elif node.op == "placeholder" or node.op == "get_attr":
            if self._place(node) is not None:
                self.raster.add(self._variable(node))
        else:
            self._operation(node)

    def _site(self, node: torch.fx.Node) -> None:
        variable = self._variable(node)
        self.tile.add(variable)
        site = self.sites[node]
        for operand in (site.q, site.k, site.v):
            self._read(operand, node, variable)

    def _outputs(self, node: torch.fx.Node) -> None:
        """The graph's outputs are raster; a body's outputs become the values of its calls, in one order for all calls."""
        calls = self.view.calls.get(self.view.owner[node], [])
        for operand in node.all_input_nodes:
            if self._place(operand) is None:
                continue
            if not calls:
                pinned = self._variable(node)
                self.raster.add(pinned)
                self._read(operand, node, pinned)
            for call in calls:
                self.ties.append((self._variable(calls[0]), self._variable(call)))
                self._read(operand, node, self._variable(call))

    def _operands(self, node: torch.fx.Node) -> None:
        """A body's input reads its argument at each call site."""
        calls = self.view.calls[self.view.owner[node]]
        operands = [(call, self._operand(call, node)) for call in calls]
        holding = [(c, o) for c, o in operands if isinstance(o, torch.fx.Node) and self._place(o)]
        if self._place(node) is None and not holding:
            return
        variable = self._variable(node)
        if self._place(node) is None or any(call in self.trace.opaque for call in calls):
            self.raster.add(variable)  # one call's tokens are in another order than another's
        for call, operand in holding:
            self._read(operand, call, variable)

    def _operand(self, call: torch.fx.Node, placeholder: torch.fx.Node) -> Any:
        """The argument of a call that a placeholder of its body stands for."""
        inputs = [n for n in self.view.body[call].graph.nodes if n.op == "placeholder"]
        return call.args[len(call.args) - len(inputs) + inputs.index(placeholder)]

    def _operation(self, node: torch.fx.Node) -> None:
        inputs = [n for n in node.all_input_nodes if n not in self.dead]
        holding = [n for n in inputs if self._place(n) is not None]
        place = self._place(node)
        if not holding and place is None:
            return
        variable = self._variable(node)
        picked = None if node in self.trace.opaque else picked_rows(self.values, node)
        if picked is not None:
            self._pick(picked)
            inputs = [n for n in inputs if n is not picked.value]
            holding = [n for n in holding if n is not picked.value]
        for operand in holding:
            self._read(operand, node, variable)
        found = spreads(self.values, node)
        for spread in found:
            # As dear as two of these values: a cosine and a sine, of once, are converted as they are.
            number, position = self._numbers(spread.pattern), self.view.position[node]
            self.uses.append(Use(number, variable, 2 * _bytes(node), position))
        self.spreads += found
        bound = picked is None and bool(holding) and self.values.order_bound(node)
        if bound or self._pinned(node, inputs, holding, place, {s.value for s in found}):
            self.raster.add(variable)

    def _pick(self, picked: PickedRows) -> None:
        """Tokens in tile order are picked by numbers that are translated; the tokens stay where they are."""
        self.picked.append(picked)
        number = self._numbers((picked.offset, picked.length))
        position = self.view.position[picked.reader]
        self.uses.append(Use(number, self._variable(picked.value), 8.0 * picked.length, position))

    def _pinned(
        self,
        node: torch.fx.Node,
        inputs: list[torch.fx.Node],
        holding: list[torch.fx.Node],
        place: Place | None,
        partial: set[torch.fx.Node],
    ) -> bool:
        """Must an operation see raster order? partial: operands that are spread over the tokens."""
        if node in self.trace.opaque or self.values.misaligned(node):
            return True
        if any(self.values.scattered(n) for n in [*inputs, node] if n not in partial):
            return True
        if is_inplace(node):
            target = node.args[0]
            return not isinstance(target, torch.fx.Node) or self._place(target) is None
        if place is None:
            return not self.values.order_free(node)
        return not holding and not partial and not self.values.constant(node)

    def _read(self, value: torch.fx.Node, reader: torch.fx.Node, variable: int) -> None:
        place = self._place(value)
        if place is None:
            return
        mine = self._variable(value)
        if mine == variable:
            return
        if not place.movable or (is_inplace(reader) and reader.args[0] is value):
            self.ties.append((mine, variable))
            return
        self.reads.append((value, reader, variable))
        # Of two views of one value, the one with a token axis of its own is the better to convert.
        cost = _bytes(value) * (1 if place.span == 1 else 1.001) * self._times(value)
        self.uses.append(Use(mine, variable, cost, self.view.position[reader]))

    def _times(self, node: torch.fx.Node) -> int:
        """How many times a node is run: those in the body of a nested region, once for each of its calls."""
        owner, times = self.view.owner[node], 1
        while owner is not self.view.gm:
            calls = self.view.calls[owner]
            owner, times = self.view.owner[calls[0]], times * len(calls)
        return times

    def _tie_written_memory(self) -> None:
        """A write through one view is seen through all: the views of written memory share one order."""
        written = written_storages(self.view)
        first: dict[int, int] = {}
        for node, variable in self.variables.items():
            for storage in storage_of(node):
                if storage in written:
                    self.ties.append((first.setdefault(storage, variable), variable))

    def plan(self, solution: LayoutSolution) -> LayoutPlan:
        """The conversions that a solution asks for, with the readers that each serves."""
        written = written_storages(self.view)
        served: dict[tuple[torch.fx.Node, bool, int], list[torch.fx.Node]] = {}
        for value, reader, variable in self.reads:
            if solution.order[self.variables[value]] == solution.order[variable]:
                continue
            to_tile = solution.order[variable]
            epoch = self._writes_before(value, reader, written)
            served.setdefault((value, to_tile, epoch), []).append(reader)
        conversions = []
        for (value, to_tile, _), readers in served.items():
            place = self._place(value)
            assert place is not None
            conversions.append(
                Conversion(
                    value,
                    place.dim,
                    place.span,
                    place.lead,
                    place.offsets,
                    to_tile,
                    tuple(dict.fromkeys(readers)),
                )
            )
        kept = tuple(s for s in self.spreads if solution.order[self.variables[s.reader]])
        picked = tuple(p for p in self.picked if solution.order[self.variables[p.value]])
        numbers = {self.numbers[s.pattern] for s in kept}
        numbers |= {self.numbers[p.offset, p.length] for p in picked}
        logical = len({(v, t) for v, t, _ in served}) + len(numbers)
        return LayoutPlan(tuple(conversions), logical, kept, picked)

    def _writes_before(
        self,
        value: torch.fx.Node,
        reader: torch.fx.Node,
        written: dict[int, list[torch.fx.Node]],
    ) -> int:
        position = self.view.position
        return sum(
            position[write] < position[reader]
            for storage in storage_of(value)
            for write in written.get(storage, [])
        )


def _bytes(node: torch.fx.Node) -> float:
    value = fake_value(node)
    assert is_tensor(node), canonical_name(node)
    total = float(value.element_size())
    for size in value.shape:
        total *= size_hint(size)
    return total


def propagate_layout(
    trace: DimTrace, grid: Axis, sites: Iterable[VideoAttention], *, around_sites: bool = False
) -> LayoutPlan:
    """The cheapest set of conversions for one grid. Raises LayoutConflict if ties contradict pins."""
    builder = LayoutBuilder(trace, grid, sites)
    return builder.plan(solve(builder.problem(around_sites=around_sites)))
