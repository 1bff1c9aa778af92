"""One value that a model received, beside the scheduler that was at that step, tells its noise convention."""

from __future__ import annotations

import diffusers
import pytest
import torch

from sta_compile.planning.scheduler_convention import convention_of_schedule

FLOW = diffusers.FlowMatchEulerDiscreteScheduler


def at_step(scheduler, step, **timesteps):
    """The scheduler as a pipeline has it while the model runs that step."""
    scheduler.set_timesteps(**timesteps)
    if step:
        scheduler.set_begin_index(0)
        sample = torch.zeros(1)
        for index in range(step):
            sample = scheduler.step(sample, scheduler.timesteps[index], sample).prev_sample
    return scheduler


def name(scheduler, value, factor=None):
    found = convention_of_schedule(scheduler, float(value), factor)
    return None if found is None else found.name


@pytest.mark.parametrize("step", [0, 3, 17])
@pytest.mark.parametrize("shift", [1.0, 7.0])
def test_flow_matching(step, shift):
    scheduler = at_step(FLOW(shift=shift), step, num_inference_steps=20)
    t = scheduler.timesteps[step]
    assert name(scheduler, t) == "0..1000"
    assert name(scheduler, t.bfloat16()) == "0..1000"
    if abs(t - 500) > 10:
        assert name(scheduler, t / 1000) == "0..1"  # FLUX
        assert name(scheduler, 1 - t / 1000) == "1..0"  # Lumina2, Z-Image


def test_the_middle_of_a_range_within_0_and_1_tells_no_direction():
    scheduler = at_step(FLOW(), 0, num_inference_steps=2, sigmas=[0.5, 0.2])
    assert name(scheduler, 500.0) == "0..1000"
    assert name(scheduler, 0.5) is None


def test_another_scale():
    scheduler = at_step(FLOW(num_train_timesteps=800), 0, num_inference_steps=4)
    assert name(scheduler, 800.0) == "0..800"


def test_mochi_counts_upwards():
    scheduler = FLOW(invert_sigmas=True)
    sigmas = torch.linspace(1, 0.05, 8).tolist()
    scheduler = at_step(scheduler, 0, num_inference_steps=8, sigmas=sigmas)
    assert name(scheduler, scheduler.timesteps[0]) is None  # 0 on any scale
    assert name(scheduler, scheduler.timesteps[0], factor=1.0) == "1000..0"
    assert name(scheduler, 0.0, factor=1000.0) == "1..0"
    scheduler = at_step(scheduler, 2, num_inference_steps=8, sigmas=sigmas)
    assert name(scheduler, scheduler.timesteps[2]) == "1000..0"


def test_cosmos():
    edm = at_step(
        diffusers.EDMEulerScheduler(sigma_max=80.0, sigma_min=0.02), 0, num_inference_steps=9
    )
    assert name(edm, edm.timesteps[0]) == "log_sigma"
    karras = FLOW(use_karras_sigmas=True)
    karras.set_timesteps(num_inference_steps=9)
    karras.sigmas = torch.cat([torch.logspace(2, -2, 9), torch.zeros(1)])
    karras.timesteps = karras.sigmas[:-1] * 1000
    assert name(karras, 100 / 101) == "0..1"  # Cosmos 2: sigma / (sigma + 1)


@pytest.mark.parametrize(
    "scheduler",
    [
        diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        diffusers.CogVideoXDDIMScheduler(),
        diffusers.CogVideoXDPMScheduler(),
        diffusers.DDIMScheduler(),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_other_schedulers(scheduler):
    scheduler.set_timesteps(10)
    assert name(scheduler, scheduler.timesteps[0]) == "0..1000"


def test_a_value_that_the_schedule_does_not_explain():
    scheduler = FLOW(shift=3.0)
    assert name(scheduler, 900.0) is None  # set_timesteps was not called
    scheduler.set_timesteps(20)
    assert name(scheduler, 123.0) is None
