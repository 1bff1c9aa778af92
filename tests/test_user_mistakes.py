"""A user's mistake raises StaError, which says what to pass, from every public entry."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sta_compile
from sta_compile import StaError
from sta_compile.errors import InvalidOptionError, UnknownOptionError
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.window import Window
from sta_compile.picture import draw_window

MODEL = nn.Linear(2, 2)
SCHEDULER = SimpleNamespace(timesteps=torch.linspace(999, 0, 10), num_inference_steps=10)
PIPE = SimpleNamespace(components={"transformer": MODEL}, transformer=MODEL, __call__=print)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sta_compile.rewrite(MODEL), "torch.export.export"),
        (lambda: sta_compile.dense_above(SCHEDULER, steps="a"), "pass 0 to 9"),
        (lambda: sta_compile.dense_above(SCHEDULER, steps=2.5), "pass 0 to 9"),
        (lambda: sta_compile.explain(3), "pass a model"),
        (lambda: sta_compile.explain(nn.Linear), "not a class"),
        (lambda: sta_compile.explain(PIPE), "pipe.transformer"),
        (lambda: sta_compile.explain(MODEL, options=[3]), "is no dict"),
        (lambda: sta_compile.explain(MODEL, timesteps="abc"), "a scheduler's timesteps"),
        (lambda: sta_compile.explain(MODEL, timesteps=5), "a scheduler's timesteps"),
        (lambda: sta_compile.compile(None), "None is no model and no pipeline"),
        (lambda: sta_compile.compile(nn.Linear), "class Linear is no model"),
        (lambda: sta_compile.compile(MODEL, mode="fast"), "max-autotune"),
        (
            lambda: sta_compile.compile(MODEL, timestep="t"),
            "no argument of Linear.forward; pass one of input",
        ),
        (lambda: sta_compile.restore(3), "3 is no model and no pipeline"),
        (lambda: sta_compile.token_grid("a"), "frames, rows, cols"),
        (lambda: sta_compile.token_grid(1, 2), "frames, rows, cols"),
        (lambda: sta_compile.token_grid(1, 2, 0), "frames, rows, cols"),
        (lambda: sta_compile.config.patch(windw=3), "did you mean 'window'"),
        (lambda: sta_compile.target("gpu"), "pass 'cuda'"),
        (lambda: sta_compile.target("cuda:77"), "pass 'cuda'"),
    ],
)
def test_a_mistake(call, said):
    with pytest.raises(StaError, match=said):
        call()


def test_a_gpu_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("STA_TARGET", "sm_999")
    with pytest.raises(StaError, match=r"STA_TARGET=sm_999 is not .*sm_90"):
        sta_compile.target()


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"windw": 1}, UnknownOptionError, "did you mean 'window'"),
        ({"window": "wide"}, InvalidOptionError, "in tokens"),
        ([3], InvalidOptionError, "is no dict"),
    ],
)
def test_dynamo_hands_the_error_on(options, kind, said):
    """As it is: not as what Dynamo makes of errors of backends."""
    torch._dynamo.reset()
    with pytest.raises(kind, match=said) as raised:
        torch.compile(MODEL, backend="sta", options=options)(torch.randn(2, 2))
    assert isinstance(raised.value, StaError)
    assert len(raised.traceback) < 15


def test_a_mode_that_does_not_exist():
    torch._dynamo.reset()
    with pytest.raises(StaError, match="there is no mode 'fast'"):
        torch.compile(MODEL, backend="sta", mode="fast")(torch.randn(2, 2))


def test_a_grid_as_one_value():
    for grid in ("3x4x5", (3, 4, 5)):
        with sta_compile.token_grid(grid):
            assert sta_compile.config.grid == (3, 4, 5)


def test_pictures_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(StaError, match="run pip install matplotlib"):
        draw_window(Tiling((1, 2, 2), (1, 1, 1)), Window((1, 1, 1)))
