"""Runs Dynamo alone over a model and hands each graph to a function, leaving no trace in the process.

    trace(model, args, kwargs, visit)       visit(gm, example_inputs) is called once per graph that a compile would have

Dynamo keeps what it compiles on code objects. A model's forward is therefore traced through a copy of its code, which
dies with this call, and a model that makes one graph is never run: tracing ends in the backend. A model with graph
breaks is run once, graph by graph, since what comes after a break depends on it; entries on the code of inner
functions are removed again (beside a user's own entries they are marked as dead, which is all that torch offers), and
so is what Dynamo notes about shapes (automatic dynamic) and its counters.

Private torch APIs, tested on 2.11 and 2.13: GraphModule.compile_subgraph_reason, register_bytecode_hook, cache entries
(_debug_get_cache_entry_list, reset_code, ExtraState.invalidate), pgo._CODE_STATE, utils.counters, the number of a frame
(convert_frame.FRAME_COUNTER, CompileContext.current_compile_id), fake_tensor.CONSTANT_NUMEL_LIMIT, real_stack of an error.
"""

from __future__ import annotations

import copy
import inspect
import logging
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Not in 2.11: entries made here don't count towards the recompile limit of the user's own.
_CAN_ISOLATE = "isolate_recompiles" in inspect.signature(torch.compile).parameters

Visit = Callable[[torch.fx.GraphModule, Sequence[Any]], None]


def trace(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    visit: Visit,
    *,
    fullgraph: bool = False,
) -> None:
    """Calls `visit` for each graph that `torch.compile(model, fullgraph=fullgraph)(*args, **kwargs)` compiles."""
    model = unwrap(model)
    tracer = _Tracer(visit)
    with _isolated():
        apart: dict[str, Any] = {"isolate_recompiles": True} if _CAN_ISOLATE else {}
        compiled = torch.compile(_copy_of_code(model), backend=tracer, fullgraph=fullgraph, **apart)
        with tracer.remembering_codes():
            try:
                compiled(*args, **kwargs)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                if isinstance(error.inner_exception, _Finished):
                    return
                raise error.inner_exception from error


def trace_quietly(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], visit: Visit
) -> str:
    """Calls `visit` for the one graph that the call makes; returns why and where it breaks, "" if it doesn't.

    What changes nothing (print, logging, a graph break that was asked for) breaks no graph here, for nothing is run.
    """
    settings: dict[str, Any] = {"capture_scalar_outputs": True}
    for name in ("ignore_logging_functions", "ignore_logger_methods"):  # the second in torch 2.11
        if hasattr(torch._dynamo.config, name):
            settings[name] = {*getattr(torch._dynamo.config, name), *_WITHOUT_EFFECT}
            break
    try:
        with torch._dynamo.config.patch(settings):
            trace(model, args, kwargs, visit, fullgraph=True)
    except torch._dynamo.exc.TorchDynamoException as error:
        return _first_line(error) + _place_of(error)
    return ""


_WITHOUT_EFFECT = (
    print,
    warnings.warn,
    torch._dynamo.graph_break,
    *(
        getattr(owner, name)
        for owner in (logging.Logger, logging)
        for name in ("debug", "info", "warning", "error", "exception", "critical", "log")
    ),
)


def break_after(gm: torch.fx.GraphModule) -> str:
    """Why Dynamo ended a graph where the frame goes on, and where in the user's code; "" if it did not."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    text = str(reason.reason).strip().partition("\n")[0]
    stack = [f for f in reason.user_stack or () if not _is_ours(f.filename)]
    return text + (f", at {stack[-1].filename}:{stack[-1].lineno}" if stack else "")


def _is_ours(file: str) -> bool:
    return Path(file).parent == Path(__file__).parent


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _place_of(error: Any) -> str:
    """Where in the user's code Dynamo was, if it says so; what stands in for a block is none of it."""
    stack = [f for f in getattr(error, "real_stack", None) or () if not _is_ours(f.filename)]
    return f", at {stack[-1].filename}:{stack[-1].lineno}" if stack else ""


@contextmanager
def small_constants(elements: int = 64) -> Iterator[None]:
    """Lets fake tensors of up to so many elements know their values, where a graph makes them of numbers."""
    from torch._subclasses import fake_tensor

    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = elements
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


