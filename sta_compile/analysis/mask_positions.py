"""Positions in masks: `arange(S) < length`, and `arange(S)[:, None] == arange(S)`, which is true on the diagonal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.fx

from .axes import Size, same_size, size_of
from .graph_view import GraphView, argument, canonical_name, fake_value, is_tensor
from .lower_bound import EXACT, lower_bound, outside
from .mask_facts import DATA, FALSE, TRUE, Below, Fact
from .mask_spans import Spans, at_most, labels, moved, of_operand

Places: TypeAlias = tuple[str, Size, Size]  # label, first, stop


def places(
    view: GraphView, node: Any, spans: Spans, is_written: Callable[[torch.fx.Node], bool]
) -> Places | None:
    """Which positions along one dimension a part holds, if it holds these."""
    node = outside(view, node)
    if not is_tensor(node) or fake_value(node).dtype not in EXACT or is_written(node):
        return None
    name = canonical_name(node)
    if name == "arange":
        plain = len(node.args) == 1 or (len(node.args) == 2 and node.args[0] == 0)
        if not plain or node.kwargs.get("step", 1) != 1 or node.kwargs.get("start", 0) != 0:
            return None
        (span,) = spans
        return span.label, span.start, span.stop
    if name in ("add", "sub") and node.kwargs.get("alpha", 1) == 1:
        by = fake_value(argument(node, 1, "other"))
        found = places(view, node.args[0], spans, is_written)
        if found is None or not isinstance(by, (int, torch.SymInt)):
            return None
        shift = size_of(by) if name == "add" else -size_of(by)
        return found[0], found[1] + shift, found[2] + shift
    through = moved(node, spans)
    again = through is not None and name != "neg"
    return places(view, node.args[0], through, is_written) if again and through else None


def below(
    view: GraphView, first: Size, stop: Size, limit: Any, spans: Spans, how: str
) -> Fact | None:
    """What `position <how> limit` says of positions first .. stop; how: "lt", "le", "gt" or "ge"."""
    negated = how in ("gt", "ge")  # position > limit: not position < limit + 1
    more = how in ("gt", "le")
    value = fake_value(limit)
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        end = size_of(value) + (1 if more else 0)
        fact: Fact = TRUE if at_most(stop, end) else FALSE if at_most(end, first) else DATA
    elif is_tensor(limit) and labels(limit, of_operand(limit, spans)) <= {"b"}:
        bound = lower_bound(view, limit)
        if bound is not None and at_most(stop, bound + (1 if more else 0)):
            fact = TRUE
        else:
            fact = DATA if more else Below(outside(view, limit), first)
    else:
        return None
    if not negated or fact == DATA:
        return fact
    if isinstance(fact, Below):
        return Below(fact.limit, fact.start, True)
    return FALSE if fact == TRUE else TRUE


def on_diagonal(*sides: Places | None) -> bool | None:
    """Are the positions of a part's queries those of its keys, each once? False if none is; None if that isn't known."""
    one, other = sides if len(sides) == 2 else (None, None)
    if one is None or other is None or {one[0], other[0]} != {"q", "k"}:
        return None
    if at_most(one[2], other[1]) or at_most(other[2], one[1]):
        return False
    return True if same_size(one[1], other[1]) and same_size(one[2], other[2]) else None
