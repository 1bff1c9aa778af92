"""Every private torch API that sta_compile uses, with the versions that it was tested on. 2.14 has all of them.

| API | torch |
| --- | --- |
| `torch._inductor.compile_fx.compile_fx` | 2.11, 2.13 |
| higher-order operator calls (`tag_activation_checkpoint`, `invoke_subgraph`, `wrap`) in Dynamo graphs | 2.11, 2.13 |
| `torch._guards.TracingContext`, `CompileContext` | 2.11, 2.13 |
| `torch._inductor.custom_graph_pass.CustomGraphPass` | 2.11, 2.13 |
| `torch._C._functorch.is_batchedtensor` | 2.11, 2.13 |
| `torch._logging.trace_structured` | 2.11, 2.13 |
| `torch._dynamo.backends.registry` | 2.11, 2.13 |
| `torch._C._dynamo.eval_frame.reset_code`, `_debug_get_cache_entry_list` | 2.13 |
| `torch.fx.experimental.symbolic_shapes`: `statically_known_true`, `free_unbacked_symbols`, `ShapeEnv` | 2.11, 2.13 |
| the same: `GuardOnDataDependentSymNode` | 2.11, 2.13 |
| in _sizes.py: `torch.utils._sympy.functions.Max` | 2.11, 2.13 |
| `torch._C._functorch.is_functorch_wrapped_tensor` | 2.11, 2.13 |
| `torch._higher_order_ops.triton_kernel_wrap.kernel_side_table` | 2.13 |
| in ops/library.py, since this module is heavy: `torch._library.autograd.make_autograd_impl`, `_C._any_requires_grad`, | |
| `_C._after_autograd_keyset`, `DispatchKeySet.highestPriorityTypeId` and `raw_repr` | 2.11, 2.13 |
| `torch._dispatch.python.enable_python_dispatcher` | 2.11, 2.13 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as UnknownSize
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["UnknownSize", "body_of_call", "is_higher_order", "statically_known_true"]

# name of the operator -> position of its first tensor operand
_CALLS_WITH_BODY = {
    "tag_activation_checkpoint": 1,
    "wrap_activation_checkpoint": 1,
    "invoke_subgraph": 2,
    "wrap": 1,
}


def registered(backend: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The backend of that name in Dynamo's registry; `backend`, which is put there, if there is none.

    After a compile Dynamo drops its weak references to weights if the backend is a registered one. While there are any, a
    weight that is a tensor subclass can't be swapped for its copy on another device, as offloading does.
    """
    from torch._dynamo.backends.registry import lookup_backend, register_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(name)
    except InvalidBackend:
        register_backend(backend, name=name)
        return backend


def is_higher_order(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, HigherOrderOperator)


def is_region(node: torch.fx.Node) -> bool:
    """Is a node the call of a nested compile region?"""
    return getattr(node.target, "_name", "") == "invoke_subgraph"


def triton_kernel(node: torch.fx.Node) -> tuple[str, dict[str, Any]] | None:
    """(name, arguments) of the Triton kernel that a node launches; None for any other node."""
    if not str(getattr(node.target, "_name", "")).startswith("triton_kernel_wrapper"):
        return None
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    given: Any = node.kwargs
    kernel: Any = kernel_side_table.get_kernel(given["kernel_idx"])
    while hasattr(kernel, "fn"):  # behind autotuning and heuristics
        kernel = kernel.fn
    return kernel.__name__, dict(given["kwargs"])