def unwrap(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model inside `torch.compile(model)`; one compiled in place is its own."""
    inner: Callable[..., Any] | None = getattr(model, "_orig_mod", None)
    original: Callable[..., Any] = getattr(model, "_torchdynamo_orig_callable", model)
    return inner or original


class _Finished(Exception):
    """Raised out of a backend: the whole frame is one graph and nothing is left to trace."""


class _Tracer:
    """The backend. It never compiles: the last graph ends the trace, others run as they are."""

    def __init__(self, visit: Visit) -> None:
        from torch._dynamo import convert_frame

        self.visit = visit
        self.graphs = 0
        self.first_frame = convert_frame.FRAME_COUNTER
        # By identity (see checkpoints.py): each with, did it have entries before?
        self.codes: dict[int, tuple[types.CodeType, bool]] = {}

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        self.graphs += 1
        reason: Any = getattr(gm, "compile_subgraph_reason", None)
        if self._in_first_frame() and reason is not None and not reason.graph_break:
            self.visit(gm, example_inputs)
            raise _Finished
        self.visit(copy.deepcopy(gm), example_inputs)  # the visitor may edit what it gets
        return gm.forward

    def _in_first_frame(self) -> bool:
        """Is this the first graph, and that of the function which is traced?

        Dynamo gives up a frame that breaks inside a loop; the first graph is then that of a function which it calls.
        """
        current = torch._guards.CompileContext.current_compile_id()
        return self.graphs == 1 and current is not None and current.frame_id == self.first_frame

    @contextmanager
    def remembering_codes(self) -> Iterator[None]:
        """Removes afterwards what Dynamo stored on code objects meanwhile."""
        from torch._dynamo.convert_frame import register_bytecode_hook
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        def remember(code: types.CodeType, new_code: types.CodeType) -> None:
            if id(code) not in self.codes:
                self.codes[id(code)] = code, bool(_debug_get_cache_entry_list(code))

        handle = register_bytecode_hook(remember)
        try:
            yield
        finally:
            handle.remove()
            for code, had_entries in self.codes.values():
                self._remove_entries(code, had_entries)

    def _remove_entries(self, code: types.CodeType, had_entries: bool) -> None:
        from torch._C._dynamo.eval_frame import reset_code
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        if not had_entries:
            reset_code(code)
            return
        for entry in list(_debug_get_cache_entry_list(code)):
            backend: Any = entry.backend  # torch.compile wraps what it is given
            if getattr(backend, "compiler_fn", backend) is self:
                gone = DeletedGuardManagerWrapper("sta_compile.explain has ended")
                extra_state: Any = entry.guard_manager.extra_state
                extra_state.invalidate(entry, gone)


@contextmanager
def _isolated() -> Iterator[None]:
    """Dynamo as in a fresh process, without its memory of shapes; both are put back afterwards."""
    from torch._dynamo import pgo, utils

    private: Any = pgo
    shapes, counters = private._CODE_STATE, copy.deepcopy(utils.counters)
    private._CODE_STATE = defaultdict(private.CodeState)
    quiet = {"suppress_errors": False}
    for name in ("automatic_dynamic_local_pgo", "automatic_dynamic_remote_pgo"):
        if hasattr(torch._dynamo.config, name):
            quiet[name] = False
    try:
        with torch._dynamo.config.patch(quiet):
            yield
    finally:
        private._CODE_STATE = shapes
        utils.counters.clear()
        utils.counters.update(counters)


def _copy_of_code(model: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own, bound to the same module."""
    function: Any = model.forward if isinstance(model, torch.nn.Module) else model
    owner = getattr(function, "__self__", None)
    inner = getattr(function, "__func__", function)
    if not isinstance(inner, types.FunctionType):
        return _copy_of_code(_calling(model))
    code = inner.__code__
    name = f"explain_{code.co_name}"
    clone = types.FunctionType(
        code.replace(co_name=name),
        inner.__globals__,
        name,
        inner.__defaults__,
        inner.__closure__,
    )
    clone.__kwdefaults__ = inner.__kwdefaults__
    return clone if owner is None else types.MethodType(clone, owner)


def _calling(model: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return call
