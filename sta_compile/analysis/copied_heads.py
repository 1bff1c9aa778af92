"""Are the heads of k and v copies of fewer heads? Then the operator takes the few, and nothing is copied.

    k.repeat_interleave(3, dim=1)                              [batch, heads / 3, tokens, features] -> [batch, heads, ...]
    k[:, :, None].expand(-1, -1, 3, -1, -1).flatten(1, 2)      the same

In both each head stands next to its copies, as the operator has it. `k.repeat(1, 3, 1, 1)` puts all heads one after the
other, which is the same for one head only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.fx

from .attention_site import AttentionSite, DimOrder
from .axes import Size, same_size, size_of
from .graph_view import argument, canonical_name, fake_value, is_tensor
from .matrix_products import moved

_COPIES = ("contiguous", "clone")


@dataclass(frozen=True)
class _Few:
    node: torch.fx.Node
    order: DimOrder
    copies: int
    steps: tuple[torch.fx.Node, ...]


def without_copied_heads(site: AttentionSite) -> AttentionSite:
    """The site with the few heads that its k and v are copies of, or as it is."""
    if site.opaque or site.gqa or any(order.heads is None for _, order in site.operands[1:]):
        return site
    k, v = _few(site.k, site.k_order), _few(site.v, site.v_order)
    if k is None or v is None or k.copies != v.copies:
        return site
    return replace(
        site,
        k=k.node,
        v=v.node,
        k_order=k.order,
        v_order=v.order,
        gqa=True,
        steps=(*k.steps, *v.steps, *site.steps),
    )


def _few(node: torch.fx.Node, order: DimOrder) -> _Few | None:
    """The value whose heads were copied, and how many times."""
    steps: list[torch.fx.Node] = []
    while True:
        name = canonical_name(node)
        source = node.args[0] if node.args else None
        heads = order.heads
        if not isinstance(source, torch.fx.Node) or not is_tensor(source):
            return None
        if heads is None or order.packed:
            return None
        steps.append(node)
        if name in _COPIES:
            node = source
            continue
        dims = moved(node, fake_value(node).dim())
        if dims is not None:
            order = order.before(dims)
            node = source
            continue
        shapes = _shape(source), _shape(node)
        if name == "repeat_interleave" and is_tensor(argument(node, 1, "repeats")):
            return None  # a number for each head
        if name in ("repeat_interleave", "expand", "repeat"):
            copies = _copies_along(shapes, heads)
            in_place = name == "repeat_interleave" or shapes[0][heads] == 1
            return _Few(source, order, copies, tuple(steps)) if copies and in_place else None
        if name in ("reshape", "view", "flatten"):
            return _merged(source, shapes, order, steps)
        return None


def _merged(
    source: torch.fx.Node,
    shapes: tuple[Sequence[Size], Sequence[Size]],
    order: DimOrder,
    steps: list[torch.fx.Node],
) -> _Few | None:
    """[.., heads, copies, ..] flattened to [.., heads * copies, ..], where the copies come from one."""
    (wide, narrow), at = shapes, order.heads
    assert at is not None
    if len(wide) != len(narrow) + 1 or not _equal(wide[:at], narrow[:at]):
        return None
    if not _equal(wide[at + 2 :], narrow[at + 1 :]):
        return None
    inner = source.args[0] if source.args else None
    copying = canonical_name(source) in ("expand", "repeat", "repeat_interleave")
    if not copying or not isinstance(inner, torch.fx.Node):
        return None
    before = _shape(inner)
    copies = _copies_along((before, wide), at + 1)
    if not copies or before[at + 1] != 1:
        return None
    steps = [*steps, source]
    few = inner.args[0] if inner.args else None
    if not isinstance(few, torch.fx.Node) or not _inserts(inner, at + 1):
        return None
    return _Few(few, order, copies, (*steps, inner))


def _inserts(node: torch.fx.Node, at: int) -> bool:
    """Does an operation put a dimension of one at a place, and nothing else?"""
    name, rank = canonical_name(node), fake_value(node).dim()
    if name == "unsqueeze":
        return bool(argument(node, 1, "dim") % rank == at)
    if name != "getitem":
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    whole = all(i is None or i is Ellipsis or i == slice(None) for i in index)
    if not whole or sum(i is None for i in index) != 1:
        return False
    place = index.index(None)
    if Ellipsis in index[:place]:
        place = rank - (len(index) - place)
    return place == at


def _shape(node: torch.fx.Node) -> list[Size]:
    return [size_of(s) for s in fake_value(node).shape]


def _equal(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


def _copies_along(shapes: tuple[Sequence[Size], Sequence[Size]], at: int) -> int:
    """How many times the one dimension that differs is longer; 0 if others differ too."""
    (before, after), others = shapes, [d for d in range(len(shapes[1])) if d != at]
    if len(before) != len(after) or not _equal(
        [before[d] for d in others], [after[d] for d in others]
    ):
        return 0
    few, many = before[at], after[at]
    if not isinstance(few, int) or not isinstance(many, int) or few == 0 or many <= few:
        return 0
    return many // few if many % few == 0 else 0
