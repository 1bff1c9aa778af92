"""`sta_compile.compile` and `restore`: in place, on models and on pipelines, with what the scheduler says of noise."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import diffusers
import pytest
import torch
from torch import nn

import sta_compile
from sta_compile import StaError
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo

GRID = (3, 6, 8)
TILES, WINDOW = (3, 3, 4), (1, 3, 3)
OPTIONS = {**SPARSE, "min_tokens": 0}


@pytest.fixture
def graphs(stages_only, monkeypatch):
    """The graphs that would go to inductor."""
    from sta_compile import _torch

    found = []
    monkeypatch.setattr(
        _torch, "compile_with_inductor", lambda gm, *_, **__: found.append(gm) or gm.forward
    )
    return found


def check(case, options, **more) -> list:
    """Compiled equals the masked model, compiles once, and leaves nothing behind. Returns the reports."""
    model = case.model
    names = list(model.state_dict())
    expected_dense = model(**case.inputs)[0]
    sta_compile.compile(model, **options, **more)
    found = model(**case.inputs)[0]
    with torch._dynamo.config.patch(error_on_recompile=True):
        again = model(**case.inputs)[0]
    assert torch.equal(found, again)
    assert list(model.state_dict()) == names
    reports = sta_compile.reports()
    sta_compile.restore(model)
    assert torch.equal(model(**case.inputs)[0], expected_dense)
    assert not any("forward" in module.__dict__ for module in model.modules())
    with Oracle(model, case.sites, window_mask(GRID, TILES, WINDOW), text_first=case.text_first):
        assert relative_error(found, model(**case.inputs)[0]) < 1e-5
    assert relative_error(found, expected_dense) > 1e-3
    return reports


@pytest.mark.parametrize(
    ("family", "bodies"), [("hunyuan", 3), ("cogvideox_5b", 2), ("allegro", 1)]
)
def test_blocks_are_compiled_once(family, bodies, stages_only, graphs):
    """Blocks that return two views of a tensor, take two, or return an input are regions all the same."""
    case = FAMILIES[family].case(2, GRID, layers=3)
    (report,) = check(case, OPTIONS, noise=FAMILIES[family].noise)
    assert report.replacements == len(case.sites)
    assert len(report.replaced) == bodies
    (gm,) = graphs
    assert sum(isinstance(module, torch.fx.GraphModule) for module in gm.modules()) - 1 == bodies


def test_mochi_needs_no_flag_of_the_user(stages_only):
    """Its text is trimmed by the values of its mask, which breaks the graph by default."""
    assert not torch._dynamo.config.capture_dynamic_output_shape_ops
    case = FAMILIES["mochi"].case(1, GRID)
    (report,) = check(case, OPTIONS, noise="reversed")
    assert [site.name for site in report.replaced][:1] == ["transformer_blocks.0.attn1"]
    assert not torch._dynamo.config.capture_dynamic_output_shape_ops


def test_regions_that_dynamo_cannot_trace_are_given_up(stages_only, monkeypatch):
    model = TinyVideo(layers=3)
    for block in model.blocks:
        monkeypatch.setattr(block, "calls", 0, raising=False)

    def counting(self, x, mask=None):
        self.calls += 1  # a side effect, which a region may not have
        return plain(self, x, mask)

    plain = type(model.blocks[0]).forward
    monkeypatch.setattr(type(model.blocks[0]), "forward", counting)
    latent = torch.randn(1, CHANNELS, *GRID)
    sta_compile.compile(model, **OPTIONS, dense_above=None)
    found = model(latent)
    sta_compile.restore(model)
    with Oracle(model, model.sites, window_mask(GRID, TILES, WINDOW)):
        assert relative_error(found, model(latent)) < 1e-5


class TextThroughABlock(TinyVideo):
    """As many tokens of text as of video, and a block of the video's class for them."""

    def forward(self, latent, text):
        text = self.blocks[0](text * 1)
        x = self.patchify(latent).flatten(2).transpose(1, 2).contiguous()
        for block in self.blocks[1:]:
            x = block(x)
        x = self.out(x + text.mean(1, keepdim=True)).unflatten(1, GRID)
        return x.permute(0, 4, 1, 2, 3)


