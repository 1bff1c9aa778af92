"""Emits the flags that keep noisy steps dense: one bool per sample, computed in the graph from its timestep input.

    timestep [batch, 1, frames, 1, 1], noise 0..1000, dense_above 0.95
      -> to(float32) -> amax over all but the batch -> > 950.0        bool [batch]

The noisiest of a sample's tokens decides, since clean tokens next to it (a first frame that is given) have a level of
their own. Nothing is read on the host: no synchronisation, no recompile from step to step, and CUDA graphs capture it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.proxy import GraphAppendingTracer

from .._torch import statically_known_true
from ..analysis.find_timestep import TimestepFact
from ..analysis.graph_view import canonical_name, fake_value, is_inplace, is_tensor
from ..analysis.hints import Hint
from ..analysis.position_values import matches_grid
from ..errors import StaError
from ..ir.noise_level import Convention, UnknownConvention, comparisons, has_dense_steps
from .fake_values import VALUE, fake_mode_of, run

_READS_ON_HOST = ("item", "tolist", "numpy")
_COMPARE = {True: operator.gt, False: operator.lt}


def insert_dense(
    gm: torch.fx.GraphModule,
    fact: TimestepFact | None,
    convention: Convention | UnknownConvention | None,
    dense_above: float | None,
    dense_below: float,
    batch: int | torch.fx.Node,
    device: torch.device,
) -> torch.fx.Node | None:
    """A bool [batch] node in the root graph: which samples take the full window. None: no step is dense.

    Without a timestep or a known convention every sample is dense. batch: a number, or a node that holds a SymInt.
    """
    if not has_dense_steps(dense_above, dense_below):
        return None
    emitter = _Emitter(gm, batch)
    if fact is None or not isinstance(convention, Convention):
        return emitter.all_dense(device)
    return emitter.flags(fact.node, convention, dense_above, dense_below)


def insert_check(
    gm: torch.fx.GraphModule,
    hint: Hint,
    dense: torch.fx.Node | None,
    batch: int | torch.fx.Node,
    device: torch.device,
) -> torch.fx.Node:
    """A bool [batch] node in the root graph: `dense`, or all samples if an input hasn't the positions of a hinted grid.

    device: the attention's; positions may be on the host.
    """
    emitter = _Emitter(gm, batch, dense)

    def moved(flags: torch.fx.Node) -> torch.fx.Node:
        here = fake_value(flags).device == device
        return flags if here else emitter.call("to", (flags, device))

    matches = moved(emitter.traced(lambda v: matches_grid(v, hint.positions), hint.node))
    other = emitter.call(torch.logical_not, (emitter.call("expand", (matches, (batch,))),))
    return other if dense is None else emitter.call(torch.logical_or, (moved(dense), other))


class _Emitter:
    """Adds nodes right after the graph's inputs, or after a node that was added there, each with its fake value."""

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        batch: int | torch.fx.Node,
        after: torch.fx.Node | None = None,
    ) -> None:
        self.graph = gm.graph
        self.batch = batch
        nodes = list(gm.graph.nodes)
        self.existing = set(nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self.fake_mode = fake_mode_of(gm.graph)
        earlier = [inputs[-1], *(n for n in (batch, after) if isinstance(n, torch.fx.Node))]
        self.last = max(earlier, key=nodes.index)

    def all_dense(self, device: torch.device) -> torch.fx.Node:
        return self.call(torch.ones, ((self.batch,),), dtype=torch.bool, device=device)

    def flags(
        self,
        timestep: torch.fx.Node,
        convention: Convention,
        dense_above: float | None,
        dense_below: float,
    ) -> torch.fx.Node:
        level = self.call("to", (timestep, torch.float32))
        if convention.function is not None:
            level = self.apply(convention.function, level)
        level = self.per_sample(level, lowest=convention.rising)
        flags = [
            self.call(_COMPARE[test.above], (level, test.value))
            for test in comparisons(convention, dense_above, dense_below)
        ]
        return flags[0] if len(flags) == 1 else self.call(torch.logical_or, tuple(flags))

    def per_sample(self, level: torch.fx.Node, lowest: bool) -> torch.fx.Node:
        """[batch], of any shape: the noisiest of each sample, or of all where a sample has none of its own."""
        noisiest = torch.amin if lowest else torch.amax
        shape = fake_value(level).shape
        size = fake_value(self.batch)
        own = len(shape) > 0 and statically_known_true(shape[0] == size)
        single = len(shape) > 0 and statically_known_true(shape[0] == 1)
        if not own and not single and len(shape) > 0:
            level = self.call(noisiest, (level,))
        elif len(shape) > 1:
            level = self.call(noisiest, (level, tuple(range(1, len(shape)))))
        if own:
            return level
        # Expanded before it is compared: the flags are then a fresh [batch] tensor with stride 1.
        return self.call("expand", (level, (self.batch,)))

    def apply(self, function: Callable[[Any], Any], timestep: torch.fx.Node) -> torch.fx.Node:
        """The nodes of a user's function of the timestep [...] -> level [...]."""
        shape = fake_value(timestep).shape
        try:
            result = self.traced(function, timestep)
            found = fake_value(result).shape
            if found != shape:
                raise TypeError(f"it made shape {tuple(found)} of shape {tuple(shape)}")
        except Exception as error:
            for node in reversed([n for n in self.graph.nodes if n not in self.existing]):
                self.graph.erase_node(node)
            raise StaError(
                f"the function given as option noise can't be made part of the graph ({error}); write it as torch "
                "arithmetic on its argument, one level in 0..1 for each timestep and no branch on values, "
                "for example lambda t: 1 - t / 1000"
            ) from error
        return self.call("to", (result, torch.float32))

    def traced(self, function: Callable[[Any], Any], value: torch.fx.Node) -> torch.fx.Node:
        """The node that holds a function of an input. Raises TypeError for what can't be in a graph."""
        known = set(self.graph.nodes)
        with self.graph.inserting_before(self.last.next):
            tracer = GraphAppendingTracer(self.graph)
            result = function(torch.fx.Proxy(value, tracer))
        if not isinstance(result, torch.fx.Proxy):
            raise TypeError(f"it returned {type(result).__name__}, not a tensor")
        for node in [node for node in self.graph.nodes if node not in known]:
            if is_inplace(node):
                raise TypeError(f"{canonical_name(node)} writes to the model's timestep")
            if canonical_name(node) in _READS_ON_HOST:
                raise TypeError(f"{canonical_name(node)}() reads a value on the host")
            self._settle(node)
            if not is_tensor(node):
                raise TypeError(f"{node.name} is no tensor")
        return result.node

    def call(
        self, target: str | Callable[..., Any], args: tuple[Any, ...], **kwargs: Any
    ) -> torch.fx.Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        with self.graph.inserting_before(self.last.next):
            node = self.graph.create_node(op, target, args, kwargs)
        self._settle(node)
        return node

    def _settle(self, node: torch.fx.Node) -> None:
        """Gives a new node its value, and lets the next one follow it."""
        node.meta[VALUE] = run(node, self.fake_mode)
        self.last = node
