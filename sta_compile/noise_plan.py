"""Which steps stay dense: the timestep input of a graph, its noise convention, and what is said of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import _torch
from .analysis.find_timestep import NoTimestep, TimestepFact, find_timestep
from .analysis.first_call import ConventionMemory, first_value
from .analysis.graph_view import GraphView
from .ir.noise_level import Convention, UnknownConvention, has_dense_steps
from .planning.noise import decide_convention
from .report import NoiseReport
from .settings import Settings

conventions = ConventionMemory()


@dataclass(frozen=True, eq=False)
class NoisePlan:
    """needed: can any step be dense? convention: None where there is no timestep to interpret."""

    needed: bool
    timestep: TimestepFact | NoTimestep | None = None
    convention: Convention | UnknownConvention | None = None

    @property
    def fact(self) -> TimestepFact | None:
        return self.timestep if isinstance(self.timestep, TimestepFact) else None

    def report(self) -> NoiseReport:
        if not self.needed:
            return NoiseReport(needed=False)
        if isinstance(self.timestep, NoTimestep):
            return NoiseReport(evidence=self.timestep.message)
        assert self.timestep is not None
        name = self.timestep.name
        if isinstance(self.convention, Convention):
            return NoiseReport(name, self.convention.name, self.convention.evidence)
        assert self.convention is not None
        return NoiseReport(name, None, self.convention.message)


def plan_noise(
    view: GraphView,
    settings: Settings,
    example_inputs: Sequence[Any],
    model: torch.nn.Module | None,
    *,
    remember: bool = True,
) -> NoisePlan:
    """The plan for a graph of `model`; what its first compile inferred holds for all later ones."""
    if not has_dense_steps(settings.dense_above, settings.dense_below):
        return NoisePlan(needed=False)
    timestep = find_timestep(view, settings.timestep, _torch.names_of_positional_arguments())
    if isinstance(timestep, NoTimestep):
        return NoisePlan(True, timestep)
    remembered = None if model is None else conventions.recall(model, settings.timestep)
    convention = decide_convention(
        settings.noise, timestep.factor, first_value(timestep, example_inputs), remembered
    )
    if remember and model is not None and settings.noise == "auto":
        conventions.remember(model, convention, settings.timestep)
    return NoisePlan(True, timestep, convention)
