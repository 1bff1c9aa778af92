"""What a graph asks of its values and never reads: attributes that Dynamo looked at while it traced.

`x._base` is asked wherever inputs of a nested region might share memory; Dynamo has answered it, and the node is left. An
edit would answer it anew: what is in tile order may be a view.
"""

from __future__ import annotations

import torch.fx

from .._torch import graph_modules


def drop_unread_attributes(gm: torch.fx.GraphModule) -> None:
    """Removes them from a graph and its bodies, in place."""
    for module in graph_modules(gm):
        for node in reversed(module.graph.nodes):
            if node.op == "call_function" and node.target is getattr and not node.users:
                module.graph.erase_node(node)
