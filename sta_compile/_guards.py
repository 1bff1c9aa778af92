"""Makes compiled code follow what it was compiled for and Dynamo does not know of: a guard of our own on each.

    config       the values of `sta_compile.config` that the compile used
    grids        what earlier graphs of the same call prove about token counts (`model_call`)
    convention   what the model's timestep says about noise, where the compile inferred it: models of one class that are
                 compiled with equal options share Dynamo's code

A call for which one of them differs from the compile's compiles again (or finds the code of an earlier compile that
fits), as it does for a tensor of another shape.

Private torch APIs, tested on 2.11 and 2.13: TracingContext.guards_context, Guard with a create_fn of one's own, and
RootGuardManager.add_lambda_guard, which takes the user's stack as a third argument from 2.12 on. A guard on a source
(`ImportSource`, EQUALS_MATCH) would do as well, but it brings an ID_MATCH, which caching_precompile can't store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from . import config, model_call
from .noise_plan import conventions


def install_config_guard(names: Iterable[str]) -> bool:
    """Guards the graph that is being compiled on the config's values of `names`; False if none is being compiled.

    Call it inside a backend: guards are collected until the backend has returned.
    """
    names = tuple(names)
    text = f"sta_compile.config is unchanged ({', '.join(names)})"
    return _install(partial(config.snapshot, names), text)


def install_grids_guard(asked: Iterable[int], declared: int) -> bool:
    """Guards on what the current call, if there is one, knows of these numbers of tokens; `declared` is one of an option."""
    read = partial(model_call.known_grids, frozenset(asked), declared)
    return _install(read, "the grids of this call's token counts are unchanged")


def install_convention_guard(timestep: str) -> bool:
    """Guards on the noise convention that is remembered for the model, with this value of the option `timestep`."""
    return _install(partial(_convention, timestep), "the model's noise convention is unchanged")


def _convention(timestep: str) -> Any:
    model = model_call.root_module()
    return None if model is None else conventions.recall(model, timestep)


def _install(read: Callable[[], Any], text: str) -> bool:
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard, TracingContext

    context = TracingContext.try_get()
    if context is None:
        return False
    create = partial(_equality_guard, read=read, value=read(), text=text)
    context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), create))
    return True


def _equality_guard(
    builder: Any, guard: Any, read: Callable[[], Any], value: Any, text: str
) -> None:
    """A Guard's create_fn: at module level and made of plain values, so that it can be pickled."""

    def unchanged(_: Any) -> bool:
        return bool(read() == value)

    add = builder.guard_manager.root.add_lambda_guard
    try:
        add(unchanged, [text], guard.user_stack)
    except TypeError:
        add(unchanged, [text])
