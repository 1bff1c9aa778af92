"""Faults of options, dynamic axes and outputs: each was silent, a crash, or cost the whole model its speed-up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sta_compile.errors import StaError
from sta_compile.pipeline import rewrite
from sta_compile.settings import Settings
from tests.end_to_end.compiled import DEFAULTS, RewritingBackend, compile_variants, relative_error
from tests.end_to_end.middle import GRID, OPTIONS, Middle, latent, names
from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo


@torch.no_grad()
def test_a_noise_function_that_writes_to_the_timestep_is_refused():
    model = Timestep()
    inputs = {"latent": latent(), "timestep": torch.tensor([999.0, 999.0])}
    options = {**SPARSE, "dense_above": 0.95, "noise": lambda t: t.div_(1000)}
    with pytest.raises(StaError, match="writes to the model's timestep"):
        compile_variants(model, inputs, {"sta": options})


class Timestep(Middle):
    """As Middle, with a timestep [batch] that is embedded and multiplies the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, latent: Tensor, timestep: Tensor) -> Tensor:
        angle = timestep[:, None] * torch.exp(-torch.arange(8) / 8)
        level = self.embed(torch.cat([angle.cos(), angle.sin()], -1))[:, None]
        self.middle = lambda model, x: model.blocks[1](model.blocks[0](x * (1 + level)))
        return super().forward(latent)


@torch.no_grad()
def test_a_timestep_that_is_no_argument_is_a_mistake():
    inputs = {"latent": latent(), "timestep": torch.full((2,), 999.0)}
    options = {**SPARSE, "dense_above": 0.95, "timestep": "t"}
    with pytest.raises(StaError, match=r"timestep='t' names no argument .* latent, timestep"):
        compile_variants(Timestep(), inputs, {"sta": options})


@torch.no_grad()
def test_another_timestep_has_a_convention_of_its_own():
    model, reports = TwoTimesteps(), []
    inputs = {"latent": latent(), "timestep": torch.full((2,), 999.0)}
    for name, convention in (("timestep", "0..1000"), ("other_timestep", None)):
        options = {**DEFAULTS, **SPARSE, "dense_above": 0.95, "timestep": name}
        backend = reporting(Settings.resolve(options)[0], reports)
        torch.compile(model, backend=backend)(**inputs, other_timestep=torch.full((2,), 0.99))
        assert reports[-1].noise.convention == convention
    assert len(reports) == 2


def reporting(settings, reports):
    def backend(gm, example_inputs):
        reports.append(rewrite(gm, example_inputs, settings)[1])
        return gm.forward

    return backend


@torch.no_grad()
def test_no_step_is_above_level_one():
    """Not even where the convention is unknown: dense_above(scheduler, steps=0) asks for no dense step."""
    inputs = {"latent": latent(), "timestep": torch.full((2,), 0.3)}
    model = Timestep()
    variant = compile_variants(model, inputs, {"sta": {**SPARSE, "dense_above": 1.0}})["sta"]
    assert not variant.report.noise.needed
    assert relative_error(variant.run(**inputs), model(**inputs)) > 1e-3


class TwoTimesteps(Timestep):
    def forward(self, latent: Tensor, timestep: Tensor, other_timestep: Tensor) -> Tensor:
        return super().forward(latent, timestep) * other_timestep[:, None, None, None, None]


@pytest.mark.parametrize("marked", [(4,), (3, 4), (0, 2, 3, 4)])
@torch.no_grad()
def test_axes_that_are_marked_dynamic_stay_dynamic(marked):
    model, x = AnyGrid(), latent()
    for dim in marked:
        torch._dynamo.mark_dynamic(x, dim)
    variant = compile_variants(model, {"latent": x}, OPTIONS)["full"]
    assert names(variant) == model.sites
    sizes = [2, CHANNELS, *GRID]
    other = torch.randn([size + (dim in marked) for dim, size in enumerate(sizes)])
    for given in (x, other):
        assert relative_error(variant.run(latent=given), model(given)) < 1e-5


class AnyGrid(TinyVideo):
    """Reads the grid from its input."""


class HiddenStates(TinyVideo):
    """Returns the tokens after every block, with the strides of a transposed patch embed."""

    def forward(self, latent: Tensor) -> list[Tensor]:
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        states = []
        for block in self.blocks:
            x = block(x)
            states += [x, x.mT]
        return [self.out(x).unflatten(1, GRID), *states]


