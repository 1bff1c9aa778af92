"""How pipelines run a compiled model: guidance, autocast, copies, adapters, CUDA graphs. Cells as in test_combinations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sta_compile
from sta_compile import _torch
from tests.end_to_end.combinations.adapters import add_lora
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES, Case
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, TinyVideo, valid

GRID = (3, 6, 8)
OPTIONS = {"window": (1, 3, 3), "tile": (1, 2, 2), "min_tokens": 0, "noise": "0..1000"}

pytestmark = pytest.mark.filterwarnings("ignore:sta. ")


def masked(model: nn.Module, sites: tuple[str, ...], inputs: dict[str, Any]) -> Tensor:
    """What the definition says of a clean step, by the eager model."""
    with Oracle(model, sites, window_mask(GRID, (3, 3, 4), (1, 3, 3))) as oracle:
        (out,) = model.forward(**inputs)
    assert oracle.calls == len(sites)
    return out


def check(case: Case, inputs: dict[str, Any], tolerance: float = 1e-5) -> Tensor:
    (out,) = case.model(**inputs)
    assert relative_error(out, masked(case.model, case.sites, inputs)) < tolerance
    return out


def replaced() -> list[Any]:
    sites = [site for report in sta_compile.reports() for site in report.replaced]
    assert {site.grid for site in sites} == {GRID}
    return sites


@pytest.fixture
def wan(stages_only: None) -> Case:
    return FAMILIES["wan"].case(1, GRID)


def test_a_batch_with_and_without_a_prompt(stages_only: None) -> None:
    """Guidance in one call: both samples have the same step, and prompts of their own lengths."""
    case = FAMILIES["hunyuan"].case(2, GRID)
    inputs = {**case.inputs, "encoder_attention_mask": valid(7, 1, of=7).long()}
    names = list(case.model.state_dict())
    sta_compile.compile(case.model, **OPTIONS)
    check(case, inputs)
    replaced()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for level, lengths in ((980.0, (7, 1)), (900.0, (3, 5)), (400.0, (7, 7))):
            step = {**case.at(level, level), "encoder_attention_mask": valid(*lengths, of=7).long()}
            (out,) = case.model(**step)
            if level < 950:
                assert relative_error(out, masked(case.model, case.sites, step)) < 1e-5
            else:
                assert relative_error(out, case.model.forward(**step)[0]) < 1e-5
    assert list(case.model.state_dict()) == names


def test_two_calls_in_each_step(wan: Case) -> None:
    """Guidance one prompt after the other, of other lengths: compiled twice, the second time for any length."""
    sta_compile.compile(wan.model, **OPTIONS)
    lengths = (7, 5, 9)
    prompts = [torch.randn(1, n, wan.inputs["encoder_hidden_states"].shape[2]) for n in lengths]
    for level in (900.0, 500.0):
        for prompt in prompts[:2]:
            check(wan, {**wan.at(level), "encoder_hidden_states": prompt})
    replaced()
    assert len(sta_compile.reports()) == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        for prompt in prompts:
            check(wan, {**wan.at(300.0), "encoder_hidden_states": prompt})


def test_autocast_with_norms_in_fp32(wan: Case) -> None:
    """Products are of bf16, norms and rope of fp32, and the operator gets what attention got."""
    names = list(wan.model.state_dict())
    sta_compile.compile(wan.model, **OPTIONS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(wan, wan.inputs, tolerance=2e-2)
        with torch._dynamo.config.patch(error_on_recompile=True):
            check(wan, wan.at(300.0), tolerance=2e-2)
    replaced()
    check(wan, wan.inputs)  # without autocast it is another graph
    assert len(sta_compile.reports()) == 2
    assert list(wan.model.state_dict()) == names


@pytest.mark.parametrize("when", ["before the compile", "after it"])
def test_a_copy_is_a_model_of_its_own(wan: Case, when: str) -> None:
    """Copies share code with the first model, and neither weights nor what is known of it."""
    if when == "after it":
        sta_compile.compile(wan.model, **OPTIONS)
        check(wan, wan.inputs)
    twin = copy.deepcopy(wan.model)
    assert twin._compiled_call_impl is None
    sta_compile.compile(wan.model, **OPTIONS)
    sta_compile.compile(twin, **{**OPTIONS, "noise": "1000..0"})
    for parameter in twin.parameters():
        parameter.mul_(1.1)
    check(wan, wan.inputs)
    replaced()
    (out,) = twin(**wan.at(500.0))
    assert relative_error(out, masked(twin, wan.sites, wan.at(500.0))) < 1e-5
    noisy = wan.at(20.0)
    assert relative_error(twin(**noisy)[0], twin.forward(**noisy)[0]) < 1e-5
    check(wan, noisy)
    assert list(twin.state_dict()) == list(wan.model.state_dict())


@pytest.mark.parametrize("when", ["before the compile", "after it"])
def test_lora(wan: Case, when: str) -> None:
    """An adapter that comes after the compile is compiled for once, and restoring leaves it."""
    if when == "before the compile":
        add_lora(wan.model)
    sta_compile.compile(wan.model, **OPTIONS)
    before = check(wan, wan.inputs)
    if when == "after it":
        add_lora(wan.model)
        assert relative_error(check(wan, wan.inputs), before) > 1e-3
    replaced()
    names = list(wan.model.state_dict())
    with torch._dynamo.config.patch(error_on_recompile=True):
        check(wan, wan.at(300.0))
    sta_compile.restore(wan.model)
    assert list(wan.model.state_dict()) == names


@torch.no_grad()
def test_reduce_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor is asked for CUDA graphs, and does on a CPU what it does without them."""
    asked = []
    compile_with_inductor = _torch.compile_with_inductor
    monkeypatch.setattr(
        _torch,
        "compile_with_inductor",
        lambda gm, inputs, **more: asked.append(more) or compile_with_inductor(gm, inputs, **more),
    )
    model = TinyVideo()
    names = list(model.state_dict())
    options = {**OPTIONS, "noise": "auto", "dense_above": None}
    sta_compile.compile(model, mode="reduce-overhead", **options)
    first, second = (torch.randn(1, CHANNELS, *GRID) for _ in range(2))
    kept = model(first)
    with torch._dynamo.config.patch(error_on_recompile=True):
        model(second)
    (given,) = asked
    assert given["patches"]["triton.cudagraphs"]
    replaced()
    with Oracle(model, model.sites, window_mask(GRID, (3, 3, 4), (1, 3, 3))):
        assert relative_error(kept, model.forward(first)) < 1e-5
    assert list(model.state_dict()) == names
