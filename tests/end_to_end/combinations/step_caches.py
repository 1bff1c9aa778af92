"""Caches over denoising steps, as the libraries have them: each is put on a Wan in place.

The caches of diffusers and of cache-dit are real. TeaCache is no package: its published form is a forward with counters
and residuals in attributes that replaces the model's, which `tea_cache` is, with a distance that needs no fitted
polynomial.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from diffusers import hooks
from torch import Tensor, nn

ATTENTION = (r"blocks.*attn",)
STEPS = (990.0, 880.0, 860.0, 700.0, 690.0, 460.0, 440.0)
Step = Callable[[], float]


def _diffusers(config: Callable[[Step], Any]) -> Callable[[nn.Module, Step], None]:
    return lambda model, step: model.enable_cache(config(step))  # type: ignore[operator]


def _first_block(step: Step) -> Any:
    return hooks.FirstBlockCacheConfig(threshold=1.0)


def _pyramid(step: Step) -> Any:
    return hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        spatial_attention_block_identifiers=ATTENTION,
        current_timestep_callback=step,
    )


def _faster(step: Step) -> Any:
    """Leaves out attention, and the half of the batch that has no prompt."""
    return hooks.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 870),
        spatial_attention_block_identifiers=ATTENTION,
        unconditional_batch_skip_range=2,
        unconditional_batch_timestep_skip_range=(-1, 870),
        attention_weight_callback=lambda _: 0.3,
        current_timestep_callback=step,
    )


def _taylor(step: Step) -> Any:
    return hooks.TaylorSeerCacheConfig(
        cache_interval=3,
        max_order=1,
        disable_cache_before_step=2,
        cache_identifiers=[r"blocks\.\d+\.attn1"],
    )


def _mag(step: Step) -> Any:
    return hooks.MagCacheConfig(
        threshold=0.2,
        max_skip_steps=2,
        num_inference_steps=len(STEPS),
        mag_ratios=[1.0] * len(STEPS),
    )


def cache_dit(model: nn.Module, step: Step) -> None:
    import cache_dit as library

    library.enable_cache(
        library.BlockAdapter(
            transformer=model,
            blocks=model.blocks,
            forward_pattern=library.ForwardPattern.Pattern_2,
            has_separate_cfg=False,
        ),
        cache_config=library.DBCacheConfig(
            Fn_compute_blocks=1, residual_diff_threshold=0.5, max_warmup_steps=2,
            num_inference_steps=len(STEPS),
        ),
    )  # fmt: skip


def tea_cache(model: nn.Module, step: Step) -> None:
    state = {"count": 0, "distance": 0.0, "threshold": 1.0, "before": None, "residual": None}
    for name, value in state.items():
        setattr(model, name, value)
    model.forward = types.MethodType(_with_tea_cache, model)


def _with_tea_cache(
    self: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    return_dict: bool = False,
) -> tuple[Tensor]:
    rope = self.rope(hidden_states)
    batch, _, frames, height, width = hidden_states.shape
    _, high, wide = self.config.patch_size
    x = self.patch_embedding(hidden_states).flatten(2).transpose(1, 2)
    embedded, modulation, text, _ = self.condition_embedder(timestep, encoder_hidden_states, None)
    modulation = modulation.unflatten(1, (6, -1))
    compute = self.count % len(STEPS) in (0, len(STEPS) - 1)
    if not compute:
        self.distance += ((embedded - self.before).abs().mean() / self.before.abs().mean()).item()
        compute = self.distance >= self.threshold
    self.before = embedded
    self.count += 1
    if compute:
        self.distance, first = 0.0, x
        for block in self.blocks:
            x = block(x, text, modulation, rope)
        self.residual = x - first
    else:
        x = x + self.residual
    shift, scale = (self.scale_shift_table + embedded.unsqueeze(1)).chunk(2, dim=1)
    x = self.proj_out(self.norm_out(x) * (1 + scale) + shift)
    x = x.view(batch, frames, height // high, width // wide, 1, high, wide, -1)
    x = x.permute(0, 7, 1, 4, 2, 5, 3, 6)
    return (x.flatten(6, 7).flatten(4, 5).flatten(2, 3),)


CACHES: dict[str, Callable[[nn.Module, Step], None]] = {
    "FirstBlockCache": _diffusers(_first_block),
    "PyramidAttentionBroadcast": _diffusers(_pyramid),
    "FasterCache": _diffusers(_faster),
    "TaylorSeer": _diffusers(_taylor),
    "MagCache": _diffusers(_mag),
    "TeaCache": tea_cache,
    "cache-dit": cache_dit,
}


def run(model: nn.Module, inputs: dict[str, Any], level: float, now: list[float]) -> Tensor:
    """One step; `now` holds the timestep that the caches ask for."""
    now[:] = [level]
    with model.cache_context("cond"):  # type: ignore[operator]
        out: Tensor = model(**inputs)[0]
    return out