def is_vmapped(value: Any) -> bool:
    """Is a tensor that of one sample inside a vmap? flex_attention leaves such values in Dynamo graphs."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_batchedtensor(value)


def body_of_call(
    gm: torch.fx.GraphModule, node: torch.fx.Node
) -> tuple[torch.fx.GraphModule, tuple[Any, ...]] | None:
    """The body of a higher-order call that runs it once, and the operands that its placeholders take; else None."""
    first = _CALLS_WITH_BODY.get(getattr(node.target, "_name", ""))
    if first is None or not node.args:
        return None
    attribute = node.args[0]
    if not isinstance(attribute, torch.fx.Node) or attribute.op != "get_attr":
        return None
    body = gm.get_submodule(str(attribute.target))
    return (body, tuple(node.args[first:])) if isinstance(body, torch.fx.GraphModule) else None


def inside_vmap(value: Any) -> bool:
    """Is this the value that a node has inside of `torch.vmap`? Any operation on it outside breaks later ones on others."""
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(value)
    return wrapped


def graph_modules(gm: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """A graph module and those of its bodies."""
    return [module for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]


def program_of(program: Any, gm: torch.fx.GraphModule, signature: Any) -> Any:
    """An exported program with another graph, which may call methods and Python's operators: traced to ATen operators.

    Private: ExportedProgram._update and the verifiers, as in torch 2.11 to 2.13.
    """
    from torch._export.verifier import Verifier

    class Unchecked(Verifier):
        dialect = "STA_EDITED"

    setattr(Unchecked, "check", lambda self, ep: None)  # noqa: B010  a class that defines it is refused
    edited = program._update(gm, signature, verifiers=[Unchecked])
    traced = edited.run_decompositions({})
    return traced._update(
        traced.graph_module, traced.graph_signature, verifiers=list(program.verifiers)
    )


def specialise(size: Any, shape_env: Any) -> int:
    """The value of a symbolic size, with a guard: another value compiles again. Raises if it depends on data."""
    if isinstance(size, int):
        return size
    return int(shape_env.create_symintnode(size, hint=None))


def equate(left: Any, right: Any, shape_env: Any) -> None:
    """States with a guard that two sizes are equal, if they are for the example inputs, and neither depends on data.

    It makes no number of a size that the user marked dynamic.
    """
    values = [known_value(size, shape_env) for size in (left, right)]
    difference = left - right
    fixed = len(difference.free_symbols) == 1 and must_stay_dynamic(difference, shape_env)
    if None not in values and values[0] == values[1] and not fixed:
        bool(shape_env.create_symintnode(difference, hint=None) == 0)


def known_value(size: Any, shape_env: Any) -> int | None:
    """The value of a size for the example inputs, without a guard; None if it depends on data."""
    if isinstance(size, int):
        return size
    number = shape_env.create_symintnode(size, hint=None)
    if isinstance(number, int):
        return number
    return int(number.node.hint) if number.node.has_hint() else None


def specialise_float(value: torch.SymFloat) -> float | None:
    """The value of a symbolic number, with a guard; None if it depends on data."""
    return float(value) if value.node.has_hint() else None


def float_of(value: Any) -> float | None:
    """The number that a graph's operand holds, with a guard: a float, or a tensor that Dynamo has made of one; else None."""
    value = value.meta.get("example_value") if isinstance(value, torch.fx.Node) else value
    if isinstance(value, torch.Tensor):
        value = getattr(value, "item_memo", None)  # of a fake tensor
    if isinstance(value, torch.SymFloat):
        return specialise_float(value)
    return value if isinstance(value, float) else None


def must_stay_dynamic(size: Any, shape_env: Any) -> bool:
    """Is a size made of one that the user marked dynamic? A guard on its value would raise at the end of the trace.

    What Dynamo made dynamic by itself has a constraint that only warns.
    """
    if isinstance(size, int):
        return False
    marked = set()
    for tracked in getattr(shape_env, "tracked_fakes", None) or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for dimension, constraint in zip(
            getattr(tracked.fake, "shape", ()), constraints, strict=False
        ):
            strict = constraint is not None and not constraint.warn_only
            if strict and isinstance(dimension, torch.SymInt):
                marked |= dimension.node.expr.free_symbols
    return bool(size.free_symbols & marked)


def shape_env_of(gm: torch.fx.GraphModule) -> Any:
    """The shape environment of a graph's fake values; None if it has no fake tensor."""
    for node in gm.graph.nodes:
        mode = getattr(node.meta.get("example_value"), "fake_mode", None)
        if mode is not None:
            return mode.shape_env
    return None


def last_compile_of_frame() -> bool:
    """Is this the last compile that the frame's recompile limit allows? False outside a compile."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    count = getattr(compile_id, "frame_compile_id", None)
    return count is not None and count >= torch._dynamo.config.recompile_limit - 1


def _running_modules() -> Iterator[torch.nn.Module]:
    """The modules whose calls are on the stack, innermost first; for torch.compile's wrapper the module in it."""
    import sys

    frame: Any = sys._getframe(1)
    call = torch.nn.Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is call:
            module = frame.f_locals.get("self")
            yield getattr(module, "_orig_mod", module)
        frame = frame.f_back


def root_module() -> torch.nn.Module | None:
    """The outermost module whose call led to this compile: the model, whatever part of it is compiled."""
    found = None
    for found in _running_modules():  # noqa: B007  the last one
        pass
    return found


