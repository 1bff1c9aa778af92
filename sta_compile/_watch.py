"""What a model does before and between its blocks, written down while it runs.

Where Dynamo can't see it (a branch that depends on data, a function that it may not trace, and then a loop over the blocks),
the model's own code runs in Python anyway and only its blocks are compiled. A watch notes each operator on the way to them:

    with watching(blocks, seen, reached):    reached(gm, told, tensors) when one of `blocks` is called: a graph of the aten
        model(...)                           operators since the last one, what is told of those inputs that are known,
                                             and its outputs, which are all tensors that still exist
                                             each block runs what it compiled inside of `aside(block)`

So it is known of this very call, whichever branch it took. A watch changes nothing of what a model does: an operator that it
can't follow (it reads a storage, or tensors that are sparse, nested or quantised; a jit trace is being made) runs as without
it, and nothing is known of what it makes or writes.

Private torch APIs, tested on 2.11 and 2.13: torch.utils._python_dispatch (TorchDispatchMode, _disable_current_modes,
_get_current_dispatch_mode), torch.utils.weak, torch._C.DisableTorchFunction, torch._C._should_allow_numbers_as_tensors,
torch._C._is_tracing.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from .analysis.graph_view import mark_parameter
from .ir.known_tokens import Told
from .seen_tokens import SeenTokens, memory_of

log = logging.getLogger(__name__)
Reached = Callable[[torch.fx.GraphModule, Mapping[torch.fx.Node, Told], Sequence[Tensor]], None]
# What a graph holds beside its values. Anything else has no name in its source.
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONSTANTS = (int, float, complex, str, type(None), *_NAMED)
_OF_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
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
        self._values: dict[torch.fx.Node, Any] = {}
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
        given: Any = None
        with self._whatever_fails():
            given = self._given(args, kwargs)
        out = func(*_with_tensors(func, args), **kwargs)
        with self._whatever_fails():
            self._forget_written(func, args, kwargs)
            self._note(func, args, given, out)
        return out

    def tell(self) -> None:
        """A block is called: what has run since the last one."""
        made = {x: node for x, node in self._nodes.items() if node.op != "placeholder"}
        if made and not torch._C._is_tracing():
            # Modes of the caller see the operators of the model, and none of ours.
            with (
                self._whatever_fails(),
                torch._C.DisableTorchFunction(),
                _disable_current_modes(),
            ):
                for node, value in self._values.items():
                    node.meta["example_value"] = tree_map_only(_Layout, _without_data, value)
                self._graph.output(tuple(made.values()))
                gm = torch.fx.GraphModule(nn.Module(), self._graph)
                self._reached(gm, self._told, tuple(made))
        self._begin()

    @contextmanager
    def _whatever_fails(self) -> Iterator[None]:
        """The model runs on, and nothing is known any more."""
        try:
            yield
        except Exception:
            log.info("what runs between blocks can't be followed", exc_info=True)
            self._forget_all()

    def _forget_all(self) -> None:
        self._begin()
        self._seen.forget_all()

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operator is called with, as nodes; None if it can't be followed."""
        leaves = tree_leaves((args, kwargs))
        if not all(isinstance(x, (Tensor, torch.Generator, *_CONSTANTS)) for x in leaves):
            return None
        if not all(_can_follow(x) for x in leaves if isinstance(x, Tensor)):
            return None
        given = tree_map_only(Tensor, self._node_of, (args, kwargs))
        # Random numbers have no places, whichever generator they come from.
        return tree_map_only(torch.Generator, lambda _: None, given)

    def _note(self, func: Any, args: Sequence[Any], given: Any, out: Any) -> None:
        items = out if isinstance(out, (tuple, list)) else ()
        tensors = [x for x in (out, *tree_leaves(items)) if isinstance(x, Tensor)]
        if given is None or not all(_can_follow(x) for x in tensors):
            for tensor in tensors:
                self._nodes.pop(tensor, None)
            return
        node = self._add(*_as_called(func, args, *given), like=out)
        if isinstance(out, Tensor):
            self._nodes[out] = node
        for index, item in enumerate(items):
            if isinstance(item, Tensor):
                self._nodes[item] = self._add(operator.getitem, (node, index), {}, like=item)

    def _add(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, like: Any
    ) -> torch.fx.Node:
        node = self._graph.call_function(func, args, dict(kwargs))
        self._values[node] = tree_map_only(Tensor, _Layout.of, like)
        return node

    def _node_of(self, tensor: Tensor) -> torch.fx.Node:
        if tensor not in self._nodes:
            with self._graph.inserting_before(next(iter(self._graph.nodes), None)):
                node = self._graph.placeholder(f"input_{self._inputs}")
            self._inputs += 1
            if self._seen.knows(tensor):
                self._told[node] = tuple(sorted(self._seen.of(tensor).items()))
            self._values[node] = _Layout.of(tensor)
            if isinstance(tensor, nn.Parameter):
                mark_parameter(node)
            self._nodes[tensor] = node
        return self._nodes[tensor]

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Whatever shares memory with what an operator writes is a new tensor, of which nothing is known."""
        written = [memory_of(x) for x in _written(func, args, kwargs)]
        if None in written:  # of tensors that wrap others, or have several
            self._forget_all()
        elif written:
            for tensor in list(self._nodes):
                if memory_of(tensor) in written:
                    del self._nodes[tensor]
            self._seen.forget(written)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """What an operator may write: those arguments that its schema says, or any if it has none."""
    schema = getattr(func, "_schema", None)
    given: Any = (args, kwargs)
    if schema is not None:
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
        marked = [a for a in schema.arguments if a.alias_info is not None]
        given = [named.get(a.name) for a in marked if a.alias_info.is_write]
    return [x for x in tree_leaves(given) if isinstance(x, Tensor)]


def _with_tensors(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator, with a tensor where a mode is given a number for one, as of constants in a jit graph."""
    schema = getattr(func, "_schema", None)
    if schema is None or torch._C._should_allow_numbers_as_tensors(schema.name.split("::")[-1]):
        return args
    return tuple(
        torch.scalar_tensor(value, dtype=_OF_NUMBERS[type(value)])
        if type(value) in _OF_NUMBERS and a.type.kind() == "TensorType"
        else value
        for a, value in zip(schema.arguments, args, strict=False)
    )


def _as_called(func: Any, given: Sequence[Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A convolution by the name that models call it, which says how many dimensions it has. given: the tensors."""
    if func is torch.ops.aten.convolution.default and not args[6]:
        named = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}.get(given[1].dim() - 2)
        if named is not None:
            return named, (*args[:6], args[8]), kwargs
    return func, args, kwargs


def _can_follow(tensor: Tensor) -> bool:
    """Is a tensor one block of numbers, of a size that asks for no operator?"""
    if torch._C._is_tracing() or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided and all(type(n) is int for n in tensor.shape)


@dataclass(frozen=True)
class _Layout:
    """What is noted of a tensor: making another while an operator runs is for others to see."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> _Layout:
        return _Layout(tensor.shape, tensor.stride(), tensor.dtype)


def _without_data(layout: _Layout) -> Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
