"""A user's mistake as the user sees it: StaError itself, not what Dynamo wraps around errors of backends.

Dynamo passes on errors that derive from its own `ShortenTraceback` as they are, with what is below the backend only; all
others become `BackendCompilerFailed`. A StaError that leaves the backend is therefore of a class that is both.

Private torch APIs, tested on 2.11 and 2.13: torch._dynamo.exc.ShortenTraceback.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from .errors import StaError


@contextmanager
def unwrapped() -> Iterator[None]:
    """What is inside may raise StaError, and Dynamo hands it to the user."""
    try:
        yield
    except StaError as error:
        if _is_shown(type(error)):
            raise
        kind: Any = type(error)
        shown = _shown(kind)(str(error), first_useful_frame=inspect.currentframe())
        raise shown.with_traceback(error.__traceback__) from error.__cause__


def _is_shown(kind: type) -> bool:
    from torch._dynamo.exc import ShortenTraceback

    return issubclass(kind, ShortenTraceback)


@lru_cache(maxsize=16)
def _shown(kind: type) -> Any:
    from torch._dynamo.exc import ShortenTraceback

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (ShortenTraceback, kind), names)
