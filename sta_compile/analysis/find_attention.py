"""Where does a graph compute attention, and what are q, k, v, the scale and the mask?

Two spellings are found: one node of `F.scaled_dot_product_attention` in any call form, and the three steps
`softmax(scale * q @ k^T + mask) @ v` as matmul, bmm, baddbmm or einsum with the scale before, after or inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.fx

from .graph_view import (
    GraphView,
    argument,
    canonical_name,
    fake_value,
    is_inplace,
    is_tensor,
    module_path,
)
from .token_values import storage_of, written_storages

_PASSED = ("to", "float", "half", "bfloat16", "type", "type_as", "contiguous", "dropout", "clone")


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """One attention computation.

    node: its output, [..., tokens, head_dim].
    q, v: [..., tokens, head_dim]; k the same, or [..., head_dim, tokens] with `key_transposed`.
    scale: factor of q @ k^T before the softmax.
    mask: the mask node, or None. causal, gqa, dropout: as in SDPA.
    """

    node: torch.fx.Node
    q: torch.fx.Node
    k: torch.fx.Node
    v: torch.fx.Node
    scale: float
    mask: torch.fx.Node | None
    name: str
    key_transposed: bool = False
    causal: bool = False
    gqa: bool = False
    dropout: float = 0.0


def find_attention(view: GraphView) -> list[AttentionSite]:
    """Every attention of the graph, in execution order."""
    sites = []
    for node in view.nodes:
        name = canonical_name(node)
        if name == "scaled_dot_product_attention":
            site = _sdpa(node)
        elif name == "softmax":
            site = _decomposed(node)
            if site is not None and _written_meanwhile(view, site):
                continue
        else:
            continue
        if site is not None:
            sites.append(site)
    return sites


def _written_meanwhile(view: GraphView, site: AttentionSite) -> bool:
    """Are q or k written between the steps of an attention? The one operator that replaces them reads both at the end."""
    last = view.position[site.node]
    written = written_storages(view)
    for operand in (site.q, site.k):
        readers = (n for n in operand.users if not (is_inplace(n) and n.args[0] is operand))
        reads = [view.position[n] for n in readers if view.position.get(n, -1) > 0]
        first = min((p for p in reads if p <= last), default=last)
        for storage in storage_of(operand):
            if any(first < view.position[write] < last for write in written.get(storage, ())):
                return True
    return False


def _sdpa(node: torch.fx.Node) -> AttentionSite | None:
    q, k, v = (argument(node, i, n) for i, n in enumerate(("query", "key", "value")))
    scale = argument(node, 6, "scale")
    if not (is_tensor(q) and is_tensor(k) and is_tensor(v)):
        return None
    if scale is None:
        head_dim = fake_value(q).shape[-1]
        if not isinstance(head_dim, int):
            return None
        scale = 1.0 / math.sqrt(head_dim)
    return AttentionSite(
        node=node,
        q=q,
        k=k,
        v=v,
        scale=float(scale),
        mask=argument(node, 3, "attn_mask"),
        name=module_path(node),
        causal=bool(argument(node, 5, "is_causal", False)),
        gqa=bool(argument(node, 7, "enable_gqa", False)),
        dropout=float(argument(node, 4, "dropout_p", 0.0)),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _scaled(node: Any) -> tuple[Any, float] | None:
    """(x, factor) if the node is x * factor or x / factor with a Python number."""
    name = canonical_name(node)
    if name not in ("mul", "truediv") or len(node.args) < 2:
        return None
    a, b = node.args[:2]
    if name == "mul" and _number(a) is not None:
        a, b = b, a
    factor = _number(b)
    if factor is None or not is_tensor(a):
        return None
    return a, (factor if name == "mul" else 1.0 / factor)


def _only_user(node: torch.fx.Node) -> torch.fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _product(node: torch.fx.Node) -> tuple[Any, Any, bool] | None:
    """(a, b, False) if the node is a @ b, (a, b, True) if it is a @ b^T, batch dimensions first in both.

    Example: einsum("bhqd,bhkd->bhqk", q, k) is q @ k^T; other orders of dimensions are no such product.
    """
    name = canonical_name(node)
    if name in ("matmul", "bmm"):
        return (node.args[0], node.args[1], False) if len(node.args) == 2 else None
    if name != "einsum" or len(node.args) != 3:
        return None
    inputs, arrow, out = str(node.args[0]).replace(" ", "").partition("->")
    a, _, b = inputs.partition(",")
    rank = len(out)
    letters = set(a + b)
    if not arrow or not len(a) == len(b) == rank >= 3 or len(letters) != rank + 1 or "." in letters:
        return None
    if a[:-2] != b[:-2] or out[:-1] != a[:-1]:
        return None
    if a[-1] == b[-2] and out[-1] == b[-1]:
        return node.args[1], node.args[2], False
    if a[-1] == b[-1] and out[-1] == b[-2]:
        return node.args[1], node.args[2], True
    return None


def _matmul_with(node: torch.fx.Node) -> torch.fx.Node | None:
    """The product that a softmax's output goes into as its left operand, through casts and dropout."""
    while (user := _only_user(node)) is not None:
        name = canonical_name(user)
        product = _product(user)
        if product is not None and product[0] is node and not product[2]:
            return user
        if name not in _PASSED or user.args[0] is not node:
            return None
        if (
            name == "dropout"
            and argument(user, 2, "training", True)
            and argument(user, 1, "p", 0.5)
        ):
            return None
        node = user
    return None


