"""Errors that a user can cause. Each message says what is wrong and ends in what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


class StaError(ValueError):
    """Base of every error that sta_compile raises for a user's mistake."""


class UnknownOptionError(StaError):
    """An option name that neither sta_compile nor inductor knows."""


class InvalidOptionError(StaError):
    """A known option with a value that it does not take."""


class StrictError(StaError):
    """`strict=True` and an attention over a known token grid was not replaced."""


def needs(*packages: str) -> None:
    """Raises StaError that says what to install, where one of these is missing: only some commands and examples use them."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise StaError(f"this needs {' and '.join(missing)}; run pip install {' '.join(missing)}")


@contextmanager
def ends_in_a_line() -> Iterator[None]:
    """For programs: a user's mistake ends them with what the error says, and not with a traceback."""
    try:
        yield
    except StaError as error:
        sys.exit(f"sta_compile: {error}")