def forget_skipped(model: torch.nn.Module) -> None:
    """Lets Dynamo look again at forwards that it gave up (a graph break in a loop) under other settings.

    Code that it has compiled for someone is left alone.
    """
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    for kind in {type(module) for module in model.modules()}:
        function: Any = kind.forward
        while function is not None:
            code = getattr(function, "__code__", None)
            if code is not None and not _debug_get_cache_entry_list(code):
                reset_code(code)
            function = getattr(function, "__wrapped__", None)


def is_whole_forward() -> bool:
    """Is the frame that is being compiled a call of the outermost module, and not of a part of it?"""
    return len(set(map(id, _running_modules()))) < 2


def names_of_positional_arguments() -> dict[str, str]:
    """What the forward being compiled calls the arguments that a decorator takes as *args: {"args_1": "timestep"}.

    diffusers decorates most of its forwards, so Dynamo knows what was passed by position by its number only.
    """
    import inspect

    module = next(_running_modules(), None)
    forward: Any = getattr(type(module), "forward", None)
    inner: Any = inspect.unwrap(forward) if forward is not None else None
    if inner is forward or not hasattr(forward, "__code__"):
        return {}
    own = forward.__code__.co_argcount  # of the decorator: `self`, as a rule
    parameters = list(inspect.signature(inner).parameters)
    return {f"args_{i}": name for i, name in enumerate(parameters[own:])}


def save_artifact(name: str, payload: Callable[[], str]) -> None:
    """Writes JSON text beside the graphs of a TORCH_TRACE log; does nothing when tracing is off."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload
    )


def copy_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy that does not keep the graph's arguments: Dynamo drops its own references to them after a compile.

    Weights that are tensor subclasses can't be moved (`module.to`, by `swap_tensors`) while a weak reference to them exists.
    """
    import copy

    twin = copy.deepcopy(graph)
    for node in twin.nodes:
        node.meta.pop("grapharg", None)
    return twin


def copy_graph_module(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A Dynamo graph module with a graph of its own, which may get inputs that Dynamo doesn't know."""
    twin = torch.fx.GraphModule(gm, copy_graph(gm.graph))
    twin.meta = gm.meta
    for old, new in zip(gm.graph.nodes, twin.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    for name in ("compile_subgraph_reason", "_param_name_to_source", "_backend_id"):
        if hasattr(gm, name):
            setattr(twin, name, getattr(gm, name))
    return twin


def set_source(node: torch.fx.Node, name: str) -> None:
    """AOTAutograd asks each input of a Dynamo graph where it comes from."""
    from torch._dynamo.source import LocalSource

    source: Any = LocalSource(name)
    node._dynamo_source = source


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    patches: Mapping[str, Any],
    tag: str,
) -> Callable[..., Any]:
    """`compile_fx` with inductor options, and with `tag` in the key of its caches."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    merged = dict(patches)
    mine = _cache_tag_pass(tag)
    before = merged.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    merged["post_grad_custom_pre_pass"] = mine if before is None else _both(mine, before)
    compiled: Any = compile_fx(gm, example_inputs, config_patches=merged)
    return compiled  # type: ignore[no-any-return]


def _cache_tag_pass(tag: str) -> Any:
    """A pass that does nothing; its uuid is part of the keys of the FX graph cache and of AOTAutograd's."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class CacheTag(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            pass

        def uuid(self) -> str:
            return tag

    return CacheTag()


def _both(mine: Any, users: Any) -> Any:
    """The user's pass with our tag: 2.11 takes one pass only."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    passes = list(users) if isinstance(users, (list, tuple)) else [users]
    uuids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in passes]

    class TaggedPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for each in passes:
                each(graph)

        def uuid(self) -> Any:
            return None if None in uuids else repr([mine.uuid(), *uuids])

    return TaggedPass()


def without_fake_mode() -> AbstractContextManager[Any]:
    """Tensors that are made inside are real ones, whatever is being traced."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    found: AbstractContextManager[Any] = unset_fake_temporarily()
    return found


def python_dispatcher() -> AbstractContextManager[Any]:
    """As Dynamo runs operators on fake tensors: constant_pad_nd and its like take symbolic numbers in Python alone."""
    from torch._dispatch.python import enable_python_dispatcher

    found: AbstractContextManager[Any] = enable_python_dispatcher()
    return found


def size_hint(size: Any) -> int:
    """A size as a number without a guard: its hint, or a text length in place of one that depends on data."""
    if isinstance(size, int):
        return size
    if size.node.has_hint():
        return int(size.node.hint)
    expr = size.node.expr
    return int(expr.subs(dict.fromkeys(expr.free_symbols, 256)))
