"""What do the graphs of one call tell each other of token axes, by their length?

A graph states the grids that leave it, and the sequences that leave it and are none: if text of 14,040 tokens stands beside
a video of 14,040, their number tells a block nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from . import _torch
from .analysis.axes import Atom, Axis, axis_size, segments_of
from .analysis.graph_view import fake_value, is_parameter, is_tensor
from .analysis.grid_axis import IN_ORDER, GridAxis
from .analysis.infer_grid import GridInference
from .grid_plan import known_shape
from .ir.known_tokens import Doubt, Leaving, LeavingTokens, OtherSequence, PassedTokens
from .seen_tokens import may_be_tokens, may_be_video
from .settings import Settings


def sequences_given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """Numbers of tokens of what a model is called with beside its video, [batch, tokens, features] or tokens first.

    A model without a latent, which has four dimensions or more, gets its video in such a form itself.
    """
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    floats = [x for x in given if x.is_floating_point()]
    packed = [x for x in floats if may_be_tokens(x)]
    video = 0 if any(x.dim() > 3 for x in floats) else 1
    counts = Counter(int(n) for x in packed for n in set(x.shape[:2]))
    return frozenset(n for n, times in counts.items() if times > video)


def given_video(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Is a model called with a latent of several frames? [batch, channels, frames, rows, columns], or frames first."""
    given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 4)
    return any(x.is_floating_point() and 1 not in x.shape[1:3] for x in given)


def declared_tokens(settings: Settings) -> int:
    """How many tokens the declared grid of a block has, which can't tell what it is called with; 0 for a whole model."""
    return 0 if settings.grid is None or _torch.is_whole_forward() else prod(settings.grid)


def other_sequences(inference: GridInference) -> tuple[OtherSequence, ...]:
    """Those that are made in the graph. One that comes in was told of before: by the graph that it came from, or by
    `sequences_given`."""
    trace, grids = inference.trace, inference.grids
    nodes = trace.view.gm.graph.nodes
    inputs = [n for n in nodes if n.op == "placeholder"]
    given = {atom for n in inputs if not is_parameter(n) for atom in trace.atoms(n)}
    values = next(iter(reversed(nodes))).args[0]
    found = []
    for output, node in enumerate(values if isinstance(values, (tuple, list)) else ()):
        dims = trace.dims(node) or ()
        for dim, axis in enumerate(dims[:-1] if len(dims) > 2 else ()):
            parts = segments_of(axis)
            known = any(grids.proved(part) or grids.by_positions(part) for part in parts)
            if not known and not _came_in(axis, given):
                sources = inference.streams.inputs_of(node)
                places = tuple(inputs.index(n) for n in sources if n in inputs)
                found.append(OtherSequence(output, dim, places))
    return tuple(found)


def _came_in(axis: Axis, given: Collection[Atom]) -> bool:
    """Is an axis one of the inputs', whole, though cut up and joined anew?"""
    return all(
        isinstance(factor, Atom) and factor.slice_of is None and factor in given for factor in axis
    )


def specialise_inputs(
    gm: torch.fx.GraphModule, dims: Mapping[torch.fx.Node, Sequence[int]]
) -> None:
    """Makes dimensions of inputs numbers, with a guard, where they are symbolic."""
    env = _torch.shape_env_of(gm)
    for node, places in dims.items():
        for dim in places:
            size = fake_value(node).shape[dim]
            if isinstance(size, torch.SymInt):
                _torch.specialise(size.node.expr, env)


def leaving_of(gm: torch.fx.GraphModule, inference: GridInference, *, told: bool = True) -> Leaving:
    """What is shown of the token axes that leave a graph; symbolic grids become numbers, with a guard.

    told: it was told what is known of those that come in, as is one with attention. Another passes on what is known of them.
    """
    tokens = tuple(_leaving_tokens(gm, inference))
    shown = {(t.output, t.dim) for t in tokens}
    passed = () if told else _passed_tokens(inference)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return Leaving(
        tokens,
        tuple(dict.fromkeys(_parts_leaving(gm, inference))),
        tuple(each for each in passed if (each.output, each.dim) not in shown),
        tuple(i for i, node in enumerate(inputs) if not is_parameter(node)),
        not told,
    )


