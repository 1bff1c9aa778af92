"""Writes the conversions of a layout plan into the graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch.fx

from ..analysis.graph_view import GraphView
from ..analysis.propagate_layout import Conversion
from .fake_values import add_call
from .size_nodes import Number, SizeNodes
from .tile_order import emit_tile


def insert_layout(
    view: GraphView,
    sizes: SizeNodes,
    conversions: Sequence[Conversion],
    shift: Number,
    grid: Sequence[Number],
    spec: str,
) -> dict[tuple[torch.fx.Node, torch.fx.Node], torch.fx.Node]:
    """Converts each value before the first of its readers, and makes them read the copy.

    Returns the copies by (reader, value): an attention of several nodes reads q only through the copy it is given.

    shift: tokens of the video before those that are reordered.
    grid: (T, H, W), ints or nodes of the root graph; spec: text of an AttentionSpec with the tiling.
    """
    copies = {}
    for conversion in conversions:
        value = conversion.value
        owner = view.owner[value]
        first = min(conversion.readers, key=view.position.__getitem__)
        starts = [sizes.of_size(offset, owner, first) for offset in conversion.offsets]
        local = [g if isinstance(g, int) else sizes.threads.reach(g, owner) for g in grid]
        with value.graph.inserting_before(first):
            copy, dim = value, conversion.dim
            if conversion.span > 1:
                ends = (dim, dim + conversion.span - 1)
                copy = add_call(value.graph, "call_method", "flatten", (value, *ends), like=first)
            if conversion.lead != 1:
                lead = sizes.of_size(conversion.lead, owner, first)
                args = (copy, dim, (lead, -1))
                copy = add_call(value.graph, "call_method", "unflatten", args, like=first)
                dim += 1
            for start in starts:
                offset = added(start, shift, sizes, first)
                copy = emit_tile(
                    value.graph,
                    copy,
                    dim,
                    offset,
                    local,
                    spec,
                    conversion.to_tile,
                    like=first,
                )
            if conversion.span > 1:
                copy = add_call(value.graph, "call_method", "view_as", (copy, value), like=first)
        for reader in conversion.readers:
            reader.replace_input_with(value, copy)
            copies[reader, value] = copy
    return copies


def added(start: Number, shift: Number, sizes: SizeNodes, before: torch.fx.Node) -> Number:
    """The sum of two numbers, the second of the root graph, at the graph's insertion point."""
    if isinstance(start, int) and isinstance(shift, int):
        return start + shift
    if isinstance(shift, int) and shift == 0:
        return start
    if not isinstance(shift, int):
        shift = sizes.threads.reach(shift, sizes.view.owner[before])
    if isinstance(start, int) and start == 0:
        return shift
    args = (start, shift)
    return add_call(before.graph, "call_function", operator.add, args, like=before)
