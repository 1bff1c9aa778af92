"""Small functions through Dynamo, with the axes of their outputs as text.

`Traced(lambda x: x.flatten(1).T, "b2 h3 w4").text()` is "h*w b": names are those of the input's axes. `h0*h1` are the parts
that an axis was split into, `h[1:3]` is a slice, `[h|w]` a concatenation, `?5` a new axis of 5 and `1` an axis of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.fx import GraphModule, Node

from sta_compile.analysis.axes import Atom, Axis, Concat, Dims, axis_size, resolve
from sta_compile.analysis.graph_view import GraphView, canonical_name
from sta_compile.analysis.trace_dims import DimTrace, trace_dims


def capture_with_inputs(
    function: Callable[..., Any], *inputs: Any, dynamic: bool = False
) -> tuple[GraphModule, list[Any]]:
    """The one graph that Dynamo hands to a backend, and its inputs in the order of its placeholders."""
    graphs: list[tuple[GraphModule, list[Any]]] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((gm, list(example_inputs)))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    (graph,) = graphs
    return graph


def capture(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> GraphModule:
    return capture_with_inputs(function, *inputs, dynamic=dynamic)[0]


def calls(gm: GraphModule, name: str) -> list[Node]:
    """The calls of a function or method, by its name."""
    names = [(n, getattr(n.target, "__name__", n.target)) for n in gm.graph.nodes]
    return [node for node, found in names if found == name and "call" in node.op]


class Traced:
    """specs: one text per input, a letter and a size for each of its axes."""

    def __init__(self, function: Callable[..., Any], *specs: str, dynamic: bool = False) -> None:
        self.function = function
        self.axes = [[(axis[0], int(axis[1:])) for axis in spec.split()] for spec in specs]
        self.inputs = [torch.randn([size for _, size in axes]) for axes in self.axes]
        self.gm, examples = capture_with_inputs(function, *self.inputs, dynamic=dynamic)
        self.view = GraphView(self.gm)
        self.trace: DimTrace = trace_dims(self.view)
        nodes = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        self.placeholders = {  # those inputs that the graph uses
            i: node
            for node, example in zip(nodes, examples, strict=True)
            for i, x in enumerate(self.inputs)
            if example is x
        }

    @property
    def outputs(self) -> list[Node]:
        (values,) = self.gm.graph.output_node().args
        return [node for node in values if isinstance(node, Node)]  # type: ignore[union-attr]

    @property
    def opaque(self) -> set[str]:
        return {canonical_name(n) for n in self.trace.opaque}

    def dims(self, node: Node) -> Dims:
        dims = self.trace.dims(node)
        assert dims is not None
        return dims

    def text(self) -> str:
        names = self._names()
        return ", ".join(
            " ".join(_text(axis, names) for axis in self.dims(node)) for node in self.outputs
        )

    def _names(self) -> dict[Atom, str]:
        names: dict[Atom, str] = {}
        for i, node in sorted(self.placeholders.items()):
            for (letter, _), axis in zip(self.axes[i], self.dims(node), strict=True):
                atoms = [factor for factor in axis if isinstance(factor, Atom)]
                for part, atom in enumerate(atoms):
                    names.setdefault(atom, letter if len(axis) == 1 else f"{letter}{part}")
        return names

    def numbered_outputs(self) -> list[Tensor]:
        """The outputs where every element of every input is its own number."""
        first, numbered = 0, []
        for x in self.inputs:
            numbered.append(torch.arange(first, first + x.numel()).view(x.shape))
            first += x.numel()
        found = self.function(*numbered)
        return list(found) if isinstance(found, (tuple, list)) else [found]


def _text(axis: Axis, names: dict[Atom, str]) -> str:
    return "*".join(_factor_text(factor, names) for factor in resolve(axis)) or "1"


def _factor_text(factor: Atom | Concat, names: dict[Atom, str]) -> str:
    if isinstance(factor, Concat):
        return "[" + "|".join(_text(part, names) for part in factor.parts) + "]"
    if factor in names:
        return names[factor]
    if factor.slice_of is not None:
        axis, start, stop = factor.slice_of
        return f"{_text(axis, names)}[{start}:{stop}]"
    return f"?{axis_size((factor,))}"
