"""Values of a graph that can be computed while compiling: from constants alone, or from what its inputs hold in this call.

Constants are the numbers that stand in the graph: `arange(256) < tensor([216])[:, None]` is the same mask in every call.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx.node import map_arg

from .. import _torch
from .graph_view import GraphView, canonical_name, constant_of, fake_value, is_inplace, is_tensor
from .lower_bound import outside
from .token_values import storage_of, written_storages

# What masks are made of, none of which writes, draws random numbers or has state.
_KNOWN = frozenset({
    "to", "bool", "int", "long", "float", "view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "repeat",
    "repeat_interleave", "transpose", "permute", "contiguous", "clone", "detach", "getitem", "select", "narrow", "movedim",
    "chunk", "split", "unbind", "size", "sum", "cumsum", "any", "all", "max", "min", "amax", "amin", "logical_and",
    "logical_or", "logical_not", "xor", "eq", "ne", "lt", "le", "gt", "ge", "isin", "mul", "sub", "rsub", "add", "truediv",
    "floordiv", "remainder", "clamp", "maximum", "minimum", "where", "masked_fill", "cat", "stack", "flip", "roll", "tril",
    "triu", "pad", "constant_pad_nd", "ones", "zeros", "full", "arange", "tensor", "scalar_tensor", "new_ones", "new_zeros",
    "new_full", "ones_like", "zeros_like", "full_like", "lift_fresh_copy", "_to_copy",
})  # fmt: skip
_MOST_ELEMENTS = 1 << 24
_UNKNOWN = object()


class KnownValues:
    """Values of one graph. given: of its placeholders; without it, what is made of constants alone, on the CPU."""

    def __init__(self, view: GraphView, given: Mapping[torch.fx.Node, Any] | None = None) -> None:
        self.view, self._given = view, given
        self._written = written_storages(view)
        self._computed: dict[torch.fx.Node, Any] = {}

    def of(self, node: Any) -> Any:
        """The value of a node, or of an argument. Raises LookupError for what is not known here; operations may raise
        errors of their own."""
        if not isinstance(node, torch.fx.Node):
            return self._placed(node)
        if node not in self._computed:
            self._computed[node] = _UNKNOWN  # if computing it fails
            self._computed[node] = self._value(outside(self.view, node))
        value = self._computed[node]
        if value is _UNKNOWN:
            raise LookupError(f"{node.name} is not computed here")
        return value

    def _number(self, size: torch.SymInt) -> int:
        """A size is what it is in this call."""
        value = None
        if self._given is not None:
            value = _torch.known_value(size.node.expr, size.node.shape_env)
        if value is None:
            raise LookupError(f"{size} differs from call to call")
        return value

    def _placed(self, argument: Any) -> Any:
        on_device = isinstance(argument, torch.device) and self._given is None
        return torch.device("cpu") if on_device else argument

    def _value(self, node: torch.fx.Node) -> Any:
        if isinstance(fake_value(node), torch.SymInt):
            return self._number(fake_value(node))
        if self._given is not None and node in self._given:
            return self._given[node]
        constant = constant_of(node)
        if constant is not None:
            return constant if self._given is not None else constant.cpu()
        if canonical_name(node) not in _KNOWN or is_inplace(node):
            raise LookupError(f"{node.name} is not computed here")
        if is_tensor(node):
            many = _torch.size_hint(fake_value(node).numel()) > _MOST_ELEMENTS
            if many or any(storage in self._written for storage in storage_of(node)):
                raise LookupError(f"{node.name} is large, or written in place")
        args = [self._argument(a) for a in node.args]
        kwargs = {name: self._argument(a) for name, a in node.kwargs.items()}
        if self._given is None and "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        with torch.no_grad():
            if node.op == "call_method":
                return operator.methodcaller(str(node.target), *args[1:], **kwargs)(args[0])
            assert callable(node.target)
            return node.target(*args, **kwargs)

    def _argument(self, argument: Any) -> Any:
        return (
            self.of(argument)
            if not isinstance(argument, (tuple, list, dict, slice))
            else map_arg(argument, self.of)
        )


class Constants:
    """What of one graph is made of constants alone."""

    def __init__(self, view: GraphView) -> None:
        self._values = KnownValues(view)

    def of(self, node: torch.fx.Node) -> Tensor | None:
        """A tensor on the CPU; None if it depends on anything but numbers."""
        try:
            value = self._values.of(node)
        except (LookupError, RuntimeError, TypeError, ValueError):
            return None
        return value if isinstance(value, Tensor) else None
