"""Pipelines of diffusers with small random denoisers: one call compiles them, and `restore` undoes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

import sta_compile
from tests.end_to_end import models, packed_models
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.tiny import SPARSE

OPTIONS = {**SPARSE, "min_tokens": 0}
TEXT = 7
pytestmark = pytest.mark.usefixtures("stages_only")


def scheduler(**config: Any) -> diffusers.FlowMatchEulerDiscreteScheduler:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0, **config)


def prompt(width: int = models.TEXT_DIM) -> Tensor:
    return torch.randn(1, TEXT, width, generator=torch.Generator().manual_seed(1))


def pair(name: str, embeds: Tensor) -> dict[str, Tensor]:
    """Embeddings of a prompt whose last two tokens are padding, and of what it should not show."""
    mask = (torch.arange(TEXT) < TEXT - 2)[None]
    return {
        "prompt_embeds": embeds,
        f"prompt_{name}": mask,
        "negative_prompt_embeds": -embeds,
        f"negative_prompt_{name}": mask.flip(0),
    }


def mochi() -> tuple[Any, dict[str, Any], models.Triple]:
    grid = (3, 6, 8)
    model = models.FAMILIES["mochi"].case(1, grid).model
    pipe = diffusers.MochiPipeline(
        scheduler(invert_sigmas=True),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        transformer=model,
    )
    embeds = prompt(model.config.text_embed_dim)
    size = {"height": 96, "width": 128, "num_frames": 13}
    return pipe, {**pair("attention_mask", embeds), **size}, grid


def ltx() -> tuple[Any, dict[str, Any], models.Triple]:
    grid = (3, 6, 8)
    model = models.FAMILIES["ltx"].case(1, grid).model
    pipe = diffusers.LTXPipeline(
        scheduler(), vae=None, text_encoder=None, tokenizer=None, transformer=model
    )
    embeds = prompt(model.config.caption_channels)
    size = {"height": 192, "width": 256, "num_frames": 17}
    return pipe, {**pair("attention_mask", embeds), **size}, grid


def flux() -> tuple[Any, dict[str, Any], models.Triple]:
    grid = (1, 9, 13)
    model = packed_models.FAMILIES["flux"].case(1, grid).model
    pipe = diffusers.FluxPipeline(
        scheduler(), vae=None, text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None,
        transformer=model,
    )  # fmt: skip
    config = model.config
    given = {
        "prompt_embeds": prompt(config.joint_attention_dim),
        "pooled_prompt_embeds": torch.ones(1, config.pooled_projection_dim),
    }
    return pipe, {**given, "height": 144, "width": 208}, grid


def hunyuan() -> tuple[Any, dict[str, Any], models.Triple]:
    grid = (3, 6, 8)
    pipe = diffusers.HunyuanVideoPipeline(
        text_encoder=None, tokenizer=None, vae=None, scheduler=scheduler(), text_encoder_2=None,
        tokenizer_2=None, transformer=models.FAMILIES["hunyuan"].case(1, grid).model,
    )  # fmt: skip
    given = {**pair("attention_mask", prompt()), "pooled_prompt_embeds": torch.ones(1, 8)}
    given = {key: value for key, value in given.items() if "negative" not in key}
    return pipe, {**given, "height": 96, "width": 128, "num_frames": 9}, grid


def run(pipe: Any, arguments: dict[str, Any]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    out: Tensor = pipe(
        **arguments, num_inference_steps=4, output_type="latent", generator=generator
    )[0]
    return out


@pytest.mark.parametrize("make", [mochi, ltx, flux, hunyuan], ids=lambda make: make.__name__)
def test_a_pipeline(make: Callable[[], tuple[Any, dict[str, Any], models.Triple]]) -> None:
    pipe, arguments, grid = make()
    pipe.set_progress_bar_config(disable=True)
    model = pipe.transformer
    exact, names, attributes = run(pipe, arguments), list(model.state_dict()), set(vars(model))
    assert sta_compile.compile(pipe, **OPTIONS) is pipe
    found = run(pipe, arguments)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(run(pipe, arguments), found)
    sites = [site for report in sta_compile.reports() for site in report.replaced]
    assert {site.grid for site in sites} == {grid}
    (report,) = [report for report in sta_compile.reports() if report.replaced]
    assert report.noise.evidence == "the scheduler's schedule"
    assert relative_error(found, exact) > 1e-4
    sta_compile.restore(pipe)
    assert torch.equal(run(pipe, arguments), exact)
    assert list(model.state_dict()) == names
    assert set(vars(model)) == attributes
    sta_compile.compile(pipe, **{**OPTIONS, "window": "full"})
    assert relative_error(run(pipe, arguments), exact) < 1e-4
