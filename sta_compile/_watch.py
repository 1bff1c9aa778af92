"""What a model does before and between its blocks, written down while it runs.

Where Dynamo can't see it (a branch that depends on data, a function that it may not trace, and then a loop over the blocks),
the model's own code runs in Python anyway and only its blocks are compiled. A watch notes each operator on the way to them:

    with watching(blocks, seen, reached):    reached(gm, told, tensors) when one of `blocks` is called: a graph of the aten
        model(...)                           operators since the last one, what is told of those inputs that are known,
                                             and its outputs, which are all tensors that still exist
                                             each block runs what it compiled inside of `aside(block)`

So it is known of this very call, whichever branch it took. Private torch APIs, tested on 2.11 and 2.13:
torch.utils._python_dispatch (TorchDispatchMode, _get_current_dispatch_mode), torch.utils.weak.
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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from .analysis.graph_view import mark_parameter
from .ir.known_tokens import Told
from .seen_tokens import SeenTokens, memory_of

log = logging.getLogger(__name__)
Reached = Callable[[torch.fx.GraphModule, Mapping[torch.fx.Node, Told], Sequence[Tensor]], None]
_current: ContextVar[_Watch | None] = ContextVar("sta_compile.watch", default=None)


@contextmanager
def watching(blocks: Collection[nn.Module], seen: SeenTokens, reached: Reached) -> Iterator[None]:
    """Notes the operators of this thread. seen: what is known of tensors, and forgotten of those that are written."""
    watch = _Watch(blocks, seen, reached)
    token = _current.set(watch)
    watch.start()
    try:
        yield
    finally:
        _current.reset(token)
        if watch.on:
            watch.stop()


@contextmanager
def aside(block: nn.Module) -> Iterator[None]:
    """What is compiled runs unwatched; before a block that is waited for, it is told what has run."""
    watch = _current.get()
    if watch is None or not watch.on or _get_current_dispatch_mode() is not watch:
        yield
        return
    watch.stop()
    if block in watch.blocks:
        watch.tell()
    try:
        yield
    finally:
        watch.start()


class _Watch(TorchDispatchMode):
    """The graph of what has run, and which of its nodes each tensor is that still exists."""

    supports_higher_order_operators = True

    def __init__(self, blocks: Collection[nn.Module], seen: SeenTokens, reached: Reached) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks, self.on = blocks, False
        self._seen, self._reached = seen, reached
        self._nodes: MutableMapping[Tensor, torch.fx.Node] = WeakTensorKeyDictionary()
        self._begin()

    def _begin(self) -> None:
        self._graph = torch.fx.Graph()
        self._told: dict[torch.fx.Node, Told] = {}
        self._inputs = 0
        self._nodes.clear()

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
        node = self._graph.call_function(*_as_called(func, *given))
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

    def tell(self) -> None:
        """A block is called: what has run since the last one."""
        made = {x: node for x, node in self._nodes.items() if node.op != "placeholder"}
        if made:
            self._graph.output(tuple(made.values()))
            gm = torch.fx.GraphModule(nn.Module(), self._graph)
            self._reached(gm, self._told, tuple(made))
        self._begin()

    def _node_of(self, tensor: Tensor) -> torch.fx.Node:
        if tensor not in self._nodes:
            with self._graph.inserting_before(next(iter(self._graph.nodes), None)):
                node = self._graph.placeholder(f"input_{self._inputs}")
            self._inputs += 1
            if self._seen.knows(tensor):
                self._told[node] = tuple(sorted(self._seen.of(tensor).items()))
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
            memory_of(x)
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
            for x in tree_leaves(named.get(a.name))
            if isinstance(x, Tensor)
        ]
        for tensor in list(self._nodes):
            if memory_of(tensor) in written:
                del self._nodes[tensor]
        self._seen.forget(written)


def _as_called(func: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """A convolution by the name that models call it, which says how many dimensions it has."""
    if func is torch.ops.aten.convolution.default and not args[6]:
        dimensions = len(args[1].meta["example_value"].shape) - 2
        named = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}.get(dimensions)
        if named is not None:
            return named, (*args[:6], args[8]), kwargs
    return func, args, kwargs


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