def test_regions_that_hide_which_tokens_are_video_are_given_up(stages_only, caplog):
    caplog.set_level("INFO", "sta_compile")
    model = TextThroughABlock(layers=3)
    inputs = {"latent": torch.randn(1, CHANNELS, *GRID), "text": torch.randn(1, 144, 16)}
    sta_compile.compile(model, **OPTIONS, dense_above=None)
    found = model(**inputs)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(model(**inputs), found)
    (report,) = sta_compile.reports()
    assert "its block is called with the video and with other tokens" in caplog.text
    assert [site.name for site in report.replaced] == model.sites[1:]
    sta_compile.restore(model)
    with Oracle(model, model.sites[1:], window_mask(GRID, TILES, WINDOW)):
        assert relative_error(found, model(**inputs)) < 1e-5


class TestCopies:
    """A compiled model is copied, pickled and compiled anew like any other."""

    def test_deepcopy_and_pickle(self, stages_only, tmp_path):
        model = sta_compile.compile(TinyVideo(layers=2), **OPTIONS, dense_above=None)
        latent = torch.randn(1, CHANNELS, *GRID)
        found = model(latent)
        twin = copy.deepcopy(model)
        assert twin._compiled_call_impl is None
        eager = twin(latent)
        assert relative_error(found, eager) > 1e-3
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(loaded(latent), eager)
        assert torch.equal(sta_compile.compile(twin, **OPTIONS, dense_above=None)(latent), found)

    def test_compiled_again_with_other_options(self, stages_only):
        model, latent = TinyVideo(layers=2), torch.randn(1, CHANNELS, *GRID)
        eager = model(latent)
        sta_compile.compile(model, **OPTIONS, dense_above=None)
        assert relative_error(model(latent), eager) > 1e-3
        sta_compile.compile(model, **{**OPTIONS, "window": "full"})
        assert relative_error(model(latent), eager) < 1e-5


def wan_pipeline(scheduler=None) -> diffusers.WanPipeline:
    """Two experts with weights of their own, no text encoder and no VAE."""
    first, second = (FAMILIES["wan"].case(1, GRID).model for _ in range(2))
    for parameter in second.parameters():
        parameter.data.mul_(1.05)
    pipe = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=scheduler or diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=first,
        transformer_2=second,
        boundary_ratio=0.875,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def video(pipe, steps=4) -> torch.Tensor:
    prompt = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(1))
    return pipe(
        prompt_embeds=prompt, negative_prompt_embeds=-prompt, height=96, width=128, num_frames=9,
        num_inference_steps=steps, output_type="latent", generator=torch.Generator().manual_seed(0),
    ).frames  # fmt: skip