def _passed_tokens(inference: GridInference) -> Iterator[PassedTokens]:
    """Axes of tokens that inputs have, and that leave a graph in their order."""
    trace, streams = inference.trace, inference.streams
    nodes = trace.view.gm.graph.nodes
    inputs = [n for n in nodes if n.op == "placeholder"]
    values = next(iter(reversed(nodes))).args[0]
    for output, node in enumerate(values if isinstance(values, (tuple, list)) else ()):
        if not isinstance(node, torch.fx.Node) or not is_tensor(node):
            continue
        sources = [n for n in streams.inputs_of(node) if may_be_tokens(fake_value(n))]
        for dim, axis in enumerate((trace.dims(node) or ())[:-1]):
            holding = [n for n in sources if axis and streams.holds(n, axis)]
            places = [
                (inputs.index(n), d)
                for n in holding
                for d, other in enumerate(trace.dims(n) or ())
                if other == axis
            ]
            whole = bool(places) and len(places) == len(holding)
            if whole and not inference.moved(node, axis, in_all=True):
                yield PassedTokens(output, dim, tuple(places))


def _parts_leaving(gm: torch.fx.GraphModule, inference: GridInference) -> Iterator[int]:
    """Numbers of tokens of a graph's outputs that have frames, or other parts of a video, in their batch."""
    output = next(iter(reversed(inference.trace.view.gm.graph.nodes)))
    for node in output.all_input_nodes:
        for dims in inference.trace.tensors(node):
            for part in inference.factorisation.parts_of(dims):
                shape = known_shape(gm, (1, 1, axis_size(part)))
                if shape is not None:
                    yield prod(shape)


def _leaving_tokens(gm: torch.fx.GraphModule, inference: GridInference) -> Iterator[LeavingTokens]:
    nodes = inference.trace.view.gm.graph.nodes
    inputs = [n for n in nodes if n.op == "placeholder"]
    values = next(iter(reversed(nodes))).args[0]
    for output, node in enumerate(values if isinstance(values, (tuple, list)) else ()):
        dims = inference.trace.dims(node) or ()
        for dim, axis in enumerate(dims):
            parts = segments_of(axis)
            grids = [_grid_of(inference, part, last=dim == len(dims) - 1) for part in parts]
            shapes = [None if g is None else known_shape(gm, g.shape) for g in grids]
            sizes = [
                axis_size(part) if shape is None else prod(shape)
                for part, shape in zip(parts, shapes, strict=True)
            ]
            symbolic = sum(not isinstance(size, int) for size in sizes)
            if symbolic > 1:
                continue
            if not any(shapes):
                alone = len(parts) == 1 and dim < 2 and may_be_tokens(fake_value(node))
                if alone and inference.came_moved(node, axis):
                    yield LeavingTokens(output, dim, Doubt.MOVED)
                continue
            known: Any = tuple(
                (size if isinstance(size, int) else None, shape)
                for size, shape in zip(sizes, shapes, strict=True)
            )
            if any(g is not None and g.order != IN_ORDER for g in grids):
                known = Doubt.ORDER
            if any(g is not None and inference.moved(node, g.axis) for g in grids):
                known = Doubt.MOVED
            own = any(g is not None and not inference.is_told(g) for g in grids)
            told = [g.axis for g in grids if g is not None]
            # A table of positions, or one row for each token, may have told of the axis of tokens beside it.
            may_be_moved = may_be_video if own else may_be_tokens
            places = tuple(
                inputs.index(n)
                for n in inference.streams.inputs_of(node)
                if may_be_moved(fake_value(n))
                and (own or any(inference.streams.holds(n, axis) for axis in told))
            )
            yield LeavingTokens(output, dim, known, places)


def _grid_of(inference: GridInference, part: Axis, last: bool) -> GridAxis | None:
    """Of a part of an axis that leaves a graph. last: it is the last of a tensor."""
    grid = inference.grids.proved(part)
    if grid is not None:
        return None if grid.hint is not None else grid  # a hint is checked in its own graph only
    # The last axis of a rope table is no token axis, and made of three as well; three factors that only a view made may be
    # the video's in another order.
    grid = None if last else inference.grids.by_positions(part)
    return grid if grid is not None and grid.named else None
