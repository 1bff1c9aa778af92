"""Which noise convention does a model's timestep have, read from the scheduler that made it?

A pipeline hands its model the scheduler's timestep as it is, or the noise level or its complement in 0..1. The scheduler
knows the step that it is at, so one value that the model received tells which of these it was:

    the scheduler is at step 3 of 50: timestep 964.2, noise level 0.964
    model got 964.2   -> 0..1000         model got 0.964 -> 0..1         model got 0.036 -> 1..0 (Lumina2)

    Mochi's schedule rises: timestep 12.0, noise level 0.988        model got 12.0 -> 1000..0 (0 too, unless the
                                                                    graph multiplies by 1000: then 1..0)
    EDM's timestep is 0.25 * log(sigma)                             model got 1.1 -> log_sigma

Where the value fits none of them, or two (a level near the middle), the answer is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..errors import StaError
from ..ir.noise_level import Convention
from .noise import proves_unit_scale
from .noise_schedule import numbers, schedule_levels, train_steps

# bfloat16 keeps 8 bits of a timestep, and some schedulers round theirs to whole numbers.
_RELATIVE, _UNIT, _WHOLE = 2**-8, 2**-8, 0.5


def convention_of_schedule(
    scheduler: Any, value: float, factor: float | None = None
) -> Convention | None:
    """The convention by which the model received `value` at a step of the scheduler; None if it does not tell.

    factor: what the graph multiplies the timestep with before its sinusoid, where that is known.
    """
    try:
        levels = schedule_levels(scheduler)
    except StaError:
        return None
    timesteps, scale = numbers(scheduler.timesteps), train_steps(scheduler)
    rising = timesteps[0] < timesteps[-1]
    found = {
        convention.name: convention
        for step in _steps(scheduler, len(levels))
        for convention, expected, slack in _readings(timesteps[step], levels[step], scale, rising)
        if abs(value - expected) <= slack + _RELATIVE * abs(expected)
    }
    names = {c.name for c in found.values() if len(found) == 1 or (rising and c.rising)}
    if len(names) > 1:  # a schedule that rises from 0, which is 0 on any scale
        if factor is None:
            return None
        names = {name for name in names if (name == "1..0") == proves_unit_scale(factor)}
    return found[names.pop()] if len(names) == 1 else None


def _steps(scheduler: Any, count: int) -> range:
    """The step that the scheduler is at; all of them for one that keeps no count."""
    if not hasattr(scheduler, "step_index"):
        return range(count)
    step = scheduler.step_index
    if step is None:
        step = getattr(scheduler, "begin_index", None) or 0
    return range(step, step + 1) if 0 <= step < count else range(0)


def _readings(
    timestep: float, level: float, scale: float, rising: bool
) -> Iterator[tuple[Convention, float, float]]:
    """Each convention with the value that the model gets by it, and how far off rounding may put that."""
    evidence = "the scheduler's schedule"
    top = f"{scale:.12g}"
    if (
        0.0 <= timestep <= scale * 1.01
        and abs(timestep / scale - (1 - level if rising else level)) < 1e-6
    ):
        if rising:
            yield Convention(f"{top}..0", scale, 0.0, evidence=evidence), timestep, _WHOLE
        else:
            yield Convention(f"0..{top}", 0.0, scale, evidence=evidence), timestep, _WHOLE
    elif 0.0 < level < 1.0:
        log_sigma = 0.25 * math.log(level / (1.0 - level))
        if abs(timestep - log_sigma) < 1e-3:
            yield Convention("log_sigma", form="log_sigma", evidence=evidence), timestep, _UNIT
    yield Convention("0..1", 0.0, 1.0, evidence=evidence), level, _UNIT
    yield Convention("1..0", 1.0, 0.0, evidence=evidence), 1.0 - level, _UNIT
