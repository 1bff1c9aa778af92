"""Blocks that a model repeats become nested regions, which Dynamo traces and inductor compiles once.

A block is repeated if a ModuleList holds at least two modules of its class. What lies inside a repeated block is part of
its region. A region is there for the time of a call only: the instance's `forward` calls the class's function through
`torch.compiler.nested_compile_region`, so other users of the class, copies and pickles of the model see nothing of it.

    with Regions(model).active():       40 blocks of one class: one body in the graph, called 40 times
        compiled(latent, ...)

A region may not return its inputs or two views of one tensor, nor take two (torch refuses). Where a block returns several
tensors they are copied, which inductor makes part of computing them, and so are inputs that share another's memory.

The function is called with the block as an argument: a region on a bound method would run every block with the weights
of the first (torch 2.13). Blocks whose forward is an instance attribute (hooks of diffusers, accelerate) stay as they are.
"""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from . import _torch
from .analysis.graph_view import fake_value
from .shared_scope import SharedScope

# A block whose attributes differ from those of the others makes one more body; torch 2.13 raises at the ninth.
_MANY_BODIES = 4096


def repeated_blocks(model: nn.Module, least: int = 2) -> list[nn.Module]:
    """The outermost modules whose class stands at least so often in one ModuleList; torch's own layers are too small."""
    found: list[nn.Module] = []
    stack: list[nn.Module] = [model]
    seen: set[nn.Module] = set()  # wrappers of blocks may hold the model
    while stack:
        module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        children = list(module.children())
        counts = Counter(map(type, children)) if isinstance(module, nn.ModuleList) else Counter()
        for child in children:
            own = not type(child).__module__.startswith("torch.nn.")
            if counts[type(child)] >= least and own:
                found.append(child)
            else:
                stack.append(child)
    return found


class RegionsHideTokens(Exception):
    """One body serves the video and as many other tokens, so that its attention can't be replaced."""


class RegionsLackGradients(Exception):
    """Torch has no backward pass for regions with complex values: none takes a conjugated tensor (torch 2.13)."""


class RegionsTakeNumbers(Exception):
    """A body takes Python numbers that differ from block to block or from call to call: torch takes none (torch 2.13)."""


def lack_gradients(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Do bodies of a graph hold complex values, such as a rotation by `view_as_complex`, where gradients are recorded?"""
    if not any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs):
        return False
    bodies = (module for module in _torch.graph_modules(gm) if module is not gm)
    values = (fake_value(node) for body in bodies for node in body.graph.nodes)
    return any(isinstance(value, Tensor) and value.is_complex() for value in values)


class Regions:
    """The regions of one model. `off()` gives them up, where Dynamo can't trace them."""

    def __init__(self, model: nn.Module, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._repeated = repeated_blocks(model)
        self.numbers: dict[str, float] = {}  # that bodies hold, by the names of their inputs
        self._scope = SharedScope()
        self._blocks: list[nn.Module] = []

    def off(self) -> None:
        self.enabled = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """The regions exist inside this block; calls that overlap share them."""
        if not self.enabled:
            yield
            return
        with self._scope.held(self._enter, self._leave):
            yield

    def _enter(self) -> None:
        from ._guards import guard_reused_regions  # which imports what asks for regions

        guard_reused_regions()
        for block in self._repeated:
            forward = type(block).forward
            if "forward" not in block.__dict__ and isinstance(forward, types.FunctionType):
                block.__dict__["forward"] = types.MethodType(_in_region(forward), block)
                self._blocks.append(block)

    def _leave(self) -> None:
        while self._blocks:
            self._blocks.pop().__dict__.pop("forward", None)


@lru_cache(maxsize=256)
def _in_region(forward: Callable[..., Any]) -> Callable[..., Any]:
    """One function per class: Dynamo knows a region by it."""
    mark = torch.compiler.nested_compile_region
    many = "max_reuse_entries" in inspect.signature(mark).parameters  # not in 2.11

    def unaliased(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        return _map_tensors(_copy, out) if isinstance(out, (tuple, list)) else out

    region = mark(unaliased, max_reuse_entries=_MANY_BODIES) if many else mark(unaliased)

    def forward_in_region(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return _in_python(forward, self, args, kwargs)
        if not _may_share((*args, *kwargs.values())):
            return region(self, *args, **kwargs)
        seen: list[Tensor] = []

        def apart(value: Tensor) -> Tensor:
            """A copy of a tensor that shares memory with one before it."""
            base = value if value._base is None else value._base
            for other in seen:
                if other is base:
                    return value.clone()
            seen.append(base)
            return value

        return region(self, *_map_tensors(apart, args), **_map_tensors(apart, kwargs))

    return forward_in_region


def _in_python(
    forward: Callable[..., Any], block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A block that no graph holds; the call is told if it holds none itself."""
    from .model_call import current

    call = current()
    before = None if call is None else call.graphs
    out = forward(block, *args, **kwargs)
    if call is not None and call.graphs == before:
        call.hidden.append(block)
    return out


def _may_share(values: tuple[Any, ...]) -> bool:
    """May two tensors among the inputs of a block share memory? Traced for each block, so it calls nothing."""
    seen: list[Tensor] = []
    for value in values:
        for item in value if type(value) in (tuple, list) else (value,):
            if isinstance(item, Tensor):
                base = item if item._base is None else item._base
                for other in seen:
                    if other is base:
                        return True
                seen.append(base)
            elif type(item) in (tuple, list, dict):
                return True
    return False


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with each tensor in its tuples, lists and dicts changed: plain Python that Dynamo can trace."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)([_map_tensors(function, item) for item in value])
    if type(value) is dict:
        return {key: _map_tensors(function, item) for key, item in value.items()}
    return value


def _copy(value: Tensor) -> Tensor:
    return value.clone()
