"""What a timestep says about noise: stated, inferred or unknown, and the comparisons that follow from it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sta_compile.errors import InvalidOptionError, StaError
from sta_compile.ir.noise_level import Comparison, Convention, UnknownConvention, comparisons
from sta_compile.planning.noise import decide_convention, infer_convention, parse_noise
from sta_compile.planning.noise_schedule import dense_above, dense_steps


def stated(option, factor=None) -> Convention:
    convention = parse_noise(option, factor)
    assert convention is not None
    return convention


@pytest.mark.parametrize(
    ("option", "factor", "name", "level_25"),
    [
        ("0..1000", None, "0..1000", 250.0),
        ("0..1", 1000.0, "0..1", 0.25),
        ("1..0", None, "1..0", 0.75),
        ("1000..0", 1.0, "1000..0", 750.0),
        ("-1.5..3", None, "-1.5..3", -0.375),
        (" 0 .. 1000 ", None, "0..1000", 250.0),
        ("reversed", None, "1000..0", 750.0),
        ("reversed", 1.0, "1000..0", 750.0),
        ("reversed", 1000.0, "1..0", 0.75),
        ("log_sigma", None, "log_sigma", 0.25 * math.log(1 / 3)),
    ],
)
def test_stated(option, factor, name, level_25):
    convention = stated(option, factor)
    assert convention.name == name
    assert convention.timestep_at(0.25) == pytest.approx(level_25)
    assert convention.evidence.startswith("option noise")


def test_auto_states_nothing():
    assert parse_noise("auto") is None


@pytest.mark.parametrize("option", ["", "0", "1..1", "0..nan", "0..inf", "a..b", "sigma", 3, None])
def test_wrong_options_say_what_to_pass(option):
    with pytest.raises(InvalidOptionError, match=r"pass \"auto\", a range 'A..B'"):
        parse_noise(option)


def test_a_function_is_named():
    def my_level(t):
        return t / 500

    assert stated(my_level).name.endswith("my_level")
    assert stated(my_level).form == "function"


@pytest.mark.parametrize(
    ("model", "factor", "first", "name"),
    [
        ("Wan, CogVideoX", 1.0, 999.0, "0..1000"),
        ("HunyuanVideo", 1.0, 1000.0, "0..1000"),
        ("no sinusoid", None, 999.0, "0..1000"),
        ("second expert of Wan 2.2", 1.0, 860.0, "0..1000"),
        ("second expert, 4 steps", 1.0, 727.0, "0..1000"),
        ("video to video, strength 0.6", 1.0, 600.0, "0..1000"),
        ("FLUX", 1000.0, 1.0, "0..1"),
        ("FLUX, bfloat16", 1000.0, 1.0039, "0..1"),
        ("FLUX img2img", 1000.0, 0.83, "0..1"),
        ("Z-Image", 1000.0, 0.0, "1..0"),
        ("Z-Image img2img", 1000.0, 0.18, "1..0"),
    ],
)
def test_inferred(model, factor, first, name):
    convention = infer_convention(factor, first)
    assert isinstance(convention, Convention), model
    assert convention.name == name
    assert f"{first:.6g}" in convention.evidence


@pytest.mark.parametrize(
    ("model", "factor", "first", "said"),
    [
        ("Mochi and Lumina2", 1.0, 0.0, ['"reversed"', '"1..0"']),
        ("Cosmos 1", 1.0, 1.0955, ['"log_sigma"', '"0..1"']),
        ("Cosmos 2", 1.0, 0.9877, ['"log_sigma"', '"0..1"']),
        ("a warm-up call of Wan at t=1", 1.0, 1.0, ['"0..1"']),
        ("the middle", 1.0, 500.0, ['"0..1000"', '"reversed"']),
        ("just inside the middle", 1.0, 550.0, ['"0..1000"', '"reversed"']),
        ("video to video, strength 0.2", 1.0, 300.0, ["middle", '"0..1000"']),
        ("FLUX img2img in the middle", 1000.0, 0.54, ['"0..1"', '"reversed"']),
        ("a factor 1000 and a scale that contradicts it", 1000.0, 999.0, ['"A..B"']),
        ("no known scale", 1.0, 80000.0, ['"A..B"']),
        ("negative", 1.0, -3.0, ['"A..B"']),
        ("fake tensors", 1.0, None, ['"0..1000"', "can't be read"]),
        ("fake tensors, direction unknown", 1000.0, None, ['"reversed"']),
        ("nan", 1.0, math.nan, ["can't be read"]),
    ],
)
def test_unknown_says_what_to_set(model, factor, first, said):
    unknown = infer_convention(factor, first)
    assert isinstance(unknown, UnknownConvention), model
    assert 'options={"noise"' in unknown.message
    assert "every step stays dense" in unknown.message
    for words in said:
        assert words in unknown.message, model


@given(st.one_of(st.none(), st.just(1.0)), st.floats(0, 1000), st.floats(0, 1000))
def test_two_starts_of_one_model_never_contradict(factor, first, second):
    """Without a proved scale, whatever call comes first, the answer is one convention or none."""
    names = {
        found.name
        for value in (first, second)
        if isinstance(found := infer_convention(factor, value), Convention)
    }
    assert names <= {"0..1000"}


def test_order_of_evidence():
    early = infer_convention(1.0, 0.0)
    assert decide_convention("auto", 1.0, 800.0, remembered=early) is early
    assert decide_convention("reversed", 1.0, 800.0, remembered=early) == stated("reversed")
    found = decide_convention("auto", 1.0, 800.0)
    assert isinstance(found, Convention)
    assert found.name == "0..1000"


def test_comparisons_are_in_units_of_the_timestep():
    assert comparisons(stated("0..1000"), 0.95, 0.0) == (Comparison(True, 950.0),)
    assert comparisons(stated("reversed"), 0.95, 0.0) == (Comparison(False, 50.0),)
    assert comparisons(stated("0..1000"), 0.95, 0.1) == (
        Comparison(True, 950.0),
        Comparison(False, 100.0),
    )
    assert comparisons(stated("0..1000"), None, 0.1) == (Comparison(False, 100.0),)
    assert comparisons(stated("0..1000"), None, 0.0) == ()
    assert comparisons(stated("log_sigma"), 0.0, 0.0) == (Comparison(True, -math.inf),)
    assert comparisons(stated("log_sigma"), 1.0, 0.0) == (Comparison(True, math.inf),)
    (test,) = comparisons(stated(lambda t: t / 7), 0.95, 0.0)
    assert test.value == pytest.approx(0.95)


@given(
    st.sampled_from(["0..1000", "0..1", "1..0", "reversed", "-2..5", "log_sigma"]),
    st.floats(0.01, 0.99),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
def test_comparisons_equal_the_definition(option, level, above, below):
    convention = stated(option)
    timestep = convention.timestep_at(level)
    if min(abs(level - above), abs(level - below)) < 1e-4:
        return  # the definition itself rounds there
    dense = any(test.holds(timestep) for test in comparisons(convention, above, below))
    assert dense == (level > above or level < below)


def test_dense_steps_of_a_list_and_of_a_tensor():
    timesteps = [999, 975, 950, 949, 100, 20]
    expected = [True, True, False, False, False, True]
    assert dense_steps(stated("0..1000"), timesteps, 0.95, 0.05) == expected
    assert dense_steps(stated("0..1000"), torch.tensor(timesteps), 0.95, 0.05) == expected
    assert dense_steps(stated(lambda t: t / 1000), timesteps, 0.95, 0.05) == expected
    assert dense_steps(stated("0..1000"), timesteps, None) == [False] * 6
    unknown = infer_convention(1.0, 0.0)
    assert dense_steps(unknown, timesteps, 0.95) == [True] * 6
    assert dense_steps(unknown, timesteps, None) == [False] * 6


def test_dense_steps_of_scheduler_timesteps_where_the_model_takes_0_to_1():
    timesteps = torch.tensor([1000.0, 960.0, 950.0, 940.0])
    assert dense_steps(stated("0..1"), timesteps, 0.95) == [True, True, False, False]
    assert dense_steps(stated("1..0"), timesteps, 0.95) == [True, True, False, False]
    assert dense_steps(stated("1..0"), [0.0, 0.04, 0.06, 1.0], 0.95) == [True, True, False, False]


def test_half_precision_rounds_like_the_pipeline():
    # bfloat16 holds 952 and 948, but not 949.9.
    assert dense_steps(stated("0..1000"), [951.0, 949.9], 0.9495) == [True, True]
    assert dense_steps(stated("0..1000"), [951.0, 949.9], 0.9495, 0.0, torch.bfloat16) == [
        True,
        False,
    ]


def scheduler(timesteps, sigmas=None, scale=1000, **more):
    config = {"num_train_timesteps": scale}
    return SimpleNamespace(timesteps=timesteps, sigmas=sigmas, config=config, **more)


def test_dense_above_lies_between_two_steps():
    falling = scheduler([1000.0, 900.0, 800.0, 100.0])
    assert dense_above(falling, steps=1) == pytest.approx(0.95)
    assert dense_above(falling, steps=2) == pytest.approx(0.85)
    assert dense_above(falling, steps=0) == 1.0
    rising = scheduler([0.0, 100.0, 200.0, 900.0])
    assert dense_above(rising, steps=1) == pytest.approx(0.95)
    edm = scheduler([1.1, 0.9, -0.3], sigmas=torch.tensor([80.0, 40.0, 0.3, 0.0]))
    assert dense_above(edm, steps=1) == pytest.approx((80 / 81 + 40 / 41) / 2)
    flow = scheduler([1.0, 0.9, 0.5], sigmas=[1.0, 0.9, 0.5, 0.0])
    assert dense_above(flow, steps=2) == pytest.approx(0.7)


def test_second_order_steps_stay_together():
    heun = scheduler([1000.0, 900.0, 900.0, 800.0, 800.0, 100.0])
    assert dense_above(heun, steps=2) == pytest.approx(0.85)
    assert dense_above(heun, steps=3) == pytest.approx(0.85)


@pytest.mark.parametrize(
    ("bad", "steps", "said"),
    [
        (scheduler(None), 2, "set_timesteps"),
        (scheduler([3.0, 2.0], num_inference_steps=None), 1, "set_timesteps"),
        (scheduler(torch.linspace(1000, 1, 1000)), 12, "set_timesteps"),
        (scheduler([1000.0, 500.0]), 2, 'window="full"'),
        (scheduler([1000.0, 500.0]), -1, "pass 0 to 1"),
        (scheduler([1000.0, 200.0, 600.0]), 1, "does not fall"),
        (scheduler([1000.0, 500.0, 500.0]), 2, "pass fewer steps"),
        (scheduler([2.0, 1.0]), 1, "no known scale"),
    ],
)
def test_dense_above_says_what_to_do(bad, steps, said):
    with pytest.raises(StaError, match=said):
        dense_above(bad, steps=steps)