def _scores(node: Any) -> Iterator[tuple[torch.fx.Node, float, torch.fx.Node | None]]:
    """Walks from a softmax's input back to the product: (product node, scale, mask)."""
    scale, mask = 1.0, None
    while is_tensor(node):
        name = canonical_name(node)
        if name == "baddbmm" or _product(node) is not None:
            yield node, scale, mask
            return
        scaled = _scaled(node)
        if scaled is not None:
            node, factor = scaled
            scale *= factor
        elif name == "add" and mask is None and is_tensor(node.args[0]) and is_tensor(node.args[1]):
            if scale != 1.0:  # of the mask too
                return
            node, mask = node.args[0], node.args[1]
        elif name in _PASSED and name != "dropout":
            node = node.args[0]
        else:
            return


def _strip_scale(node: torch.fx.Node) -> tuple[torch.fx.Node, float]:
    """A q or k that was multiplied by a number, without it; one that was multiplied in place holds the factor."""
    scaled = None if is_inplace(node) else _scaled(node)
    return (scaled[0], scaled[1]) if scaled is not None else (node, 1.0)


def _decomposed(softmax: torch.fx.Node) -> AttentionSite | None:
    dim = argument(softmax, 1, "dim")
    rank = fake_value(softmax).dim()
    out = _matmul_with(softmax)
    if out is None or dim is None or dim % rank != rank - 1:
        return None
    for product, scale, mask in _scores(softmax.args[0]):
        q, k, transposed = _product(product) or (*product.args[1:3], False)
        v = _product(out)[1]  # type: ignore[index]
        if canonical_name(product) == "baddbmm":
            beta, alpha = product.kwargs.get("beta", 1), product.kwargs.get("alpha", 1)
            if beta != 0:
                if mask is not None or beta != 1 or scale != 1.0:
                    return None
                mask = product.args[0]  # type: ignore[assignment]
            scale *= float(alpha)  # type: ignore[arg-type]
        if not (is_tensor(q) and is_tensor(k) and is_tensor(v)):
            return None
        q, q_factor = _strip_scale(q)  # type: ignore[arg-type]
        k, k_factor = _strip_scale(k)  # type: ignore[arg-type]
        return AttentionSite(
            node=out,
            q=q,
            k=k,
            v=v,
            scale=scale * q_factor * k_factor,
            mask=mask,
            name=module_path(out) or module_path(softmax),
            key_transposed=not transposed,
        )
    return None
