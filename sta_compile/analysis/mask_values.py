"""Does a mask that is data hide keys of the video in the call that is being compiled?

HunyuanVideo makes its mask once, outside of its blocks, and a block that is compiled alone gets it as an input: nothing in
its graph says that it leaves the video alone. The inputs have values while compiling, so that the mask can be computed and
read here. Values are not guarded: the operator asks the device in every call (`video_mask` of `sta::attention`), so that a
wrong answer costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from .. import _torch
from .axes import Size
from .graph_view import GraphView
from .known_values import KnownValues
from .lower_bound import outside


class MaskValues:
    """Answers for the masks of one graph. values: what its placeholders hold in this call."""

    def __init__(self, view: GraphView, values: Mapping[torch.fx.Node, Any]) -> None:
        self.view, self._given = view, bool(values)
        self._env = _torch.shape_env_of(view.gm)
        self._values = KnownValues(view, values)

    def shows(self, mask: torch.fx.Node, query: Size, start: Size, size: Size) -> bool:
        """Does the row of a query show so many keys from `start` on, in every sample? False where that isn't known."""
        numbers = [_torch.known_value(n, self._env) for n in (query, start, size)]
        if None in numbers or not self._given:
            return False
        first, begin, count = (int(n) for n in numbers if n is not None)
        try:
            value = self._values.of(outside(self.view, mask))
            row = value if value.dim() < 2 or value.shape[-2] == 1 else value.select(-2, first)
            keys = row.narrow(-1, begin, count)
            return bool((keys if keys.dtype == torch.bool else keys == 0).all())
        except (LookupError, RuntimeError, TypeError, ValueError):
            return False
