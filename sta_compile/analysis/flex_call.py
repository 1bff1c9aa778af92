"""Does a `flex_attention` compute plain attention?

Without masks torch makes a `score_mod` that returns the score, and one block of all keys whose `mask_mod` is always True.
"""

from __future__ import annotations

from typing import Any

import torch.fx

from .attention_site import Problem
from .graph_view import canonical_name, fake_value


def flex_problem(node: torch.fx.Node, score_mod: Any, block_mask: Any) -> Problem | None:
    """What keeps a call from being plain attention."""
    if not _returns_its_score(node, score_mod):
        return Problem("flex_attention with a score_mod", "pass score_mod=None")
    if block_mask is not None and not _hides_nothing(node, block_mask):
        return Problem(
            "flex_attention with a block mask over the tokens",
            "pass block_mask=None to attend to all",
        )
    return None


def _body(node: torch.fx.Node, attribute: Any) -> torch.fx.Graph | None:
    module = node.graph.owning_module
    if module is None or not isinstance(attribute, torch.fx.Node) or attribute.op != "get_attr":
        return None
    body = getattr(module, str(attribute.target), None)
    return body.graph if isinstance(body, torch.fx.GraphModule) else None


def _result(graph: torch.fx.Graph) -> Any:
    result = graph.output_node().args[0]
    return result[0] if isinstance(result, (tuple, list)) and len(result) == 1 else result


def _returns_its_score(node: torch.fx.Node, score_mod: Any) -> bool:
    graph = _body(node, score_mod)
    return graph is not None and _result(graph) is next(iter(graph.nodes))


def _hides_nothing(node: torch.fx.Node, block_mask: Any) -> bool:
    """Is there one block, of more keys than there are, that is seen and not masked inside?"""
    if not isinstance(block_mask, (tuple, list)) or len(block_mask) < 7:
        return False
    counts, indices, full = block_mask[2:5]
    block, mask_mod = block_mask[-2:]
    keys = fake_value(node.args[1]).shape[-2]
    graph = _body(node, mask_mod)
    one_block = isinstance(block, int) and isinstance(keys, int) and block >= keys
    seen = _is_made_by(counts, "ones") and _is_made_by(indices, "zeros") and full is None
    unmasked = graph is not None and _is_made_by(_result(graph), "new_ones")
    return one_block and seen and unmasked


def _is_made_by(node: Any, name: str) -> bool:
    return isinstance(node, torch.fx.Node) and canonical_name(node) == name
