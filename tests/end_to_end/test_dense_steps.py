"""Whole sampling schedules: real schedulers, each diffusers pipeline's timestep convention, the flags of real graphs.

For every model the timesteps of a run are made the way its pipeline makes them, the convention is decided from the
captured graph and the first of them, and the list of dense steps that the graph computes is compared with the
scheduler's own noise levels: sigma of flow matching, sigma / (1 + sigma) of EDM, the training step of DDIM.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.mochi.pipeline_mochi import linear_quadratic_schedule
from torch.fx import Node

from sta_compile.analysis.find_timestep import TimestepFact, find_timestep
from sta_compile.analysis.first_call import ConventionMemory, first_value
from sta_compile.analysis.graph_view import GraphView
from sta_compile.ir.noise_level import Convention, UnknownConvention
from sta_compile.planning.noise import decide_convention
from sta_compile.planning.noise_schedule import dense_above, dense_steps
from sta_compile.rewriting.insert_dense import insert_dense
from tests.timestep_models import captured

ABOVE = 0.95
STEPS = (4, 8, 30, 40, 50)
SHIFTS = (1.0, 3.0, 5.0, 7.0, 12.0, 17.0)
FlowMatch = diffusers.FlowMatchEulerDiscreteScheduler


@dataclass
class Run:
    """What the pipeline passes at each step, the true noise level there, and the scheduler."""

    timesteps: list[torch.Tensor]
    levels: list[float]
    scheduler: Any

    def expected(self, above: float = ABOVE) -> list[bool]:
        # Levels on the threshold itself (0.95 of 1, 0.975, 0.95, ...) carry the rounding of a float32 sigma.
        return [round(level, 6) > above for level in self.levels]


def sigmas_of(scheduler: Any) -> list[float]:
    return [float(sigma) for sigma in scheduler.sigmas[: len(scheduler.timesteps)]]


def wan_euler(steps: int, shift: float) -> Run:
    scheduler = FlowMatch(shift=shift)
    scheduler.set_timesteps(steps)
    return Run([t.expand(1) for t in scheduler.timesteps], sigmas_of(scheduler), scheduler)


def wan_unipc(steps: int, shift: float) -> Run:
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    scheduler.set_timesteps(steps)
    # Its timesteps are whole numbers: the model is told floor(1000 * sigma).
    levels = [math.floor(sigma * 1000 + 1e-3) / 1000 for sigma in sigmas_of(scheduler)]
    return Run([t.expand(1) for t in scheduler.timesteps], levels, scheduler)


def hunyuan_video(steps: int, shift: float) -> Run:
    scheduler = FlowMatch(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
    return Run([t.expand(1) for t in scheduler.timesteps], sigmas_of(scheduler), scheduler)


def dynamic(tokens: int, sigmas: Any) -> Any:
    scheduler = FlowMatch(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    scheduler.set_timesteps(sigmas=sigmas, mu=calculate_shift(tokens))
    return scheduler


def flux(steps: int, tokens: int) -> Run:
    scheduler = dynamic(tokens, np.linspace(1.0, 1 / steps, steps))
    timesteps = [t.expand(1) / 1000 for t in scheduler.timesteps]
    return Run(timesteps, sigmas_of(scheduler), scheduler)


def z_image(steps: int, shift: float) -> Run:
    scheduler = FlowMatch(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
    timesteps = [(1000 - t.expand(1)) / 1000 for t in scheduler.timesteps]
    return Run(timesteps, sigmas_of(scheduler), scheduler)


def lumina2(steps: int, tokens: int) -> Run:
    scheduler = dynamic(tokens, np.linspace(1.0, 1 / steps, steps))
    timesteps = [(1 - t / 1000).expand(1) for t in scheduler.timesteps]
    return Run(timesteps, sigmas_of(scheduler), scheduler)


def cogvideox(steps: int, scheduler: Any) -> Run:
    scheduler.set_timesteps(steps)
    # Trailing spacing counts back from 1000 in equal strides; its level is the share of training steps.
    levels = [(round(1000 - i * 1000 / steps) - 1) / 1000 for i in range(steps)]
    return Run([t.expand(1) for t in scheduler.timesteps], levels, scheduler)


def cogvideox_ddim(steps: int) -> Run:
    return cogvideox(steps, diffusers.CogVideoXDDIMScheduler(timestep_spacing="trailing"))


def cogvideox_dpm(steps: int) -> Run:
    return cogvideox(steps, diffusers.CogVideoXDPMScheduler(timestep_spacing="trailing"))


def cosmos(steps: int) -> Run:
    scheduler = diffusers.EDMEulerScheduler(sigma_min=0.002, sigma_max=80, sigma_data=0.5)
    scheduler.set_timesteps(steps)
    levels = [sigma / (1 + sigma) for sigma in sigmas_of(scheduler)]
    return Run([t.expand(1) for t in scheduler.timesteps], levels, scheduler)


def mochi(steps: int) -> Run:
    scheduler = FlowMatch(invert_sigmas=True)
    scheduler.set_timesteps(sigmas=np.array(linear_quadratic_schedule(steps, 0.025)))
    levels = [1 - sigma for sigma in sigmas_of(scheduler)]
    return Run([t.expand(1) for t in scheduler.timesteps], levels, scheduler)


@cache
def graph_of(model: str) -> tuple[TimestepFact, tuple[Any, ...]]:
    graph = captured(model, 1)
    fact = find_timestep(GraphView(graph.gm))
    assert isinstance(fact, TimestepFact)
    return fact, tuple(graph.example_inputs)


def decide(model: str, run: Run, option: Any = "auto") -> Convention | UnknownConvention:
    fact, inputs = graph_of(model)
    real = list(inputs)
    real[fact.index] = run.timesteps[0]
    return decide_convention(option, fact.factor, first_value(fact, real))


@cache
def flags_in_graph(model: str, name: str, option: Any, above: float) -> Callable[[Any], bool]:
    """The flag that the model's edited graph computes from one timestep."""
    gm = captured(model, 1).copy()
    fact = find_timestep(GraphView(gm))
    assert isinstance(fact, TimestepFact)
    convention = decide_convention(option, fact.factor, None)
    assert isinstance(convention, Convention)
    assert convention.name == name
    flags = insert_dense(gm, fact, convention, above, 0.0, 1, torch.device("cpu"))
    assert flags is not None

    def evaluate(node: Node, timestep: torch.Tensor) -> Any:
        if node is fact.node:
            return timestep
        args = torch.fx.node.map_arg(node.args, lambda n: evaluate(n, timestep))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:])
        return node.target(*args)

    return lambda timestep: evaluate(flags, timestep).item()


