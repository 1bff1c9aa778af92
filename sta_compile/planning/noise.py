"""What does a timestep say about noise?

A `Convention` turns a model's timestep input into a noise level: 0 is a clean video, 1 is pure noise. Most graphs show
neither its scale nor its direction, so a convention comes from the option `noise`, or is inferred from what the graph
proves and from the first call; where that leaves a doubt it is an `UnknownConvention`, and every step stays dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..errors import InvalidOptionError
from ..ir.noise_level import Convention, UnknownConvention

# A factor before the sinusoid that says "the timestep runs over 0..1 and is brought to 0..1000 here".
_UNIT_SCALE_FACTOR = 1000.0
# Around the middle of the scale the first value says nothing about the direction.
_UNSURE = 0.05
# Schedulers add a little above their scale, and half precision rounds: 1000.0 -> 1000, 0.9995 -> 1.
_SLACK = 0.01
# Up to here a value can be the start of 0..1 (1), 1..0 (0), 1000..0 (0) or log_sigma (0.25 * log(200) = 1.32).
_SMALL = 1.5
# The scale of all timesteps that are not small.
_LARGEST = 1000.0


def _linear(clean: float, noise: float, evidence: str) -> Convention:
    return Convention(f"{clean:.12g}..{noise:.12g}", clean, noise, evidence=evidence)


def _span(option: str) -> tuple[float, float] | None:
    low, dots, high = option.partition("..")
    if not dots:
        return None
    try:
        span = (float(low), float(high))
    except ValueError:
        return None
    return span if all(map(math.isfinite, span)) and span[0] != span[1] else None


def parse_noise(
    option: str | Callable[[Any], Any], factor: float | None = None
) -> Convention | None:
    """The convention that the option `noise` states; None for "auto".

    factor: what the graph multiplies the timestep with before its sinusoid; 1000 makes "reversed" run over 0..1.
    """
    evidence = "option noise"
    if callable(option):
        name = getattr(option, "__qualname__", type(option).__name__)
        return Convention(name, form="function", function=option, evidence=evidence)
    word = option.strip().lower() if isinstance(option, str) else ""
    if word == "auto":
        return None
    if word == "log_sigma":
        return Convention("log_sigma", form="log_sigma", evidence=evidence)
    if word == "reversed":
        if proves_unit_scale(factor):
            return _linear(1.0, 0.0, f"{evidence}; the graph multiplies the timestep by 1000")
        return _linear(1000.0, 0.0, evidence)
    span = _span(word)
    if span is not None:
        return _linear(*span, evidence)
    raise InvalidOptionError(
        f"noise={option!r} is no noise convention; pass \"auto\", a range 'A..B' (the timestep is A for a clean video "
        'and B for pure noise, for example "0..1000"), "reversed", "log_sigma", or a function of the timestep tensor'
    )


def proves_unit_scale(factor: float | None) -> bool:
    """Does a factor before the sinusoid say that the timestep runs over 0..1?"""
    return factor is not None and math.isclose(factor, _UNIT_SCALE_FACTOR, rel_tol=1e-3)


def infer_convention(
    factor: float | None, first_value: float | None
) -> Convention | UnknownConvention:
    """The convention behind `noise="auto"`, from the graph's factor and the timestep of the first call.

    A run starts at its noisiest step. With a proved scale of 0..1 the half in which it starts tells the direction. With
    no proved scale only a value above the middle of 0..1000 is beyond doubt (a second expert that starts at 860 and a
    video-to-video run at 800 included): 0 starts Mochi (0 to 1000) and Lumina2 (0 to 1), 1 may be Cosmos 1 or 2, and
    300 is a run of either direction that starts in the middle.
    """
    if first_value is None or not math.isfinite(first_value):
        return UnknownConvention(
            "the value of the first timestep can't be read",
            'pass options={"noise": "0..1000"} if the timestep falls from 1000 to 0, '
            '"0..1" from 1 to 0, "reversed" if it rises',
        )
    shown = f"{first_value:.6g}"
    if proves_unit_scale(factor):
        return _infer_on_unit_scale(first_value, shown)
    if first_value < -_SLACK or first_value > _LARGEST * (1 + _SLACK):
        return UnknownConvention(
            f"the first timestep is {shown}, which no known scale has",
            'pass options={"noise": "A..B"}, A being the timestep of a clean video and B of pure noise',
            first_value,
        )
    if first_value <= _SMALL:
        return _too_small(first_value, shown)
    if first_value > (0.5 + _UNSURE) * _LARGEST:
        return _linear(0.0, _LARGEST, f"the first timestep is {shown}: falling from 1000")
    return UnknownConvention(
        f"the first timestep is {shown}, in the lower half or the middle of 0..1000, where no run starts",
        'pass options={"noise": "0..1000"} if 1000 is pure noise, "reversed" if 0 is, or make the '
        "first call with the first timestep of a run",
        first_value,
    )


def _infer_on_unit_scale(value: float, shown: str) -> Convention | UnknownConvention:
    proof = "the graph multiplies the timestep by 1000"
    if not -_SLACK <= value <= 1 + _SLACK:
        return UnknownConvention(
            f"{proof}, so it should run over 0..1, but the first one is {shown}",
            'pass options={"noise": "A..B"}, A being the timestep of a clean video and B of pure noise',
            value,
        )
    if abs(value - 0.5) <= _UNSURE:
        return UnknownConvention(
            f"{proof}, but the first one is {shown}, in the middle of 0..1, which tells no direction",
            'pass options={"noise": "0..1"} if 1 is pure noise, "reversed" if 0 is',
            value,
        )
    if value > 0.5:
        return _linear(0.0, 1.0, f"{proof}, and the first one is {shown}: falling from 1")
    return _linear(1.0, 0.0, f"{proof}, and the first one is {shown}: rising from 0")


def _too_small(value: float, shown: str) -> UnknownConvention:
    if value < 0.5:
        hint = (
            'pass options={"noise": "reversed"} if the timestep rises from 0 to 1000 (as in Mochi), '
            '"1..0" if it rises from 0 to 1 (Lumina2), "0..1" or "0..1000" if it falls'
        )
    else:
        hint = (
            'pass options={"noise": "0..1"} if the timestep falls from 1 to 0 (as in Cosmos 2), '
            '"log_sigma" if it is 0.25 * log(sigma) (Cosmos 1), "1..0" or "reversed" if it rises'
        )
    return UnknownConvention(
        f"the first timestep is {shown}, which fits several scales", hint, value
    )


def decide_convention(
    option: str | Callable[[Any], Any],
    factor: float | None,
    first_value: float | None,
    remembered: Convention | UnknownConvention | None = None,
) -> Convention | UnknownConvention:
    """What the option states, else what an earlier graph of the model found, else what can be inferred."""
    stated = parse_noise(option, factor)
    if stated is not None:
        return stated
    return remembered if remembered is not None else infer_convention(factor, first_value)
