"""Which steps stay dense: the timestep of a graph, or of the call around it, its noise convention, and what is said."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode

from . import _torch
from .analysis.find_timestep import NoTimestep, TimestepFact, find_timestep
from .analysis.first_call import ConventionMemory, first_value, largest_value
from .analysis.graph_view import GraphView
from .errors import InvalidOptionError
from .ir.noise_level import Convention, UnknownConvention, has_dense_steps
from .planning.noise import decide_convention
from .planning.scheduler_convention import convention_of_schedule
from .report import NoiseReport
from .rewriting.insert_dense import insert_dense
from .settings import Settings

if TYPE_CHECKING:
    from .model_call import ModelCall

conventions = ConventionMemory()


@dataclass(frozen=True, eq=False)
class NoisePlan:
    """needed: can any step be dense? convention: None where there is no timestep to interpret.

    of_call: the graph has no timestep, and takes the flags of the call around it as an input.
    """

    needed: bool
    timestep: TimestepFact | NoTimestep | None = None
    convention: Convention | UnknownConvention | None = None
    of_call: bool = False

    @property
    def fact(self) -> TimestepFact | None:
        return self.timestep if isinstance(self.timestep, TimestepFact) else None

    def report(self) -> NoiseReport:
        if not self.needed:
            return NoiseReport(needed=False)
        if isinstance(self.timestep, NoTimestep) and not self.of_call:
            return NoiseReport(evidence=self.timestep.message)
        name = self.fact.name if self.fact is not None else "of the model"
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
    call: ModelCall | None = None,
) -> NoisePlan:
    """The plan for a graph of `model`; what its first compile inferred holds for all later ones."""
    if not has_dense_steps(settings.dense_above, settings.dense_below):
        return NoisePlan(needed=False)
    timestep = find_timestep(view, settings.timestep, _torch.names_of_positional_arguments())
    if isinstance(timestep, TimestepFact):
        value = first_value(timestep, example_inputs)
        scheduler = call.scheduler if call is not None else None
        found = _convention(model, settings, timestep.factor, value, scheduler, remember)
        return NoisePlan(True, timestep, found)
    if model is not None and _torch.is_whole_forward():
        check_timestep(model, settings.timestep)
    if call is None:
        return NoisePlan(True, timestep)
    return NoisePlan(True, timestep, convention_of_call(call, settings), of_call=True)


def check_timestep(model: torch.nn.Module, option: str) -> None:
    """Raises InvalidOptionError if option `timestep` names nothing that the model's forward takes, as far as that is known.

    What is an argument's entry, `batch["t"]`, is called by both names.
    """
    parameters = inspect.signature(type(model).forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if option == "auto" or kinds & {
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }:
        return
    names = [name for name in parameters if name != "self"]
    if not any(option == name or option.startswith(f"{name}_") for name in names):
        raise InvalidOptionError(
            f"the option timestep={option!r} names no argument of {type(model).__name__}.forward; pass one of "
            f"{', '.join(names)}"
        )


def convention_of_call(call: ModelCall, settings: Settings) -> Convention | UnknownConvention:
    """What the model's own timestep argument says; known from then on, so that it is read on the host once."""
    argument = call.argument(settings.timestep)
    if argument is None:
        return UnknownConvention(
            "the model is called without a tensor that is named a timestep",
            'pass options={"timestep": "..."} with the name of that argument',
        )
    known = conventions.recall(call.model, settings.timestep)
    value = largest_value(argument) if settings.noise == "auto" and known is None else None
    return _convention(call.model, settings, None, value, call.scheduler, remember=True)


def flags_of_call(
    call: ModelCall, settings: Settings, batch: int, device: torch.device
) -> torch.Tensor:
    """bool [batch]: which samples of a call take the full window. Nothing is read on the host once that is known."""
    timestep, convention = call.argument(settings.timestep), convention_of_call(call, settings)
    if timestep is None or not isinstance(convention, Convention):
        return torch.ones(batch, dtype=torch.bool, device=device)
    timestep = timestep.detach().to(device)
    levels = (settings.dense_above, settings.dense_below)
    compute = _flags(timestep.shape, timestep.dtype, device, convention, levels, batch)
    flags: torch.Tensor = compute(timestep)
    return flags


@lru_cache(maxsize=256)
def _flags(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    convention: Convention,
    levels: tuple[float | None, float],
    batch: int,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A graph of the same nodes that whole models get."""
    graph = torch.fx.Graph()
    node = graph.placeholder("timestep")
    with FakeTensorMode():
        node.meta["example_value"] = torch.empty(shape, dtype=dtype, device=device)
    output = graph.output(node)
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    fact = TimestepFact(node, "timestep", 0, None, "")
    flags = insert_dense(gm, fact, convention, *levels, batch, device)
    output.args = (flags,)
    gm.recompile()
    return gm


def _convention(
    model: torch.nn.Module | None,
    settings: Settings,
    factor: float | None,
    value: float | None,
    scheduler: Any,
    remember: bool,
) -> Convention | UnknownConvention:
    """Stated by an option, else as remembered, else by the scheduler, else inferred from the value.

    A model whose convention is still unknown asks its scheduler again: another step may tell.
    """
    known = None if model is None else conventions.recall(model, settings.timestep)
    if settings.noise != "auto" or isinstance(known, Convention):
        return decide_convention(settings.noise, factor, value, known)
    scheduled = None
    if scheduler is not None and value is not None:
        scheduled = convention_of_schedule(scheduler, value, factor)
    found = scheduled or decide_convention("auto", factor, value, known)
    if remember and model is not None:
        conventions.remember(model, found, settings.timestep)
        if scheduled is not None:
            conventions.settle(model, scheduled, settings.timestep)
    return found
