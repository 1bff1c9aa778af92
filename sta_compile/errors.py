"""Errors that a user can cause. Each message says what is wrong and ends in what to do about it."""

from __future__ import annotations


class StaError(ValueError):
    """Base of every error that sta_compile raises for a user's mistake."""


class UnknownOptionError(StaError):
    """An option name that neither sta_compile nor inductor knows."""


class InvalidOptionError(StaError):
    """A known option with a value that it does not take."""


class StrictError(StaError):
    """`strict=True` and an attention over a known token grid was not replaced."""
