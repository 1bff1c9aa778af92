"""Activation checkpointing in training: one in a graph keeps the windows; in Python, between graphs, blocks stay exact."""

from __future__ import annotations

import copy
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import sta_compile
from sta_compile import _torch
from sta_compile.checkpoints import computed_anew
from sta_compile.regions import repeated_blocks
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.test_breaks_before_blocks import OPTIONS, Branches, Model
from tests.end_to_end.tiny import CHANNELS

GRID = (3, 4, 5)
EXACT = "its block is run by torch.utils.checkpoint or an autograd.Function outside of any graph"


@pytest.fixture(autouse=True)
def _without_inductor(monkeypatch):
    monkeypatch.setattr(
        _torch, "compile_with_inductor", lambda gm, inputs, **_: aot_eager(gm, inputs)
    )


class Checkpointed(Model):
    """layers: of which blocks are checkpointed."""

    reentrant, layers = False, (0, 1)

    def before(self, x: Tensor) -> None:
        pass

    def forward(self, latent: Tensor) -> Tensor:
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        for layer, block in enumerate(self.blocks):
            self.before(x)
            run = partial(checkpoint, block, use_reentrant=self.reentrant)
            x = run(x) if layer in self.layers else block(x)
        return self.out(x).reshape(-1, *latent.shape[2:], CHANNELS).permute(0, 4, 1, 2, 3)


class Breaks(Checkpointed):
    before = Model.before


class BreaksReentrant(Breaks):
    reentrant = True


class BreaksByData(Checkpointed):
    before = Branches.before


class SecondAlone(Breaks):
    layers = (1,)


def gradients(model: nn.Module, **inputs: Any) -> Tensor:
    """Of all weights, as one vector."""
    model.zero_grad()
    out = model(**inputs)
    out = out if isinstance(out, Tensor) else out[0]
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def trained(model: nn.Module, **inputs: Any) -> tuple[nn.Module, Tensor, list[sta_compile.Report]]:
    """An uncompiled copy, the gradients of the third step, and the reports."""
    plain = copy.deepcopy(model)
    sta_compile.reset_reports()
    sta_compile.compile(model, **OPTIONS)
    for _ in range(3):
        found = gradients(model, **inputs)
    return plain, found, sta_compile.reports()


def check_windows(
    plain: nn.Module, sites: list[str], found: Tensor, reports, **inputs: Any
) -> None:
    site = next(site for report in reports for site in report.replaced)
    plain.layers = ()  # the oracle is there for the forward pass
    with Oracle(plain, sites, window_mask(site.grid, site.tiles, site.window)):
        assert relative_error(found, gradients(plain, **inputs)) < 1e-5


def test_in_the_graph():
    inputs = {"latent": torch.randn(2, CHANNELS, *GRID)}
    plain, found, reports = trained(Checkpointed(), **inputs)
    check_windows(plain, plain.sites, found, reports, **inputs)
    assert not [site for report in reports for site in report.refused]


@pytest.mark.parametrize("kind", [Breaks, BreaksReentrant, BreaksByData])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_in_python_all_stay_exact_and_are_said(kind):
    inputs = {"latent": torch.randn(2, CHANNELS, *GRID, requires_grad=True)}
    with pytest.warns(UserWarning, match=f"sta: nothing was replaced in {kind.__name__}"):
        plain, found, reports = trained(kind(), **inputs)
    assert not [site for report in reports for site in report.replaced]
    said = {s.name for r in reports for s in r.refused if s.reason.startswith(EXACT)}
    assert said == {"blocks.0", "blocks.1"}
    assert relative_error(found, gradients(plain, **inputs)) < 1e-6


def test_in_python_others_keep_their_windows():
    inputs = {"latent": torch.randn(2, CHANNELS, *GRID)}
    plain, found, reports = trained(SecondAlone(), **inputs)
    check_windows(plain, ["blocks.0.attn"], found, reports, **inputs)
    assert [s.name for r in reports for s in r.refused if s.reason.startswith(EXACT)] == [
        "blocks.1"
    ]


def test_without_gradients_nothing_is_computed_anew():
    """Blocks are compiled alone from the second call on, and what is before them is noted from the third on."""
    model = Breaks()
    inputs = {"latent": torch.randn(2, CHANNELS, *GRID)}
    sta_compile.compile(model, **OPTIONS)
    with torch.no_grad():
        for _ in range(3):
            model(**inputs)
    assert {site.grid for report in sta_compile.reports() for site in report.replaced} == {GRID}


def test_gradient_checkpointing_of_diffusers():
    """With hooks that break the graph; without them, see test_gradients."""
    case = FAMILIES["hunyuan"].case(1, (3, 6, 8))
    case.model.train()
    case.model.enable_gradient_checkpointing()
    blocks = repeated_blocks(case.model)
    for block in blocks:
        block.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
    plain, found, reports = trained(case.model, **case.inputs)
    assert relative_error(found, gradients(plain, **case.inputs)) < 1e-5
    said = {s.name for r in reports for s in r.refused if s.reason.startswith(EXACT)}
    assert len(said) == len(blocks)


class OwnCheckpoint(torch.autograd.Function):
    """As checkpoints of other libraries are: runs a block without gradients, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        y.backward(gradient)
        return None, x.grad


class Own(Checkpointed):
    def forward(self, latent: Tensor) -> Tensor:
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        for block in self.blocks:
            self.before(x)
            x = OwnCheckpoint.apply(lambda y, b=block: b(y), x) if self.layers else block(x)
        return self.out(x).reshape(-1, *latent.shape[2:], CHANNELS).permute(0, 4, 1, 2, 3)


class OwnBreaks(Own):
    before = Model.before


class OwnBreaksByData(Own):
    before = Branches.before


def compiled_whole(model: nn.Module) -> None:
    model.compile(backend="sta", options={**OPTIONS, "grid": GRID})


@pytest.mark.parametrize("kind", [Own, OwnBreaks, OwnBreaksByData])
@pytest.mark.parametrize(
    "compile", [lambda model: sta_compile.compile(model, **OPTIONS), compiled_whole]
)
def test_a_checkpoint_of_the_model_is_one(kind, compile):
    """Exact in training, though the same blocks may have had a window before, without gradients."""
    model = kind()
    plain = copy.deepcopy(model)
    inputs = {"latent": torch.randn(2, CHANNELS, *GRID)}
    sta_compile.reset_reports()
    compile(model)
    with torch.no_grad():
        model(**inputs)
    for _ in range(3):
        assert relative_error(gradients(model, **inputs), gradients(plain, **inputs)) < 1e-6
    refused = {s.name: s.reason for r in sta_compile.reports() for s in r.refused}
    assert any(reason.startswith(EXACT) for reason in refused.values())
    assert not any("cell_contents" in name for name in refused)


def test_a_block_that_is_compiled_by_itself_has_its_window_both_times():
    model = Own()
    plain = copy.deepcopy(model)
    inputs = {"latent": torch.randn(2, CHANNELS, *GRID)}
    sta_compile.reset_reports()
    for block in model.blocks:
        block.compile(backend="sta", options={**OPTIONS, "grid": GRID})
    for _ in range(2):
        found = gradients(model, **inputs)
    check_windows(plain, plain.sites, found, sta_compile.reports(), **inputs)


def test_code_without_a_hash():
    """Dynamo's resume functions may have a dict among their constants."""
    code = (lambda: computed_anew()).__code__
    code = code.replace(co_consts=(*code.co_consts, {}))
    with pytest.raises(TypeError, match="unhashable"):
        hash(code)
    assert not FunctionType(code, globals())()
