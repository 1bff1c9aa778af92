"""Which steps of a sampling schedule are dense, and which noise level makes the first N steps dense?

Both questions are answered on the host, before a run, from the numbers of a schedule: a step counter inside the
compiled model would be wrong under checkpointing, with two experts and for interleaved requests.

    timesteps 1000, 987, ..., 954, 948, ...    dense_above 0.95 -> [True, True, ..., True, False, ...]
    dense_above(scheduler, steps=12)        -> 0.951: half way between the levels of steps 12 and 13
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import StaError
from ..ir.noise_level import Convention, UnknownConvention, comparisons, has_dense_steps

if TYPE_CHECKING:
    import torch

# A scheduler's timesteps run over 0..1000 (num_train_timesteps) where some pipelines give the model a part of it.
_SCHEDULER_SCALE = 1000.0
# 0.25 * log(sigma) stays below this for every sigma that float16 holds; timesteps over 0..1 do anyway.
_LARGEST_SMALL_TIMESTEP = 3.0


def numbers(values: Any) -> list[float]:
    """The numbers of a vector, an array or a sequence of numbers or of scalar tensors."""
    return [float(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]


def dense_steps(
    convention: Convention | UnknownConvention,
    timesteps: torch.Tensor | Iterable[Any],
    dense_above: float | None,
    dense_below: float = 0.0,
    dtype: torch.dtype | None = None,
) -> list[bool]:
    """For each step, whether the compiled model runs it dense: the same comparisons in float32 as in the graph.

    timesteps: what the model receives, or a scheduler's own 0..1000 where the model takes a range within 0..1.
    dtype: the type in which the pipeline hands the timestep over (bfloat16 rounds 949.6 to 948); None is float32.
    """
    import torch

    values = numbers(timesteps)
    if not has_dense_steps(dense_above, dense_below):
        return [False] * len(values)
    if isinstance(convention, UnknownConvention):
        return [True] * len(values)
    given = torch.tensor(values, dtype=torch.float32).to(dtype or torch.float32)
    seen = _as_the_model_sees(convention, given).to(torch.float32)
    if convention.function is not None:
        seen = convention.function(seen).to(torch.float32)
    tests = comparisons(convention, dense_above, dense_below)
    return [any(test.holds(value) for test in tests) for value in seen.tolist()]


def _as_the_model_sees(convention: Convention, values: torch.Tensor) -> torch.Tensor:
    """Scheduler timesteps over 0..1000 become the model's range within 0..1: t/1000 or 1 - t/1000, as pipelines do."""
    unit = convention.form == "linear" and {convention.clean, convention.noise} == {0.0, 1.0}
    if not unit or len(values) == 0 or float(values.max()) <= _LARGEST_SMALL_TIMESTEP:
        return values
    levels = values / _SCHEDULER_SCALE
    return 1 - levels if convention.rising else levels


def dense_above(scheduler: Any, steps: int = 12) -> float:
    """The option `dense_above` that makes the first `steps` steps of a diffusers scheduler dense.

    The scheduler's `set_timesteps` must have been called the way the pipeline calls it (same number of steps, shift or
    `mu`): a threshold says how much noise, and how many steps lie above it depends on the schedule. Steps that share a
    level (second-order schedulers) stay together: at least `steps` are dense. `steps=0` gives 1.0, no dense step.

        pipe.scheduler.set_timesteps(50)
        pipe.transformer.compile(backend="sta", options={"dense_above": dense_above(pipe.scheduler, steps=12)})
    """
    levels = schedule_levels(scheduler)
    if isinstance(steps, bool) or not hasattr(type(steps), "__index__"):
        raise StaError(
            f"dense_above(steps={steps!r}) is no number of steps; pass 0 to {len(levels) - 1}"
        )
    if steps < 0 or steps >= len(levels):
        raise StaError(
            f"dense_above(steps={steps}) does not fit a schedule of {len(levels)} steps; "
            f'pass 0 to {len(levels) - 1}, or window="full" to keep every step dense'
        )
    if any(later > sooner + 1e-6 for sooner, later in pairwise(levels)):
        raise StaError(
            f"the noise of {type(scheduler).__name__} does not fall from step to step, so no level "
            "separates its first steps; pass dense_above as a noise level in 0..1"
        )
    if steps == 0:
        return 1.0
    last_dense = levels[steps - 1]
    lower = [level for level in levels[steps:] if level < last_dense - 1e-6]
    if not lower:
        raise StaError(
            f"all steps from number {steps} on have the same noise level {last_dense:.4g}; "
            'pass fewer steps, or window="full" to keep every step dense'
        )
    return (last_dense + lower[0]) / 2


def schedule_levels(scheduler: Any) -> list[float]:
    """The noise level of each step in 0..1, as the conventions of `noise="auto"` and "log_sigma" see it.

    Raises StaError for a scheduler without a schedule, or with one on no known scale.
    """
    name = type(scheduler).__name__
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or getattr(scheduler, "num_inference_steps", 0) is None:
        raise StaError(
            f"{name} has no timesteps yet; call its set_timesteps(number_of_steps) first"
        )
    values = numbers(timesteps)
    scale = train_steps(scheduler)
    if len(values) < 2 or (not hasattr(scheduler, "num_inference_steps") and len(values) == scale):
        raise StaError(f"{name} has no schedule yet; call its set_timesteps(number_of_steps) first")
    if min(values) >= 0.0 and _LARGEST_SMALL_TIMESTEP < max(values) <= scale * 1.01:
        return _falling([value / scale for value in values])
    return _levels_of_sigmas(scheduler, name, len(values))


def _levels_of_sigmas(scheduler: Any, name: str, steps: int) -> list[float]:
    """Levels of schedules whose timesteps are not over 0..1000: EDM's 0.25 * log(sigma), or sigmas over 0..1."""
    sigmas = getattr(scheduler, "sigmas", None)
    values = numbers(sigmas)[:steps] if sigmas is not None else []
    if len(values) < steps or min(values) < 0.0:
        raise StaError(
            f"the timesteps of {name} are on no known scale and it has no sigmas; "
            "pass dense_above as a noise level in 0..1"
        )
    if max(values) > 1.01:
        return [sigma / (1 + sigma) for sigma in values]
    return _falling(values)


def _falling(levels: list[float]) -> list[float]:
    """Levels of a scheduler that counts upwards (Mochi inverts its sigmas) are turned round."""
    return levels if levels[0] >= levels[-1] else [1 - level for level in levels]


def train_steps(scheduler: Any) -> float:
    """The top of the scale that a scheduler's timesteps run over."""
    config = getattr(scheduler, "config", None)
    if isinstance(config, dict):
        return float(config.get("num_train_timesteps", _SCHEDULER_SCALE))
    return float(getattr(config, "num_train_timesteps", _SCHEDULER_SCALE))