def executed(
    model: str, run: Run, convention: Convention, above: float = ABOVE, option: Any = None
) -> list[bool]:
    flag = flags_in_graph(model, convention.name, option or convention.name, above)
    return [flag(timestep) for timestep in run.timesteps]


def assert_dense_steps(model: str, run: Run, name: str, option: Any = "auto") -> None:
    """Graph, host and truth agree, at the default threshold and at one asked for as a number of steps."""
    convention = decide(model, run, option)
    assert isinstance(convention, Convention)
    assert convention.name == name
    flags = executed(model, run, convention)
    assert flags == run.expected()
    assert flags == dense_steps(convention, run.scheduler.timesteps, ABOVE)
    assert flags == dense_steps(convention, [float(t) for t in run.timesteps], ABOVE)
    for steps in (1, len(flags) // 3):
        above = dense_above(run.scheduler, steps=steps)
        flags = dense_steps(convention, run.scheduler.timesteps, above)
        assert flags == [i < steps for i in range(len(flags))]


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("schedule", [wan_euler, wan_unipc])
def test_wan(schedule, steps, shift):
    assert_dense_steps("wan", schedule(steps, shift), "0..1000")


def test_known_numbers_of_dense_steps():
    """Counts that are easily checked by hand: sigma = shift * s / (1 + (shift - 1) * s) > 0.95."""
    counts = {
        (steps, shift): sum(hunyuan_video(steps, shift).expected())
        for steps in (4, 50)
        for shift in (1.0, 7.0, 17.0)
    }
    assert counts == {
        (4, 1.0): 1,
        (4, 7.0): 2,
        (4, 17.0): 2,
        (50, 1.0): 3,
        (50, 7.0): 14,
        (50, 17.0): 24,
    }


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", STEPS)
def test_hunyuan_video(steps, shift):
    assert_dense_steps("hunyuan_video", hunyuan_video(steps, shift), "0..1000")


@pytest.mark.parametrize("tokens", [1024, 4096])
@pytest.mark.parametrize("steps", STEPS)
def test_flux(steps, tokens):
    assert_dense_steps("flux", flux(steps, tokens), "0..1")


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", STEPS)
def test_z_image(steps, shift):
    assert_dense_steps("z_image", z_image(steps, shift), "1..0")


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("schedule", [cogvideox_ddim, cogvideox_dpm])
def test_cogvideox(schedule, steps):
    assert_dense_steps("cogvideox", schedule(steps), "0..1000")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", SHIFTS)
def test_half_precision_moves_only_steps_on_the_threshold(shift, dtype):
    """The pipeline hands the timestep over in the latents' type; the list made in advance rounds the same way."""
    run = hunyuan_video(50, shift)
    run.timesteps = [t.to(dtype) for t in run.timesteps]
    convention = decide("hunyuan_video", run)
    assert isinstance(convention, Convention)
    flags = executed("hunyuan_video", run, convention)
    assert flags == dense_steps(convention, run.scheduler.timesteps, ABOVE, 0.0, dtype)
    for flag, dense, level in zip(flags, run.expected(), run.levels, strict=True):
        assert flag == dense or abs(level - ABOVE) <= 0.002


UNKNOWN = [
    ("cosmos", cosmos, "log_sigma", ["1.09551", '"log_sigma"', '"0..1"']),
    ("mochi", mochi, "reversed", ["timestep is 0", '"reversed"', '"1..0"']),
    ("lumina2", lambda steps: lumina2(steps, 4096), "1..0", ["timestep is 0", '"1..0"']),
]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(("model", "schedule", "option", "said"), UNKNOWN)
def test_unknown_conventions_ask_and_then_hold(model, schedule, option, said, steps):
    run = schedule(steps)
    unknown = decide(model, run)
    assert isinstance(unknown, UnknownConvention)
    assert 'options={"noise"' in unknown.message
    assert "every step stays dense" in unknown.message
    assert all(words in unknown.message for words in said)
    assert dense_steps(unknown, run.scheduler.timesteps, ABOVE) == [True] * steps
    name = "1000..0" if option == "reversed" else option
    assert_dense_steps(model, run, name, option)


def level_of_cosmos(t):
    sigma = (4 * t).exp()
    return sigma / (1 + sigma)


def test_a_function_states_what_log_sigma_does():
    run = cosmos(36)
    convention = decide("cosmos", run, level_of_cosmos)
    assert isinstance(convention, Convention)
    flags = executed("cosmos", run, convention, option=level_of_cosmos)
    assert flags == run.expected()
    assert flags == dense_steps(convention, run.scheduler.timesteps, ABOVE)


@pytest.mark.parametrize("boundary", [0.875, 0.9])
@pytest.mark.parametrize("shift", [3.0, 5.0, 8.0, 12.0])
@pytest.mark.parametrize("steps", [4, 8, 40])
def test_two_experts(steps, shift, boundary):
    """Wan 2.2: each expert judges by its own first call; the second runs no dense step, and needs no warm-up."""
    run = wan_euler(steps, shift)
    second = [t for t in run.timesteps if float(t) < boundary * 1000]
    conventions = [
        decide("wan", Run(part, [], None)) for part in (run.timesteps, second) if len(part) > 0
    ]
    for convention in conventions:
        assert isinstance(convention, Convention)
        assert convention.name == "0..1000"
    assert executed("wan", Run(second, [], None), conventions[-1]) == [False] * len(second)
    assert executed("wan", run, conventions[0]) == run.expected()


@pytest.mark.parametrize("steps", [8, 50])
def test_timesteps_per_token(steps):
    """Wan 2.2 TI2V: the given first frame is clean at every step; the noisy frames decide."""
    run = wan_unipc(steps, 5.0)
    mask = torch.ones(1, 72)
    mask[:, :24] = 0
    per_token = Run([mask * t for t in run.timesteps], run.levels, run.scheduler)
    convention = decide("wan_ti2v", per_token)
    assert isinstance(convention, Convention)
    assert executed("wan_ti2v", per_token, convention) == run.expected()


def test_recompile_in_mid_run_keeps_the_convention():
    """A second graph of a model (a longer prompt at step 20) is no first call: Mochi must not turn into 0..1000."""
    memory = ConventionMemory()
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    run = mochi(50)
    memory.remember(model, decide("mochi", run))
    fact, _ = graph_of("mochi")
    late = float(run.timesteps[45])
    assert late > 600
    kept = decide_convention("auto", fact.factor, late, memory.recall(model))
    assert isinstance(kept, UnknownConvention)
    alone = decide_convention("auto", fact.factor, late, memory.recall(other))
    assert isinstance(alone, Convention)
