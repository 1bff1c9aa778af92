"""What number is an integer tensor of the graph never below?

Lengths are sums of masks, which are counts, or numbers: `torch.tensor([216, 180])`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from .axes import Size, size_of
from .graph_view import GraphView, argument, canonical_name, fake_value, is_tensor
from .known_integers import known_integers
from .mask_spans import at_most
from .token_values import storage_of, written_storages

_COUNTS = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)
# Types that hold every length and position of a sequence.
EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
_EXTREMES = ("max", "min", "amax", "amin")
_SHAPED = (
    "unsqueeze",
    "to",
    "int",
    "long",
    "view",
    "reshape",
    "getitem",
    "expand",
    "squeeze",
    "select",
)


def outside(view: GraphView, node: Any) -> Any:
    """The argument that a body's placeholder stands for, if all calls of the body pass the same."""
    while isinstance(node, torch.fx.Node) and node in view.sources:
        sources = set(view.sources[node])
        if len(sources) != 1:
            return node
        node = sources.pop()
    return node


def lower_bound(view: GraphView, node: Any) -> Size | None:
    """A number that no element is below; None if the graph does not tell."""
    if isinstance(node, (int, torch.SymInt)):
        return size_of(node)
    node = outside(view, node)
    if not isinstance(node, torch.fx.Node):
        return None
    value = fake_value(node)
    if canonical_name(node) == "item":
        of_tensor = lower_bound(view, node.args[0])
        return size_of(value) if of_tensor is None else of_tensor
    if isinstance(value, (int, torch.SymInt)):
        return size_of(value)
    if not is_tensor(node) or value.dtype not in EXACT or _is_written(view, node):
        return None
    name = canonical_name(node)
    if name in ("sum", "count_nonzero"):
        return 0 if fake_value(node.args[0]).dtype in _COUNTS else None
    known = known_integers(node)
    if known:
        return next((n for n in known if all(at_most(n, other) for other in known)), None)
    if name in _SHAPED or (name in _EXTREMES and len(node.args) == 1):
        return lower_bound(view, node.args[0])
    if name == "add" and node.kwargs.get("alpha", 1) == 1:
        a, b = lower_bound(view, node.args[0]), lower_bound(view, argument(node, 1, "other"))
        return None if a is None or b is None else a + b
    if name == "clamp":
        return lower_bound(view, argument(node, 1, "min"))
    return None


def _is_written(view: GraphView, node: torch.fx.Node) -> bool:
    """Is the memory of a value ever written in place? Then it isn't what the operation that made it says."""
    written = written_storages(view)
    return any(storage in written for storage in storage_of(node))
