"""Warnings of kernels and of their cache: each text once in a process."""

from __future__ import annotations

import warnings

_said: set[str] = set()


def say(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(f"sta: {message}", RuntimeWarning, stacklevel=4)
