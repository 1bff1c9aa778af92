"""`F.multi_head_attention_forward`, as which `nn.MultiheadAttention` reaches a graph: attention with its projections.

The tokens that it reads are those before the projections, [tokens, batch, width]; what it computes is

    q, k, v = linear(x, in_weight, in_bias).chunk(3, -1)         each split into heads
    linear(attention(q, k, v), out_weight, out_bias)
"""

from __future__ import annotations

from typing import Any

import torch.fx

from .attention_site import AttentionSite, DimOrder, Problem, Projections, default_scale, dropout_of
from .axes import size_of
from .graph_view import argument, canonical_name, fake_value, is_tensor, module_path

_PARAMETERS = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias"),
    *("bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias"),
    *("training", "key_padding_mask", "need_weights", "attn_mask", "use_separate_proj_weight"),
    *("q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v"),
    *("average_attn_weights", "is_causal"),
)
# What has to be absent, and the reason if it isn't.
_ABSENT = {
    "bias_k": "a key of its own (add_bias_kv)",
    "bias_v": "a key of its own (add_bias_kv)",
    "key_padding_mask": "key_padding_mask",
    "attn_mask": "attn_mask",
    "static_k": "static keys",
    "static_v": "static values",
    "use_separate_proj_weight": "weights of its own for queries, keys and values",
    "add_zero_attn": "add_zero_attn",
}


def multihead_attention(node: torch.fx.Node) -> AttentionSite | None:
    """The attention of such a call, if its output is read."""
    given = {name: argument(node, i, name) for i, name in enumerate(_PARAMETERS)}
    q, k, v, heads = (given[name] for name in ("query", "key", "value", "num_heads"))
    picks = {user.args[1]: user for user in node.users if canonical_name(user) == "getitem"}
    if not (is_tensor(q) and is_tensor(k) and is_tensor(v)) or 0 not in picks:
        return None
    width = size_of(fake_value(q).shape[-1])
    scale = default_scale(width // heads)
    if scale is None:
        return None
    order = DimOrder(1, None, 0, 2) if fake_value(q).dim() == 3 else DimOrder(None, None, 0, 1)
    training = given["training"] is None or given["training"]  # the default is True
    return AttentionSite(
        picks[0],
        q,
        k,
        v,
        scale,
        module_path(node),
        None,
        *(order,) * 4,
        causal=bool(given["is_causal"]),
        dropout=dropout_of(given["dropout_p"]) if training else 0.0,
        steps=(node,),
        problem=_problem(given, picks),
        projections=Projections(
            heads,
            given["in_proj_weight"],
            given["in_proj_bias"],
            given["out_proj_weight"],
            given["out_proj_bias"],
        ),
    )


def _problem(given: dict[str, Any], picks: dict[Any, torch.fx.Node]) -> Problem | None:
    for name, reason in _ABSENT.items():
        if given[name] is not None and given[name] is not False:
            return Problem(
                f"multi-head attention with {reason}",
                "project queries, keys and values, and call torch.nn.functional.scaled_dot_product_attention",
            )
    if 1 in picks and picks[1].users:
        return Problem("its probabilities are read too", "pass need_weights=False")
    return None