@torch.no_grad()
def test_hidden_states_keep_their_strides():
    model, x = HiddenStates(layers=3), latent()
    variants = compile_variants(model, {"latent": x}, OPTIONS)
    assert names(variants["full"]) == model.sites
    for found, expected in zip(variants["full"].run(latent=x), model(x), strict=True):
        assert found.stride() == expected.stride()
        assert relative_error(found, expected) < 1e-5


class Fused(TinyVideo):
    """Returns what `kept` takes of the keys and values of one projection, [batch, heads, text and video, head_dim]."""

    def __init__(self, kept) -> None:
        super().__init__()
        self.kept, self.to_qkv = kept, nn.Linear(16, 48)

    def forward(self, latent: Tensor, text: Tensor) -> list[Tensor]:
        attn, video = self.blocks[0].attn, latent.shape[2:].numel()
        x = torch.cat([text, self.patchify(latent).flatten(2).mT], 1)
        qkv = self.to_qkv(x).chunk(3, -1)
        q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in qkv)
        x = x + attn.to_out(attn.attend(q, k, v, None).transpose(1, 2).flatten(2))
        return [self.out(x[:, -video:]), *(self.kept(x, video) for x in (k, v))]


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize(
    ("kept", "held"),
    [
        (lambda x, video: x, True),
        (lambda x, video: x[:, :, -video:], False),
        (lambda x, video: x[:, :, -video:].contiguous(), True),
    ],
)
@torch.no_grad()
def test_returned_keys_keep_their_strides(kept, held, dynamic):
    """Texts of several lengths. Where that can't be done the report says so, with a hint that helps."""
    model, backend = Fused(kept), RewritingBackend(OPTIONS)
    backend.chosen = "full"
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for tokens in (7, 9):
        inputs = latent(), torch.randn(2, tokens, 16)
        for found, expected in zip(compiled(*inputs), model(*inputs), strict=True):
            assert found.stride() == expected.stride()
            assert relative_error(found, expected) < 1e-5
    report = backend.reports["full"][-1]
    assert len(report.replaced) == held
    if not held:
        assert "whose strides would be others" in report.summary()
        assert report.refused[0].breaks_strict


class Packed(nn.Module):
    """Tokens [batch, tokens, 16] that nothing gives a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = TinyVideo().blocks

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return tokens


@torch.no_grad()
def test_a_declared_grid_that_fits_nothing_is_spoken_of():
    said = "option grid (3, 4, 5) has 60 tokens and fits no attention, whose sequences have "
    wrong, right = {**SPARSE, "grid": (3, 4, 5)}, {**SPARSE, "grid": (3, 6, 8)}
    inputs = {"tokens": torch.randn(1, 144, 16)}
    variants = compile_variants(Packed().eval(), inputs, {"wrong": wrong, "right": right})
    assert said + "144" in variants["wrong"].report.summary()
    assert not variants["wrong"].report.replaced
    assert variants["right"].report.replaced
    assert "fits no" not in variants["right"].report.summary()

    inputs = {"latent": torch.randn(1, CHANNELS, 3, 6, 8), "text": torch.randn(1, 7, 16)}
    report = compile_variants(TinyVideo(), inputs, {"sta": wrong})["sta"].report
    assert report.replaced
    assert report.summary().endswith(said + "151, 144, 7")

    contradicted = compile_variants(TinyVideo(), inputs, {"sta": {**SPARSE, "grid": (3, 4, 12)}})[
        "sta"
    ].report
    assert contradicted.replaced[0].grid == (3, 6, 8)
    assert "so (3, 4, 12) of option grid is not used" in contradicted.summary()


@pytest.mark.parametrize(
    ("options", "grid", "why"),
    [
        ({"window": (1, 3, 3)}, (3, 6, 8), "the window has all of 3x6x8 tokens"),
        ({"window": [(1, 3, 3), (3, 1, 3)]}, (3, 6, 8), "each head's window has all of 3x6x8"),
        (
            {"window": (3, 2, 2), "tile": (1, 2, 2), "always_keep": {"frames": [0, 1, 2]}},
            (4, 2, 2),
            "always_keep leaves 1x2x2 tokens, and the window has all of these",
        ),
        ({"window": "full"}, (3, 6, 8), ""),
        (SPARSE, (3, 6, 8), ""),
    ],
)
@torch.no_grad()
def test_what_is_exact_though_nobody_asked_is_said(options, grid, why):
    inputs = {"latent": torch.randn(1, CHANNELS, *grid)}
    report = compile_variants(TinyVideo(), inputs, {"sta": options})["sta"].report
    (site,) = report.replaced
    assert site.exact == (options is not SPARSE)
    assert site.why_exact.startswith(why)
    assert bool(site.why_exact) == bool(why)
    assert why in report.summary()