class TestPipelines:
    def test_both_experts_of_wan_with_options_of_their_own(self, stages_only):
        pipe = wan_pipeline()
        exact = video(pipe)
        names = [list(part.state_dict()) for part in (pipe.transformer, pipe.transformer_2)]
        assert sta_compile.compile(pipe, **OPTIONS, transformer_2={"window": "full"}) is pipe
        with pytest.warns(UserWarning, match="sta:") as said:
            sparse = video(pipe)
        assert [str(w.message).split(" tokens ")[1][:9] for w in said] == ["keep 25 %", "keep ever"]
        assert relative_error(sparse, exact) > 1e-4
        noise = [report.noise for report in sta_compile.reports()]
        assert [(n.convention, n.evidence) for n in noise] == [
            ("0..1000", "the scheduler's schedule")
        ] * 2
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(video(pipe), sparse)
        assert names == [list(part.state_dict()) for part in (pipe.transformer, pipe.transformer_2)]
        sta_compile.restore(pipe)
        assert torch.equal(video(pipe), exact)

    def test_experts_with_equal_options_share_code_and_are_both_spoken_of(self, stages_only):
        pipe = sta_compile.compile(wan_pipeline(), **OPTIONS)
        with pytest.warns(UserWarning, match=r"sta: .* keep 25 %") as said:
            video(pipe)
        assert len(said) == 2
        assert len(sta_compile.reports()) == 1

    def test_a_part_may_be_left_alone(self, stages_only):
        pipe = sta_compile.compile(wan_pipeline(), **OPTIONS, transformer=None)
        assert pipe.transformer._compiled_call_impl is None
        assert pipe.transformer_2._compiled_call_impl is not None

    def test_a_scheduler_that_is_exchanged_later_counts(self, stages_only):
        pipe = sta_compile.compile(wan_pipeline(), **OPTIONS)
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=800)
        video(pipe)
        assert sta_compile.reports()[0].noise.convention == "0..800"

    def test_never_a_text_encoder_or_vae_and_a_word_for_a_unet(self, stages_only, caplog):
        parts = {name: TinyVideo() for name in ("transformer", "text_encoder_2", "vae", "unet")}
        pipe = SimpleNamespace(components=parts | {"scheduler": object()})
        sta_compile.compile(pipe)
        compiled = [n for n, part in parts.items() if part._compiled_call_impl is not None]
        assert compiled == ["transformer"]
        assert "unet has no tokens of video" in caplog.text

    def test_a_part_of_another_name_is_compiled_where_it_is_named(self, stages_only):
        pipe = SimpleNamespace(components={"prior": TinyVideo(), "vae": nn.Linear(1, 1)})
        with pytest.raises(StaError, match=r"its modules: prior \(TinyVideo\), vae \(Linear\)"):
            sta_compile.compile(pipe)
        sta_compile.compile(pipe, prior={"window": "full"})
        assert pipe.components["prior"]._compiled_call_impl is not None

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"windw": "full"}, "did you mean 'window'"),
            ({"transformer_2": {"window": 3}}, "window=3"),
            ({"transformer_2": "full"}, "transformer_2='full' is no set of options"),
            ({"vae": {}}, "vae is no denoiser"),
            ({"mode": "fast"}, "there is no mode 'fast'"),
            (
                {"transfomer": {"window": "full"}},
                "has no part 'transfomer'; its parts are transformer,",
            ),
            ({"options": [1]}, r"options=\[1\] is no dict"),
        ],
    )
    def test_a_mistake_raises_before_anything_is_compiled(self, options, message, stages_only):
        parts = {name: TinyVideo() for name in ("transformer", "transformer_2", "vae")}
        with pytest.raises(StaError, match=message):
            sta_compile.compile(SimpleNamespace(components=parts), **options)
        assert all(part._compiled_call_impl is None for part in parts.values())


class TestConventionsOfTwoModels:
    """Models of one class that are compiled with equal options share Dynamo's code."""

    def test_each_has_the_convention_that_its_own_first_step_shows(self, stages_only):
        falling, rising = (FAMILIES["wan"].case(1, GRID) for _ in range(2))
        options = {**OPTIONS, "noise": "auto"}
        for case in (falling, rising):
            case.model.compile(backend="sta", options=options)
        exact = falling.model.forward(**falling.at(900.0))[0]
        with pytest.warns(UserWarning, match=r"dense above noise 0\.95"):
            falling.model(**falling.at(999.0))
        with pytest.warns(UserWarning, match="the first timestep is 0, which fits several scales"):
            rising.model(**rising.at(0.0))
        assert relative_error(falling.model(**falling.at(900.0))[0], exact) > 1e-3
        assert relative_error(rising.model(**rising.at(900.0))[0], exact) < 1e-5


@torch.no_grad()
def test_settings_that_change_are_no_state_of_python(stages_only):
    """Compiles that follow the config or the grad mode come to an end: the model stays whole."""
    sta_compile.reset_reports()
    options = {name: value for name, value in OPTIONS.items() if name != "window"}
    case = FAMILIES["wan"].case(1, GRID)
    sta_compile.compile(case.model, **options)
    windows = [(1, 1, 1), (1, 3, 3), (3, 3, 3), (1, 5, 5), (3, 5, 5), (3, 1, 1)]
    for window in windows:
        with sta_compile.config.patch(window=window):
            case.model(**case.at(500.0))
    assert not case.model._compiled_call_impl.state.blocks_alone
    assert all(report.replaced for report in sta_compile.reports())


def test_weights_may_be_swapped_after_a_compile(graphs):
    """As offloading swaps quantised weights: nothing that a compile leaves behind may hold a weak reference to them."""
    model = TinyVideo()
    sta_compile.compile(model, **OPTIONS)
    x = torch.randn(1, CHANNELS, *GRID)
    with torch.no_grad():
        before = model(x)
        for parameter in model.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
        assert torch.equal(model(x), before)
