"""A noise level and the timestep that stands for it.

    convention  model                    timestep of a run       level
    0..1000     Wan, HunyuanVideo, ...   1000 falling to 0       t / 1000
    0..1        FLUX, Qwen-Image         1 falling to 0          t
    1000..0     Mochi                    0 rising to 1000        1 - t / 1000
    1..0        Lumina2, Z-Image         0 rising to 1           1 - t
    log_sigma   Cosmos 1                 0.25 * log(sigma)       sigma / (1 + sigma)

Level 0 is a clean video, 1 is pure noise. The level is monotone in the timestep, so `level > 0.95` is asked as one
comparison of the timestep with a number that is computed here: `t > 950` for 0..1000, `t < 0.05` for 1..0. No arithmetic
in the graph means no rounding that depends on the device (inductor turns a division into a product): eager, inductor
and a list made in advance always agree.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Convention:
    """How a timestep maps to a noise level. `clean` and `noise` are the timesteps at levels 0 and 1 (form "linear")."""

    name: str  # as option `noise` takes it
    clean: float = 0.0
    noise: float = 1.0
    form: Literal["linear", "log_sigma", "function"] = "linear"
    function: Callable[[Any], Any] | None = field(default=None, repr=False)
    evidence: str = ""

    @property
    def rising(self) -> bool:
        """Does the timestep rise while the noise falls?"""
        return self.form == "linear" and self.noise < self.clean

    def timestep_at(self, level: float) -> float:
        """The timestep that has this noise level; for a function the level itself, which is what it returns."""
        if self.form == "linear":
            return self.clean + level * (self.noise - self.clean)
        if self.form == "log_sigma":
            if level <= 0.0 or level >= 1.0:
                return -math.inf if level <= 0.0 else math.inf
            return 0.25 * math.log(level / (1.0 - level))
        return level


@dataclass(frozen=True)
class UnknownConvention:
    """Nothing safe can be said; `hint` names the option and the value that settle it."""

    reason: str
    hint: str
    value: float | None = None  # the first call's timestep, where it could be read

    @property
    def message(self) -> str:
        return f"{self.reason}, so every step stays dense: {self.hint}"


@dataclass(frozen=True)
class Comparison:
    """One test that makes a step dense: timestep (or a function's level) above or below a float32 number."""

    above: bool
    value: float

    def holds(self, timestep: float) -> bool:
        return timestep > self.value if self.above else timestep < self.value


def float32(value: float) -> float:
    """The nearest float32, so that Python and the graph compare with the same number."""
    if math.isinf(value):
        return value
    return float(struct.unpack("f", struct.pack("f", value))[0])


def comparisons(
    convention: Convention, dense_above: float | None, dense_below: float
) -> tuple[Comparison, ...]:
    """The tests of which one must hold for a dense step; none: no step is dense.

    Example: 0..1000 with dense_above 0.95 -> (timestep > 950,); 1000..0 -> (timestep < 50,)
    """
    tests = []
    if dense_above is not None:
        limit = float32(convention.timestep_at(dense_above))
        tests.append(Comparison(not convention.rising, limit))
    if dense_below > 0.0:
        limit = float32(convention.timestep_at(dense_below))
        tests.append(Comparison(convention.rising, limit))
    return tuple(tests)


def has_dense_steps(dense_above: float | None, dense_below: float) -> bool:
    """Do these options ask for dense steps at all? No noise level is above 1."""
    return (dense_above is not None and dense_above < 1.0) or dense_below > 0.0
