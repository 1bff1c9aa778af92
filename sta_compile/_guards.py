"""Makes compiled code follow `sta_compile.config`: a Dynamo guard on the values that a compile has used.

A call whose config differs from the one that its code was compiled with compiles again (or finds the code of an earlier
compile with that config), as it does for a tensor of another shape.

Private torch APIs, tested on 2.11 and 2.13: TracingContext.guards_context, Guard with a create_fn of one's own, and
RootGuardManager.add_lambda_guard, which takes the user's stack as a third argument from 2.12 on. A guard on a source
(`ImportSource`, EQUALS_MATCH) would do as well, but it brings an ID_MATCH, which caching_precompile can't store.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from . import config


def install_config_guard(names: Iterable[str]) -> bool:
    """Guards the graph that is being compiled on the config's values of `names`; False if none is being compiled.

    Call it inside a backend: guards are collected until the backend has returned.
    """
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard, TracingContext

    context = TracingContext.try_get()
    if context is None:
        return False
    guarded = tuple(names)
    create = partial(_config_guard, names=guarded, values=config.snapshot(guarded))
    context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), create))
    return True


def _config_guard(
    builder: Any, guard: Any, names: tuple[str, ...], values: tuple[Any, ...]
) -> None:
    """A Guard's create_fn: at module level and made of plain values, so that it can be pickled."""

    def unchanged(_: Any) -> bool:
        return config.snapshot(names) == values

    text = [f"sta_compile.config is unchanged ({', '.join(names)})"]
    add = builder.guard_manager.root.add_lambda_guard
    try:
        add(unchanged, text, guard.user_stack)
    except TypeError:
        add(unchanged, text)
