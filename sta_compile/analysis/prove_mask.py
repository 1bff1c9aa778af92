"""Is an attention mask a key padding mask over text only, whatever the data? Proved from the graph.

HunyuanVideo builds `ones(B, S).masked_fill(arange(S) >= N + text_length, False)`: key j is valid iff j < N + length, and
a length counts, so all N video keys are valid and the mask says no more than the number of valid text tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from .axes import Size, size_of
from .graph_view import GraphView, argument, canonical_name, fake_value, is_tensor
from .token_values import storage_of, written_storages

_COUNTS = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)
# Types that hold every length and position of a sequence.
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
_SHAPED = (
    "unsqueeze", "expand", "expand_as", "to", "bool", "int", "long", "contiguous", "clone", "getitem",
)  # fmt: skip


@dataclass(frozen=True)
class Everywhere:
    """The same truth value for all keys."""

    value: bool


@dataclass(frozen=True)
class Index:
    """The key's own position."""


@dataclass(frozen=True, eq=False)
class Below:
    """True iff the key's position is less than `limit`, a tensor with one element per sample (or not, if negated)."""

    limit: torch.fx.Node
    negated: bool = False


MaskFact = Everywhere | Index | Below


def prove_mask(view: GraphView, mask: torch.fx.Node) -> MaskFact | None:
    """What a boolean mask [batch, 1, 1, keys] or [batch, keys] says along its last axis; None if that is not provable."""
    if fake_value(mask).dtype != torch.bool:
        return None
    shape = fake_value(mask).shape
    if any(size_of(s) != 1 for s in shape[1:-1]):
        return None
    fact = _fact(view, mask)
    return None if isinstance(fact, Index) else fact


def _is_written(view: GraphView, node: torch.fx.Node) -> bool:
    """Is the memory of a value ever written in place? Then it isn't what the operation that made it says."""
    written = written_storages(view)
    return any(storage in written for storage in storage_of(node))


def _fact(view: GraphView, node: Any) -> MaskFact | None:
    fact = _stated(view, _outside(view, node))
    exact = not isinstance(fact, Index) or fake_value(node).dtype in _EXACT
    return fact if exact else None


def _stated(view: GraphView, node: Any) -> MaskFact | None:
    """What the operation that made a value says of it."""
    if not is_tensor(node) or _is_written(view, node):
        return None
    name = canonical_name(node)
    first = node.args[0] if node.args else None
    if name in ("ones", "zeros"):
        return Everywhere(name == "ones")
    if name == "full" and isinstance(argument(node, 1, "fill_value"), bool):
        return Everywhere(bool(argument(node, 1, "fill_value")))
    if name == "arange":
        plain = len(node.args) == 1 or (len(node.args) == 2 and node.args[0] == 0)
        return Index() if plain and node.kwargs.get("step", 1) == 1 else None
    if name in _SHAPED and _keeps_last_axis(node):
        return _fact(view, first)
    if name in ("lt", "ge", "gt", "le"):
        return _comparison(view, name, first, argument(node, 1, "other"))
    if name == "logical_not":
        return _negate(_fact(view, first))
    if name == "masked_fill":
        kept, condition, fill = _fact(view, first), _fact(view, node.args[1]), node.args[2]
        if kept == Everywhere(True) and (fill is False or fill == 0):
            return _negate(condition)
    if name == "logical_and":
        a, b = _fact(view, first), _fact(view, argument(node, 1, "other"))
        if a == Everywhere(True):
            return b
        if b == Everywhere(True):
            return a
    return None


def _outside(view: GraphView, node: Any) -> Any:
    """The argument that a body's placeholder stands for, if all calls of the body pass the same."""
    while isinstance(node, torch.fx.Node) and node in view.sources:
        sources = set(view.sources[node])
        if len(sources) != 1:
            return node
        node = sources.pop()
    return node


def _negate(fact: MaskFact | None) -> MaskFact | None:
    if isinstance(fact, Everywhere):
        return Everywhere(not fact.value)
    return Below(fact.limit, not fact.negated) if isinstance(fact, Below) else None


def _comparison(view: GraphView, name: str, a: Any, b: Any) -> MaskFact | None:
    """index < limit, index >= limit, and the same written the other way round."""
    if isinstance(_fact(view, a), Index) and is_tensor(b) and _per_sample(b):
        return {"lt": Below(b), "ge": Below(b, True)}.get(name)
    if isinstance(_fact(view, b), Index) and is_tensor(a) and _per_sample(a):
        return {"gt": Below(a), "le": Below(a, True)}.get(name)
    return None


def _per_sample(node: torch.fx.Node) -> bool:
    shape = fake_value(node).shape
    return len(shape) < 1 or size_of(shape[-1]) == 1


def _keeps_last_axis(node: torch.fx.Node) -> bool:
    name, value = canonical_name(node), fake_value(node)
    if name == "unsqueeze":
        return bool(argument(node, 1, "dim") % value.dim() != value.dim() - 1)
    if name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        inserted = all(i is None or i is Ellipsis or i == slice(None) for i in index)
        return inserted and (len(index) < value.dim() or index[-1] is not None)
    if name == "expand":
        return bool(fake_value(node.args[0]).dim() > 0)
    return True


def lower_bound(view: GraphView, node: Any) -> Size | None:
    """A number that an integer tensor is never below; None if the graph does not tell. Sums of masks are counts."""
    if isinstance(node, (int, torch.SymInt)):
        return size_of(node)
    node = _outside(view, node)
    if not isinstance(node, torch.fx.Node):
        return None
    value = fake_value(node)
    if isinstance(value, (int, torch.SymInt)):
        return size_of(value)
    if not is_tensor(node) or value.dtype not in _EXACT or _is_written(view, node):
        return None
    name = canonical_name(node)
    if name in ("sum", "count_nonzero"):
        return 0 if fake_value(node.args[0]).dtype in _COUNTS else None
    if name in (
        "unsqueeze",
        "to",
        "int",
        "long",
        "view",
        "reshape",
        "getitem",
        "expand",
        "squeeze",
    ):
        return lower_bound(view, node.args[0])
    if name == "add" and node.kwargs.get("alpha", 1) == 1:
        a, b = lower_bound(view, node.args[0]), lower_bound(view, argument(node, 1, "other"))
        return None if a is None or b is None else a + b
    if name == "clamp":
        return lower_bound(view, argument(node, 1, "min"))
    return None
