"""Run a graph's switches of global state while parts of the graph are run again.

A bf16 matmul between `_enter_autocast` and `_exit_autocast` is an fp32 one without them, so whoever
propagates values has to pass through these nodes, and to leave the caller's state as it was:

    with GlobalState() as state:
        for node in graph.nodes:
            if state.is_switch(node):
                state.apply(node)
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.fx import Node


class GlobalState:
    def __init__(self) -> None:
        self._entered: dict[Node, Any] = {}  # open autocast regions

    def __enter__(self) -> GlobalState:
        self._grad = torch.is_grad_enabled()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for region in reversed(self._entered.values()):
            autocast_mode._exit_autocast(region)
        self._entered.clear()
        torch._C._set_grad_enabled(self._grad)

    def is_switch(self, node: Node) -> bool:
        return node.target in (
            torch._C._set_grad_enabled,
            autocast_mode._enter_autocast,
            autocast_mode._exit_autocast,
        )

    def apply(self, node: Node) -> None:
        if node.target is autocast_mode._enter_autocast:
            self._entered[node] = autocast_mode._enter_autocast(*node.args, **node.kwargs)
        elif node.target is torch._C._set_grad_enabled:
            torch._C._set_grad_enabled(node.args[0])
        elif (region := self._entered.pop(node.all_input_nodes[0], None)) is not None:
            autocast_mode._exit_autocast(region)
