"""What inductor is given: options, modes and passes, and what `torch._dynamo.reset()` forgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass

import sta_compile
from sta_compile.errors import StaError
from sta_compile.noise_plan import conventions
from tests.end_to_end.tiny import CHANNELS, TinyVideo

OPTIONS = {"window": (1, 3, 3), "tile": (1, 2, 2), "min_tokens": 0, "dense_above": None}
PASS = "post_grad_custom_pre_pass"


@pytest.fixture
def patches(monkeypatch) -> list[dict[str, Any]]:
    """The config patches of every graph that would have gone to inductor; graphs run eagerly instead."""
    seen: list[dict[str, Any]] = []

    def compile_fx(gm, example_inputs, *, config_patches):
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return seen


def compile_tiny(**arguments: Any) -> None:
    with torch.no_grad():
        model = torch.compile(TinyVideo(), backend="sta", fullgraph=True, **arguments)
        model(torch.randn(1, CHANNELS, 3, 5, 7))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_are_inductors(patches, mode):
    compile_tiny(mode=mode)
    assert list_mode_options(mode).items() <= patches[0].items()


def test_both_kinds_of_options_in_one_dict(patches):
    compile_tiny(options={**OPTIONS, "triton.cudagraphs": True, "max_autotune": True})
    assert patches[0].keys() == {"triton.cudagraphs", "max_autotune", PASS}
    assert len(sta_compile.reports()[0].replaced) == 1


def test_the_tag_follows_settings(patches):
    for window in ((1, 3, 3), (1, 3, 3), (1, 2, 2)):
        torch._dynamo.reset()
        compile_tiny(options={**OPTIONS, "window": window})
    first, same, other = (p[PASS].uuid() for p in patches)
    assert first == same != other
    assert sta_compile.__version__ in first


def test_a_users_pass_still_runs(patches):
    class Mine(CustomGraphPass):
        ran = 0

        def __call__(self, graph: torch.fx.Graph) -> None:
            Mine.ran += 1

        def uuid(self) -> str:
            return "mine"

    compile_tiny(options={**OPTIONS, PASS: Mine()})
    both = patches[0][PASS]
    both(torch.fx.Graph())
    assert Mine.ran == 1
    assert "mine" in both.uuid()
    assert "sta_compile" in both.uuid()


def test_unknown_options_name_the_nearest():
    for wrong, right in (("windw", "window"), ("triton.cudagraph", "triton.cudagraphs")):
        torch._dynamo.reset()
        with pytest.raises(StaError, match=right):
            compile_tiny(options={wrong: 1})


def test_reset_forgets(patches):
    compile_tiny(options=OPTIONS)
    model = TinyVideo()
    conventions._entries[id(model)] = (lambda: model, None)  # type: ignore[assignment]
    assert sta_compile.reports()
    torch._dynamo.reset()
    assert not sta_compile.reports()
    assert conventions.recall(model) is None
    with pytest.warns(UserWarning, match="sta: 1 of 1"):  # a model is new again
        compile_tiny(options=OPTIONS)


def test_a_failing_stage_leaves_the_graph_as_it_was(patches, monkeypatch):
    def broken(*arguments: Any) -> None:
        raise RuntimeError("a stage is broken")

    latent = torch.randn(1, CHANNELS, 3, 5, 7)
    model = TinyVideo()
    monkeypatch.setattr("sta_compile.pipeline.verify", broken)  # after the edits
    with torch.no_grad(), pytest.warns(UserWarning, match="a stage is broken"):
        found = torch.compile(model, backend="sta", fullgraph=True, options=OPTIONS)(latent)
    assert torch.equal(found, model(latent))
    assert not sta_compile.reports()[0].replaced
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="a stage is broken"):
        torch.compile(model, backend="sta", options={**OPTIONS, "strict": True})(latent)
