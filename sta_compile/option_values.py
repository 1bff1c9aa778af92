"""How one option's value is read, from Python or from text: "18,24,24" and (18, 24, 24) are the same window.

A reader takes what a user wrote and returns the one canonical form, or raises ValueError with what the option takes.
Text is what environment variables and the command line hold; the same reader serves all sources.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

Reader = Callable[[Any], Any]

_RANGE = re.compile(r"^\s*([-+0-9.e]+?)\s*\.\.\s*([-+0-9.e]+)\s*$", re.IGNORECASE)
_NONE = ("none", "null", "")
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")
_LARGER_THAN_ANY = (1 << 20,) * 3
NOISE_WORDS = ("auto", "reversed", "log_sigma")


def triple(value: Any) -> tuple[int, int, int]:
    """(frames, rows, cols), each at least 1; "21,45,80" and "21x45x80" are read as well."""
    if isinstance(value, str):
        value = [int(part) for part in re.split(r"[x,]", value.strip("() "))]
    a, b, c = (operator.index(part) for part in value)
    if min(a, b, c) < 1:
        raise ValueError
    return (a, b, c)


def triple_or(*words: str) -> Reader:
    """A triple or one of the words."""

    def read(value: Any) -> Any:
        if isinstance(value, str) and value.strip().lower() in words:
            return value.strip().lower()
        return triple(value)

    return read


def window(value: Any) -> Any:
    """A triple, "auto" or "full"; or a list with a triple or "full" for each head, as which "18,24,24/full" is read.

    In a list "full" is a window that is larger than any grid.
    """
    if isinstance(value, str) and "/" in value:
        value = value.split("/")
    if isinstance(value, str) or all(hasattr(part, "__index__") for part in value):
        return triple_or("auto", "full")(value)
    each = map(triple_or("full"), value)
    return tuple(_LARGER_THAN_ANY if part == "full" else part for part in each)


def optional_triple(value: Any) -> tuple[int, int, int] | None:
    """A triple; None and "auto" are None."""
    if value is None or (isinstance(value, str) and value.strip().lower() in (*_NONE, "auto")):
        return None
    return triple(value)


def optional_frames(value: Any) -> tuple[int, ...] | None:
    """Frames at the start (0, 1, ...) and at the end (..., -1) of {"frames": [0, -1]}; "frames=0,-1" is read as well."""
    if value is None or (isinstance(value, str) and value.strip().lower() in _NONE):
        return None
    if isinstance(value, str):
        value = [int(part) for part in value.strip().removeprefix("frames=").split(",")]
    if isinstance(value, Mapping):
        (name,) = value
        if name != "frames":
            raise ValueError
        value = value[name]
    frames = sorted(
        {operator.index(frame) for frame in value}, key=lambda frame: (frame < 0, frame)
    )
    leading = sum(frame >= 0 for frame in frames)
    if frames != [*range(leading), *range(leading - len(frames), 0)]:
        raise ValueError
    return tuple(frames) or None


def level(value: Any) -> float:
    """A noise level in 0..1."""
    if isinstance(value, bool):
        raise ValueError
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise ValueError
    return number


def optional_level(value: Any) -> float | None:
    """A noise level in 0..1 or None."""
    if value is None or (isinstance(value, str) and value.strip().lower() in _NONE):
        return None
    return level(value)


def count(value: Any) -> int:
    """A whole number, at least 0."""
    if isinstance(value, bool):
        raise ValueError
    number = int(value) if isinstance(value, str) else operator.index(value)
    if number < 0:
        raise ValueError
    return number


def optional_number(least: float, most: float) -> Reader:
    """A number over `least`, at most `most`, or None."""

    def read(value: Any) -> float | None:
        if value is None or (isinstance(value, str) and value.strip().lower() in _NONE):
            return None
        number = float(value)
        if isinstance(value, bool) or not least < number <= most:
            raise ValueError
        return number

    return read


def price(value: Any) -> float:
    """A finite number, at least 0."""
    number = float(value)
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise ValueError
    return number


def flag(value: Any) -> bool:
    """True or False, or the words that environment variables use for them."""
    word = str(value).strip().lower()
    if isinstance(value, bool) or (isinstance(value, str) and word in (*_YES, *_NO)):
        return word in _YES
    raise ValueError


def name(value: Any) -> str:
    """A non-empty name."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


def one_of(*words: str) -> Reader:
    """One of the words."""

    def read(value: Any) -> str:
        if isinstance(value, str) and value.strip().lower() in words:
            return value.strip().lower()
        raise ValueError

    return read


def noise_range(value: Any) -> tuple[float, float] | None:
    """(a, b) of "a..b": the timestep is a at noise level 0 and b at level 1. None for any other convention."""
    found = _RANGE.match(value) if isinstance(value, str) else None
    if found is None:
        return None
    low, high = float(found[1]), float(found[2])
    if low == high or not math.isfinite(low) or not math.isfinite(high):
        raise ValueError
    return low, high


def noise(value: Any) -> str | Callable[[Any], Any]:
    """A noise convention: a word, a range "a..b" or a function of the timestep tensor."""
    if isinstance(value, str):
        span = noise_range(value)
        if span is not None:
            return f"{span[0]:.12g}..{span[1]:.12g}"
        word = value.strip().lower()
        if word in NOISE_WORDS:
            return word
    elif callable(value):
        checked: Callable[[Any], Any] = value
        return checked
    raise ValueError


def optional_path(value: Any) -> str | None:
    """A folder; "", "none" and None are None."""
    if value is None or (isinstance(value, str) and value.strip().lower() in _NONE):
        return None
    return os.fspath(value) if isinstance(value, os.PathLike) else _text(value)


def architecture(value: Any) -> str:
    """ "auto", or "sm_90" for "sm_90", "sm_90a", "90" and "9.0"."""
    text = _text(value).strip().lower()
    if text == "auto":
        return text
    found = re.fullmatch(r"(?:sm_?)?(?:(\d+)\.(\d)|(\d{2,3}))a?", text)
    if found is None:
        raise ValueError
    return f"sm_{found[3] or found[1] + found[2]}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
