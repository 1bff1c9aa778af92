"""Dimension provenance: which grid axes, segments or heads is every tensor axis of a graph made of?

One forward walk over the graph gives each value its axes (see `axes`); operations relate them. After a Conv3d patch
embed of a 3x4x5 latent, `flatten(2).transpose(1, 2)` has axes (batch, t3 h4 w5, channel), and the same three atoms reach
q, k and v through linears, norms and head splits, the rope tables through multiplication, and the unpatchify at the end.
Nothing is matched by size: two axes are the same only if an operation makes them so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from .axes import (
    Atom,
    Axis,
    Dims,
    Size,
    atoms_of,
    axis_size,
    fresh,
    resolve,
    same_size,
    size_of,
    unify,
)
from .graph_view import GraphView, argument, canonical_name, fake_value, is_pointwise

# A tensor's axes; for a tuple of tensors, a list with one entry per element (None: not a tensor).
Traced = Dims | list["Dims | None"]


class DimTrace:
    """Axes of every tensor value of a graph.

    opaque: nodes whose rule is not known: their outputs have new axes, and their inputs keep raster order.
    misaligned: axes that a node combines position by position, though what is known of them can't be aligned.
    invented: atoms of a node's outputs that none of its inputs has. A later operation may show that such an axis has the
        positions of another one, but what the node moved where is not known.
    joined: for the call of a body that is called more than once, axes of its arguments that were not the same axis as
        at the first call before the body made them one: text that goes through the block of the video, for example.
    shuffled: nodes that put pieces of a video one behind the other in no order that is known.
    """

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.values: dict[torch.fx.Node, Traced] = {}
        self.opaque: set[torch.fx.Node] = set()
        self.invented: dict[torch.fx.Node, set[Atom]] = {}
        self.misaligned: dict[torch.fx.Node, list[Axis]] = {}
        self.joined: dict[torch.fx.Node, list[Axis]] = {}
        self.shuffled: set[torch.fx.Node] = set()

    def dims(self, node: Any) -> Dims | None:
        """Axes of a tensor node, resolved as far as known; None for anything else."""
        traced = self.values.get(node) if isinstance(node, torch.fx.Node) else None
        return tuple(resolve(axis) for axis in traced) if isinstance(traced, tuple) else None

    def tensors(self, node: torch.fx.Node) -> list[Dims]:
        """Axes of a tensor, or of each tensor of a tuple."""
        traced = self.values.get(node)
        options = traced if isinstance(traced, list) else [traced]
        return [tuple(map(resolve, dims)) for dims in options if isinstance(dims, tuple)]

    def atoms(self, node: torch.fx.Node) -> set[Atom]:
        return {a for dims in self.tensors(node) for axis in dims for a in atoms_of(axis)}

    def axis(self, node: torch.fx.Node, dim: int) -> Axis:
        dims = self.values[node]
        assert isinstance(dims, tuple)
        return resolve(dims[dim])

    def relate(self, node: torch.fx.Node, a: Axis, b: Axis) -> bool:
        """`unify` for a node that combines two axes position by position; remembers where that fails."""
        if unify(a, b):
            return True
        self.misaligned.setdefault(node, []).extend((a, b))
        return False


def shape_of(node: Any) -> tuple[Size, ...]:
    return tuple(size_of(s) for s in fake_value(node).shape)


def operand(
    trace: DimTrace, node: torch.fx.Node, position: int = 0, name: str = "input"
) -> Dims | None:
    """Axes of an argument of a node."""
    return trace.dims(argument(node, position, name))


def fresh_dims(value: Any) -> Traced | None:
    if isinstance(value, torch.Tensor):
        return tuple(fresh(size_of(s)) for s in value.shape)
    if isinstance(value, (tuple, list)):
        return [v if isinstance(v, tuple) else None for v in map(fresh_dims, value)]
    return None


def trace_dims(view: GraphView, known: Mapping[torch.fx.Node, Dims] | None = None) -> DimTrace:
    """Axes of every tensor value; terminates in one pass over the nodes. known: those of inputs, where more is known."""
    from .learn_sizes import learn_sizes
    from .trace_index import relate_setitem
    from .trace_rules import RULES

    learn_sizes(view)
    trace = DimTrace(view)
    for node in view.nodes:
        if node.op == "output":
            continue
        value = fake_value(node)
        if canonical_name(node) == "setitem":
            if not relate_setitem(trace, node):
                trace.opaque.add(node)
            continue
        if not _holds_tensors(value) and node not in view.body:
            continue
        name = canonical_name(node)
        if node in view.sources:
            trace.values[node] = _of_placeholder(trace, node)
        elif node in view.body:
            trace.values[node] = _of_call(trace, node)
        elif known and node in known:
            _store(trace, node, known[node])
        elif not name:
            _store(trace, node, fresh_dims(value))
        elif name in RULES:
            _apply(trace, node, RULES[name](trace, node), value)
        elif is_pointwise(name):
            _apply(trace, node, pointwise(trace, node), value)
        else:
            _apply(trace, node, None, value)
    return trace


def _holds_tensors(value: Any) -> bool:
    """Is a value a tensor, or a tuple of values of which one may be? Sizes are not."""
    if isinstance(value, torch.Size):
        return False
    return isinstance(value, (torch.Tensor, tuple, list))


def _store(trace: DimTrace, node: torch.fx.Node, traced: Traced | None) -> None:
    if traced is not None:
        trace.values[node] = traced


def _of_placeholder(trace: DimTrace, node: torch.fx.Node) -> Traced:
    """A body's input has the axes of its argument at every call site."""
    sources = trace.view.sources[node]
    first = trace.values.get(sources[0])
    if first is None:
        first = fresh_dims(fake_value(node)) or ()
    return first


