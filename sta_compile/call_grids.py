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
from .analysis.graph_view import is_parameter
from .analysis.grid_axis import IN_ORDER
from .analysis.infer_grid import GridInference
from .grid_plan import known_shape
from .ir.known_tokens import PARTS, OtherSequence, Segments, agreed
from .settings import Settings

# Ids and coordinates of tokens have up to four columns; features have more.
_COLUMNS = 4


def sequences_given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """Numbers of tokens of what a model is called with beside its video, [batch, tokens, features] or tokens first.

    A model without a latent, which has four dimensions or more, gets its video in such a form itself.
    """
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    floats = [x for x in given if x.is_floating_point()]
    packed = [x for x in floats if x.dim() == 3 and x.shape[-1] > _COLUMNS]
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


def specialise_inputs(gm: torch.fx.GraphModule, known: Collection[int]) -> None:
    """Makes symbolic dimensions of the inputs numbers, with a guard, where they may be a known number of tokens."""
    env = _torch.shape_env_of(gm)
    for node in gm.graph.nodes:
        value = node.meta.get("example_value") if known and node.op == "placeholder" else None
        for size in getattr(value, "shape", ()):
            expr = size.node.expr if isinstance(size, torch.SymInt) else size
            if expr is not size and _torch.known_value(expr, env) in known:
                _torch.specialise(expr, env)


def state_grids(gm: torch.fx.GraphModule, inference: GridInference) -> dict[int, Segments]:
    """What is proved of the token axes that leave a graph, by their length; symbolic grids become numbers, with a guard."""
    found: dict[int, Segments | None] = {}
    for segments in _leaving(gm, inference):
        tokens = sum(n for n, _ in segments)
        found[tokens] = agreed(found.get(tokens, segments), segments)
    found |= dict.fromkeys(_parts_leaving(gm, inference), PARTS)
    return {tokens: segments for tokens, segments in found.items() if segments is not None}


def _parts_leaving(gm: torch.fx.GraphModule, inference: GridInference) -> Iterator[int]:
    """Numbers of tokens of a graph's outputs that have frames, or other parts of a video, in their batch."""
    output = next(iter(reversed(inference.trace.view.gm.graph.nodes)))
    for node in output.all_input_nodes:
        for dims in inference.trace.tensors(node):
            for part in inference.factorisation.parts_of(dims):
                shape = known_shape(gm, (1, 1, axis_size(part)))
                if shape is not None:
                    yield prod(shape)


def _leaving(gm: torch.fx.GraphModule, inference: GridInference) -> Iterator[Segments]:
    """The axes of a graph's outputs that have a grid, and each grid by itself."""
    output = next(iter(reversed(inference.trace.view.gm.graph.nodes)))
    for node in output.all_input_nodes:
        for dims in inference.trace.tensors(node):
            for place, axis in enumerate(dims):
                parts, segments = segments_of(axis), []
                for part in parts:
                    # The last axis of a rope table is no token axis, and made of three as well.
                    last = place == len(dims) - 1
                    grid = inference.grids.proved(part) or (
                        None if last else inference.grids.by_positions(part)
                    )
                    # A hint is checked in its own graph only, and an order of tokens is known there only.
                    proved = grid is not None and grid.hint is None and grid.order == IN_ORDER
                    shape = known_shape(gm, grid.shape) if grid is not None and proved else None
                    size = prod(shape) if shape is not None else axis_size(part)
                    segments.append((size, shape))
                    if shape is not None:
                        yield ((prod(shape), shape),)
                numbers = tuple((n, shape) for n, shape in segments if isinstance(n, int))
                if len(numbers) == len(parts) > 1 and any(shape for _, shape in numbers):
                    yield numbers
