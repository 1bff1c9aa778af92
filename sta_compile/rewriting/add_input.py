"""One more input of a graph: a tensor that the caller of the compiled graph passes after those of Dynamo.

    flags = add_flags(gm, batch=2, device)      placeholder sta_dense, bool [2]
    example_of(gm)                              a tensor like it for the compile; None where nothing was added

Dynamo looks up an argument for each placeholder of its own module, so the graph to compile is a copy (`take_over`).
"""

from __future__ import annotations

import torch
import torch.fx

from .. import _torch
from .fake_values import VALUE, fake_mode_of

NAME = "sta_dense"


def add_flags(gm: torch.fx.GraphModule, batch: int, device: torch.device) -> torch.fx.Node:
    """A placeholder for bool [batch], after the graph's own inputs."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    mode = fake_mode_of(gm.graph)
    assert mode is not None
    with gm.graph.inserting_after(inputs[-1]):
        node = gm.graph.placeholder(NAME)
    node.meta[VALUE] = mode.from_tensor(
        torch.ones(batch, dtype=torch.bool, device=device), static_shapes=True
    )
    _torch.set_source(node, NAME)
    return node


def take_over(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A module with a copy of the graph; the given one, which is Dynamo's, loses the added input and is of no more use."""
    twin = _torch.copy_graph_module(gm)
    first, added = None, None
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            first, added = first or node, node
    assert added is not None
    assert first is not None
    added.replace_all_uses_with(first)
    gm.graph.erase_node(added)
    return twin


def example_of(gm: torch.fx.GraphModule) -> torch.Tensor | None:
    """Flags like the added input: bool [batch], all set."""
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.target == NAME:
            fake = node.meta[VALUE]
            return torch.ones(fake.shape, dtype=fake.dtype, device=fake.device)
    return None
