"""What a model does before its first block, written down while it runs.

Where Dynamo can't see it (a branch that depends on data, a function that it may not trace, and then a loop over the blocks),
the model's own code runs in Python anyway and only its blocks are compiled. A watch notes each operator on the way to them:

    with watching(blocks, reached):    reached(gm) when the first of `blocks` is called: a graph of aten operators, whose
        model(...)                     outputs are the tensors that the block is called with
                                       each block runs what it compiled inside of `aside(block, args, kwargs)`

So it is known of this very call, whichever branch it took. Private torch APIs, tested on 2.11 and 2.13:
torch.utils._python_dispatch (TorchDispatchMode, _get_current_dispatch_mode), torch.utils.weak, UntypedStorage._cdata.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from .analysis.graph_view import mark_parameter

log = logging.getLogger(__name__)
Reached = Callable[[torch.fx.GraphModule], None]
_current: ContextVar[_Watch | None] = ContextVar("sta_compile.watch", default=None)


@contextmanager
def watching(blocks: Collection[nn.Module], reached: Reached) -> Iterator[None]:
    """Notes the operators of this thread until the first of `blocks` is called."""
    watch = _Watch(blocks, reached)
    token = _current.set(watch)
    watch.start()
    try:
        yield
    finally:
        _current.reset(token)
        if watch.on:
            watch.stop()


@contextmanager
def aside(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """What is compiled runs unwatched; the call of a block that is waited for ends the watch."""
    watch = _current.get()
    if watch is None or not watch.on or _get_current_dispatch_mode() is not watch:
        yield
        return
    watch.stop()
    if block in watch.blocks:
        watch.end(tree_leaves((tuple(args), dict(kwargs))))
        yield
        return
    try:
        yield
    finally:
        watch.start()


class _Watch(TorchDispatchMode):
    """The graph of what has run, and which of its nodes each tensor is that still exists."""

    supports_higher_order_operators = True

    def __init__(self, blocks: Collection[nn.Module], reached: Reached) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks, self.on = blocks, False
        self._reached = reached
        self._graph = torch.fx.Graph()
        self._nodes: MutableMapping[Tensor, torch.fx.Node] = WeakTensorKeyDictionary()
        self._inputs = 0

    def start(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]
        self.on = True

    def stop(self) -> None:
        self.on = False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tree_map_only(Tensor, self._node_of, (args, kwargs))
        out = func(*args, **kwargs)
        self._forget_written(func, args, kwargs)
        node = self._graph.call_function(func, *given)
        node.meta["example_value"] = tree_map_only(Tensor, _without_data, out)
        if isinstance(out, Tensor):
            self._nodes[out] = node
        elif isinstance(out, (tuple, list)):
            for index, item in enumerate(out):
                if isinstance(item, Tensor):
                    part = self._graph.call_function(operator.getitem, (node, index))
                    part.meta["example_value"] = _without_data(item)
                    self._nodes[item] = part
        return out

    def end(self, leaves: Sequence[Any]) -> None:
        """A block is called with these."""
        known = [self._nodes[x] for x in leaves if isinstance(x, Tensor) and x in self._nodes]
        self._graph.output(tuple(known))
        self._nodes.clear()
        self._reached(torch.fx.GraphModule(nn.Module(), self._graph))

    def _node_of(self, tensor: Tensor) -> torch.fx.Node:
        if tensor not in self._nodes:
            with self._graph.inserting_before(next(iter(self._graph.nodes), None)):
                node = self._graph.placeholder(f"input_{self._inputs}")
            self._inputs += 1
            node.meta["example_value"] = _without_data(tensor)
            if isinstance(tensor, nn.Parameter):
                mark_parameter(node)
            self._nodes[tensor] = node
        return self._nodes[tensor]

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Whatever shares memory with what an operator writes is a new tensor, of which nothing is known."""
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        named = {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
        named.update(kwargs)
        written = [
            _memory_of(x)
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
            for x in tree_leaves(named.get(a.name))
            if isinstance(x, Tensor)
        ]
        for tensor in list(self._nodes):
            if _memory_of(tensor) in written:
                del self._nodes[tensor]


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
