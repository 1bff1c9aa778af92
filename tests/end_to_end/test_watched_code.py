"""Code between blocks that a watch can't follow runs as without it, and hides where the tokens are."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sta_compile
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.test_breaks_before_blocks import GRID, OPTIONS, Model, error_of
from tests.end_to_end.tiny import CHANNELS

pytestmark = pytest.mark.usefixtures("stages_only")


class Runs(Model):
    code: Callable[[Tensor], Tensor] = staticmethod(lambda x: x * 1)

    @torch.compiler.disable
    def end(self, x: Tensor) -> Tensor:
        return self.code(x)


def compiled() -> Runs:
    """Called twice, so that it is watched from now on."""
    model = Runs()
    sta_compile.reset_reports()
    sta_compile.compile(model, **OPTIONS)
    for _ in range(2):
        model(torch.randn(2, CHANNELS, *GRID))
    return model


def saved_and_loaded(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def quantised(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 1 / 16, 0, torch.qint8).dequantize()


def nested(x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
    return torch.nested.to_padded_tensor(rows * 1, 0.0)


def traced(x: Tensor) -> Tensor:
    return torch.jit.trace(lambda y: y * 1.5, x)(x)


def sparse(x: Tensor) -> Tensor:
    return x.to_sparse().to_dense()


@torch.no_grad()
def test_what_is_unknown_runs_and_hides_the_order():
    model = compiled()
    latent = torch.randn(2, CHANNELS, *GRID)
    for code in (copy.deepcopy, saved_and_loaded, quantised, nested, sparse):
        model.code = code
        found = [model(latent) for _ in range(2)]
        exact = sta_compile.restore(copy.copy(model))(latent)
        assert all(torch.equal(each, exact) for each in found), code


def noise(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return x + torch.randn(x.shape, generator=generator)


def dropped(x: Tensor) -> Tensor:
    return x * torch.empty_like(x).bernoulli_(0.9, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_what_moves_no_tokens_hides_nothing():
    model = compiled()
    for code in (noise, dropped, traced):
        model.code = code
        assert error_of(model) < 1e-5, code


@torch.no_grad()
def test_modes_of_the_caller_see_the_operators_of_the_model_only():
    class Counts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    class CountsCalls(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    def code(x: Tensor) -> Tensor:
        with Counts() as ops, CountsCalls() as calls:
            y = x * 1 + 1
        assert (ops.count, calls.count) == (2, 2)
        return y

    model = compiled()
    model.code = code
    assert error_of(model) < 1e-5


@torch.no_grad()
def test_an_error_of_the_watch_is_no_error_of_the_model(monkeypatch):
    model = compiled()

    def fails(*args: object) -> None:
        raise AssertionError

    monkeypatch.setattr("sta_compile.prefix._leaving", fails)
    monkeypatch.setattr(model, "code", lambda x: x * 1.5 - 1)
    latent = torch.randn(2, CHANNELS, *GRID)
    found = model(latent)
    assert relative_error(found, sta_compile.restore(model)(latent)) < 1e-5
