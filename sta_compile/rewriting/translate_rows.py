"""Translates the numbers by which tokens are picked to the places that the tokens have in tile order."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.fx

from ..analysis.graph_view import GraphView, fake_value
from ..analysis.picked_rows import PickedRows, index_of
from .fake_values import VALUE, add_call, fake_mode_of, run
from .insert_layout import added
from .size_nodes import Number, SizeNodes
from .tile_order import emit_tile


def translate_rows(
    view: GraphView,
    sizes: SizeNodes,
    found: Sequence[PickedRows],
    shift: Number,
    grid: Sequence[Number],
    spec: str,
) -> None:
    """Edits the readers in place, whose values are in tile order. Arguments as of `insert_layout`."""
    made: dict[tuple[int, int], torch.fx.Node] = {}
    for picked in sorted(found, key=lambda p: view.position[p.reader]):
        reader, key = picked.reader, (picked.offset, picked.length)
        if key not in made:
            root = view.in_root(reader)
            with root.graph.inserting_before(root):
                device = fake_value(picked.value).device
                rows = root.graph.call_function(torch.arange, (picked.length,), {"device": device})
                rows.meta[VALUE] = run(rows, fake_mode_of(root.graph))
                offset = added(picked.offset, shift, sizes, root)
                made[key] = emit_tile(
                    root.graph, rows, 0, offset, grid, spec, to_tile=False, like=root
                )
        places = sizes.threads.reach(made[key], view.owner[reader])
        index = index_of(reader)
        assert index is not None
        with reader.graph.inserting_before(reader):
            args = (places, index)
            placed = add_call(reader.graph, "call_function", operator.getitem, args, like=reader)
        reader.replace_input_with(index, placed)
