"""Does a mask that is data hide keys of the video in the call that is being compiled?

HunyuanVideo makes its mask once, outside of its blocks, and a block that is compiled alone gets it as an input: nothing in
its graph says that it leaves the video alone. The inputs have values while compiling, so that the mask can be computed and
read here. Values are not guarded: the operator asks the device in every call (`video_mask` of `sta::attention`), so that a
wrong answer costs time and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from .. import _torch
from .axes import Size
from .graph_view import GraphView, canonical_name, fake_value, is_inplace, is_tensor
from .lower_bound import outside
from .token_values import storage_of, written_storages

# What masks are made of, none of which writes, draws random numbers or has state.
_KNOWN = frozenset({
    "to", "bool", "float", "view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "repeat", "transpose", "permute",
    "contiguous", "clone", "getitem", "select", "narrow", "movedim", "chunk", "split", "size", "sum", "logical_and",
    "logical_or", "logical_not", "eq", "ne", "lt", "le", "gt", "ge", "mul", "sub", "rsub", "add", "truediv", "where",
    "masked_fill", "cat", "pad", "constant_pad_nd", "ones", "zeros", "full", "arange", "new_ones", "new_zeros",
    "ones_like", "zeros_like",
})  # fmt: skip
_MOST_ELEMENTS = 1 << 24


class MaskValues:
    """Answers for the masks of one graph. values: what its placeholders hold in this call."""

    def __init__(self, view: GraphView, values: Mapping[torch.fx.Node, Any]) -> None:
        self.view, self._values = view, values
        self._env = _torch.shape_env_of(view.gm)
        self._written = written_storages(view)
        self._computed: dict[torch.fx.Node, Any] = {}

    def shows(self, mask: torch.fx.Node, query: Size, start: Size, size: Size) -> bool:
        """Does the row of a query show so many keys from `start` on, in every sample? False where that isn't known."""
        numbers = [_torch.known_value(n, self._env) for n in (query, start, size)]
        node = outside(self.view, mask)
        if None in numbers or not self._values:
            return False
        first, begin, count = (int(n) for n in numbers if n is not None)
        try:
            value = self._compute(node)
            row = value if value.dim() < 2 or value.shape[-2] == 1 else value.select(-2, first)
            keys = row.narrow(-1, begin, count)
            return bool((keys if keys.dtype == torch.bool else keys == 0).all())
        except (LookupError, RuntimeError, TypeError, ValueError):
            return False

    def _compute(self, node: Any) -> Any:
        """The value of a node. Raises LookupError for what is not made of inputs by operations that masks are made of."""
        if not isinstance(node, torch.fx.Node):
            return node
        if node not in self._computed:
            self._computed[node] = self._value(outside(self.view, node))
        return self._computed[node]

    def _value(self, node: torch.fx.Node) -> Any:
        if node in self._values:
            return self._values[node]
        if canonical_name(node) not in _KNOWN or is_inplace(node):
            raise LookupError(f"{node.name} is not computed here")
        if is_tensor(node):
            many = _torch.size_hint(fake_value(node).numel()) > _MOST_ELEMENTS
            if many or any(storage in self._written for storage in storage_of(node)):
                raise LookupError(f"{node.name} is large, or written in place")
        args = map_arg(node.args, self._compute)
        kwargs = map_arg(node.kwargs, self._compute)
        with torch.no_grad():
            if node.op == "call_method":
                return operator.methodcaller(str(node.target), *args[1:], **kwargs)(args[0])
            assert callable(node.target)
            return node.target(*args, **kwargs)
