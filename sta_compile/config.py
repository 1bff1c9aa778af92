"""Process-wide defaults for every option: `sta_compile.config.window = (18, 24, 24)`.

Names, types and defaults are those of `settings.py`; a value is checked when it is set. `options={...}` of
`torch.compile` beat these, these beat `STA_*` variables. A compiled model follows a change: it compiles again. Where
kernels are kept and what compiles them (`cache_dir`, `compiler`, `target`) can be set here and in the environment only.

    sta_compile.config.window = "full"                       from here on, in every thread
    with sta_compile.config.patch(window=(18, 24, 24)):      in this thread (or task) only
        model(x)
    del sta_compile.config.window                            back to the environment or the default

torch's own config module is not used: what it holds is per thread, so a compile in a worker thread would not see what
the main thread has set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MappingProxyType, ModuleType
from typing import Any

from .settings import OPTIONS, PROCESS_OPTIONS, env_name, read_option, unknown_option

_ALL = OPTIONS | PROCESS_OPTIONS
_process: dict[str, Any] = {}
_patched: ContextVar[MappingProxyType[str, Any]] = ContextVar(
    "sta_compile.config", default=MappingProxyType({})
)


def overrides() -> dict[str, Any]:
    """What has been set or patched of a model's options; defaults and environment are not in it."""
    values = _process | _patched.get()
    return {name: value for name, value in values.items() if name in OPTIONS}


def snapshot(names: Iterable[str]) -> tuple[Any, ...]:
    """The set or patched values of `names` (`...` where there is none), to be compared later."""
    patched = _patched.get()
    return tuple(patched.get(name, _process.get(name, ...)) for name in names)


def patch(**values: Any) -> AbstractContextManager[None]:
    """Sets options inside a `with` block or a decorated function, for this thread or task."""
    return _patch(_checked(values))


@contextmanager
def _patch(values: dict[str, Any]) -> Iterator[None]:
    token = _patched.set(MappingProxyType({**_patched.get(), **values}))
    try:
        yield
    finally:
        _patched.reset(token)


def token_grid(frames: Any, rows: Any = None, cols: Any = None) -> AbstractContextManager[None]:
    """`with sta_compile.token_grid(21, 45, 80): model(x)` declares the grid of video tokens; so does token_grid("21x45x80").

    Raises StaError for what is no grid.
    """
    return patch(grid=frames if rows is None and cols is None else (frames, rows, cols))


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    for name in values:
        if name not in _ALL:
            raise unknown_option(name, list(_ALL))
    return {name: read_option(name, value, "sta_compile.config") for name, value in values.items()}


def __getattr__(name: str) -> Any:
    if name not in _ALL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    values = _process | _patched.get()
    if name in values:
        return values[name]
    text = os.environ.get(env_name(name), "").strip()
    return read_option(name, text, "environment") if text else _ALL[name].default


def __dir__() -> list[str]:
    return [*_ALL, "overrides", "patch", "snapshot", "token_grid"]


class _Config(ModuleType):
    """This module's class: checks assignments."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            _process.update(_checked({name: value}))

    def __delattr__(self, name: str) -> None:
        if name not in _ALL:
            raise unknown_option(name, list(_ALL))
        _process.pop(name, None)


sys.modules[__name__].__class__ = _Config