def _of_call(trace: DimTrace, node: torch.fx.Node) -> Traced:
    body = trace.view.body[node]
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    place = trace.view.calls[body].index(node)
    for inner in inputs if place else ():  # the first call's operands are the body's inputs
        for outer in trace.view.sources.get(inner, [])[place : place + 1]:
            a, b = trace.values.get(inner), trace.values.get(outer)
            if isinstance(a, tuple) and isinstance(b, tuple):
                for left, right in zip(a, b, strict=True):
                    if resolve(left) != resolve(right):
                        trace.joined.setdefault(node, []).extend((left, right))
                    trace.relate(node, left, right)
    if node in trace.misaligned:  # what the body says of its outputs is not so for this call
        trace.opaque.add(node)
        return fresh_dims(fake_value(node)) or ()
    outputs = trace.view.body_outputs(node)
    if isinstance(outputs, torch.fx.Node):
        return trace.values.get(outputs, ())
    out: list[Dims | None] = []
    for output in outputs:
        traced = trace.values.get(output) if isinstance(output, torch.fx.Node) else None
        out.append(traced if isinstance(traced, tuple) else None)
    return out


def _fits(traced: Traced | None, value: Any) -> bool:
    if isinstance(traced, tuple) and isinstance(value, torch.Tensor):
        return len(traced) == value.dim() and all(
            same_size(axis_size(resolve(axis)), size_of(s))
            for axis, s in zip(traced, value.shape, strict=True)
        )
    if isinstance(traced, list) and isinstance(value, (tuple, list)):
        return len(traced) == len(value) and all(
            t is None or _fits(t, v) for t, v in zip(traced, value, strict=True)
        )
    return False


def _apply(trace: DimTrace, node: torch.fx.Node, traced: Traced | None, value: Any) -> None:
    """Takes a rule's answer if it has the sizes of the fake value; anything else makes the node opaque."""
    if _fits(traced, value):
        _store(trace, node, traced)
        read = {atom for source in node.all_input_nodes for atom in trace.atoms(source)}
        trace.invented[node] = trace.atoms(node) - read
    else:
        trace.opaque.add(node)
        _store(trace, node, fresh_dims(value))


def broadcast(trace: DimTrace, node: torch.fx.Node, operands: Sequence[Any]) -> Dims | None:
    """Axes of operands that are broadcast together; axes at the same position become one.

    Where the known structures can't be aligned (a rope table whose channels are a concatenation, times channels that are
    pairs) the output's axis is a new one: nothing is known of it but its size.
    """
    known = [d for d in map(trace.dims, operands) if d is not None]
    if not known:
        return None
    rank = max(len(d) for d in known)
    out: list[Axis] = []
    for position in range(-rank, 0):
        axes = [d[position] for d in known if len(d) >= -position and d[position]]
        aligned = True
        for other in axes[1:]:
            aligned &= trace.relate(node, axes[0], other)
        if axes and not aligned:
            out.append(fresh(max((axis_size(a) for a in axes), key=lambda s: not same_size(s, 1))))
        else:
            out.append(resolve(axes[0]) if axes else ())
    return tuple(out)


def pointwise(trace: DimTrace, node: torch.fx.Node) -> Dims | None:
    tensors: list[Any] = []
    for arg in [*node.args, *node.kwargs.values()]:
        tensors += arg if isinstance(arg, (tuple, list)) else [arg]
    if canonical_name(node) in ("type_as", "to") and tensors:  # `other` gives a dtype only
        tensors = tensors[:1]
    return broadcast(trace, node, tensors)
