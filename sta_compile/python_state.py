"""Parts of a model that Python decides over: they run in Python, and what they call is compiled by itself.

A cache over steps (FirstBlockCache, MagCache, TeaCache, ...) counts calls and keeps tensors in attributes. Dynamo compiles
anew for each value of a counter, and what is marked as not to be traced hides all that it calls. So, for the time of a call:

    a hook that may leave out its module      is not traced; the forward behind it is compiled, once for a class of modules
    a model whose own forward has such state  is not traced; each block that it repeats is compiled

The first is known by the hook (diffusers keeps the forward behind it), the second by compiles that don't end: the same
shapes were compiled for in the call before, and in the one before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from . import config
from ._watch import aside
from .checkpoints import computed_anew
from .model_call import current
from .prefix import key_of
from .regions import repeated_blocks
from .shared_scope import SharedScope
from .size_tables import WithTables

_IN_A_ROW = 3
# It wraps the forward of a layer with adapters, under layerwise casting, and always calls it.
_ALWAYS_CALLS = "peft_autocast_disable"

Forward = Callable[..., Any]


class PythonState:
    """What Python decides in one model. compile: how a forward is compiled by itself. blocks_alone: see `count`."""

    def __init__(self, model: nn.Module, compile: Callable[[Forward], Forward]) -> None:
        self.blocks_alone = False
        self._compile = compile
        self._modules = list(model.modules())
        self._blocks = repeated_blocks(model)
        self._made: WeakKeyDictionary[Any, tuple[Forward, Forward, Forward]] = WeakKeyDictionary()
        self._compiled_blocks: dict[nn.Module, Forward] = {}
        self._seen: set[Any] = set()
        self._in_a_row = 0
        self._scope = SharedScope()
        self._changed: list[tuple[Any, dict[str, Any]]] = []

    def hooks(self) -> list[Any]:
        """The references (diffusers' HookFunctionReference) of hooks that decide whether their module runs."""
        found = []
        for module in self._modules:
            registry = module.__dict__.get("_diffusers_hook")
            if registry is not None:
                pairs = zip(registry._hook_order, registry._fn_refs, strict=True)
                found += [
                    ref
                    for name, ref in pairs
                    if ref.original_forward is not None and name != _ALWAYS_CALLS
                ]
        return found

    def inside_blocks(self, hooks: Sequence[Any]) -> bool:
        """Are these hooks of blocks, or of what blocks hold?"""
        registries = [
            module.__dict__["_diffusers_hook"]
            for block in self._blocks
            for module in block.modules()
            if "_diffusers_hook" in module.__dict__
        ]
        inside = {id(ref) for registry in registries for ref in registry._fn_refs}
        return all(id(ref) in inside for ref in hooks)

    def count(self, compiled: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Told of each call whether it compiled anything. True, once, where that has no end: blocks are alone then."""
        if not compiled:
            self._in_a_row = 0
            return False
        # What else a compiled model is compiled anew for, with an end.
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        tensors = [x.is_inference() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        key = key_of(args, kwargs), modes, tuple(tensors), repr(config.overrides())
        self._in_a_row += key in self._seen
        self._seen.add(key)
        if self._in_a_row < _IN_A_ROW or self.blocks_alone or not self._blocks:
            return False
        self.blocks_alone = True
        return True

    @contextmanager
    def apart(self, hooks: Sequence[Any]) -> Iterator[None]:
        """What Python decides is apart from what is compiled inside this block; calls that overlap share it."""
        with self._scope.held(lambda: self._enter(hooks), self._leave):
            yield

    def _enter(self, hooks: Sequence[Any]) -> None:
        for ref in hooks:
            given = ref.original_forward
            made = self._made.get(ref)
            if made is None or made[0] is not given:
                hook = torch.compiler.disable(ref.forward)
                made = self._made[ref] = (given, hook, _outside_checkpoints(given, self._compile))
            self._change(ref, forward=made[1], original_forward=made[2])
        if not self.blocks_alone:
            return
        for block in self._blocks:
            if block._compiled_call_impl is None:
                if block not in self._compiled_blocks:
                    compiled = _outside_checkpoints(block._call_impl, self._compile)
                    self._compiled_blocks[block] = _unwatched(block, compiled)
                self._change(block, _compiled_call_impl=self._compiled_blocks[block])

    def _change(self, owner: Any, **fields: Any) -> None:
        self._changed.append((owner, {name: getattr(owner, name) for name in fields}))
        for name, value in fields.items():
            setattr(owner, name, value)

    def _leave(self) -> None:
        while self._changed:
            owner, fields = self._changed.pop()
            for name, value in fields.items():
                setattr(owner, name, value)


def _outside_checkpoints(given: Forward, compile: Callable[[Forward], Forward]) -> Forward:
    """What is compiled, but where a checkpoint that no graph holds may compute it anew in the backward pass."""
    compiled = WithTables(given, compile)

    def run(*args: Any, **kwargs: Any) -> Any:
        call = current()
        if call is None or not computed_anew():
            return compiled(args, kwargs)
        call.exact.append(getattr(given, "__self__", None))
        return given(*args, **kwargs)

    return run


def _unwatched(block: nn.Module, compiled: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        with aside(block):
            return compiled(*args, **kwargs)

    return run
