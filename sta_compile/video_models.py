"""Inputs of diffusers' video transformers: what a pipeline would pass for a video of a given size.

`python -m sta_compile explain WanTransformer3DModel --size 81x720x1280` builds the class on the meta device and needs
the shapes; the demo and the examples need values. 81 frames of 720x1280 pixels are a latent of 21x90x160 for Wan, whose
autoencoder keeps every fourth frame and divides height and width by 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .errors import StaError, needs
from .ir.attention_spec import Triple

# (tensor maker, model config, batch, latent (T, H, W)) -> keyword arguments of forward
Inputs = Callable[["Maker", Any, int, Triple], dict[str, Any]]


@dataclass(frozen=True)
class Maker:
    """Makes input tensors: noise on a real device, shapes only on meta."""

    device: torch.device
    dtype: torch.dtype
    first_timestep: float

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def scalar(self, batch: int, value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full((batch,), value, device=self.device, dtype=dtype or self.dtype)

    def timestep(self, batch: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.scalar(batch, self.first_timestep, dtype)

    def valid(self, batch: int, tokens: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
        """A text mask whose last sample ends a quarter early."""
        mask = torch.ones(batch, tokens, device=self.device, dtype=dtype)
        mask[-1:, tokens - tokens // 4 :] = 0
        return mask


@dataclass(frozen=True)
class VideoModel:
    """A diffusers class: its autoencoder's factors per axis (frames, rows, cols) and its inputs."""

    vae: Triple
    first_timestep: float  # of a run, which starts with pure noise
    inputs: Inputs
    causal: bool = True  # the first frame has a latent of its own: 81 frames -> 1 + 80 / 4
    config: Mapping[str, Any] | None = None  # changes to the class's default config
    meta: bool = True  # False: forward asks for autocast on its device, which meta does not have

    def latent(self, frames: int, height: int, width: int) -> Triple:
        by_t, by_h, by_w = self.vae
        count = (frames - 1) // by_t + 1 if self.causal else frames // by_t
        if min(count, height // by_h, width // by_w) < 1:
            raise StaError(
                f"a video of {frames}x{height}x{width} is smaller than one latent; pass --size "
                "as FRAMESxHEIGHTxWIDTH in pixels, for example 81x720x1280"
            )
        return count, height // by_h, width // by_w


def _wan(make: Maker, config: Any, batch: int, latent: Triple) -> dict[str, Any]:
    inputs = {
        "hidden_states": make.noise(batch, config.in_channels, *latent),
        "timestep": make.timestep(batch, torch.int64),
        "encoder_hidden_states": make.noise(batch, 512, config.text_dim),
    }
    if config.image_dim is not None:
        inputs["encoder_hidden_states_image"] = make.noise(batch, 257, config.image_dim)
    return inputs


def _hunyuan(make: Maker, config: Any, batch: int, latent: Triple) -> dict[str, Any]:
    inputs = {
        "hidden_states": make.noise(batch, config.in_channels, *latent),
        "timestep": make.timestep(batch, torch.int64),
        "encoder_hidden_states": make.noise(batch, 256, config.text_embed_dim),
        "encoder_attention_mask": make.valid(batch, 256),
        "pooled_projections": make.noise(batch, config.pooled_projection_dim),
    }
    if config.guidance_embeds:
        inputs["guidance"] = make.scalar(batch, 6000.0)
    return inputs


def _cogvideox(make: Maker, config: Any, batch: int, latent: Triple) -> dict[str, Any]:
    frames, rows, cols = latent
    by_t = config.patch_size_t or 1
    frames -= frames % by_t
    inputs = {
        "hidden_states": make.noise(batch, frames, config.in_channels, rows, cols),
        "encoder_hidden_states": make.noise(
            batch, config.max_text_seq_length, config.text_embed_dim
        ),
        "timestep": make.timestep(batch, torch.int64),
    }
    if config.use_rotary_positional_embeddings:
        tokens = (frames // by_t) * (rows // config.patch_size) * (cols // config.patch_size)
        angles = make.noise(tokens, config.attention_head_dim).float()
        inputs["image_rotary_emb"] = (angles.cos(), angles.sin())  # type: ignore[assignment]
    if config.ofs_embed_dim is not None:
        inputs["ofs"] = make.scalar(1, 2.0)
    return inputs


def _cosmos(make: Maker, config: Any, batch: int, latent: Triple) -> dict[str, Any]:
    inputs: dict[str, Any] = {
        "hidden_states": make.noise(batch, config.in_channels, *latent),
        "timestep": make.timestep(batch),
        "encoder_hidden_states": make.noise(batch, 512, config.text_embed_dim),
        "fps": 30,
    }
    if config.concat_padding_mask:
        inputs["padding_mask"] = torch.zeros_like(inputs["hidden_states"][:1, :1, 0])
    return inputs


def _mochi(make: Maker, config: Any, batch: int, latent: Triple) -> dict[str, Any]:
    return {
        "hidden_states": make.noise(batch, config.in_channels, *latent),
        "encoder_hidden_states": make.noise(batch, 256, config.text_embed_dim),
        "timestep": make.timestep(batch),
        "encoder_attention_mask": make.valid(batch, 256),
    }


def _ltx(make: Maker, config: Any, batch: int, latent: Triple) -> dict[str, Any]:
    frames, rows, cols = latent
    return {
        "hidden_states": make.noise(batch, frames * rows * cols, config.in_channels),
        "encoder_hidden_states": make.noise(batch, 128, config.caption_channels),
        "timestep": make.timestep(batch),
        "encoder_attention_mask": make.valid(batch, 128, torch.int64),
        "num_frames": frames,
        "height": rows,
        "width": cols,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def _allegro(make: Maker, config: Any, batch: int, latent: Triple) -> dict[str, Any]:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    frames, rows, cols = latent
    size = (rows // config.patch_size, cols // config.patch_size)
    made: Any = get_3d_rotary_pos_embed_allegro(
        embed_dim=config.attention_head_dim,
        crops_coords=((0, 0), size),
        grid_size=size,
        temporal_size=frames,
        interpolation_scale=(
            config.interpolation_scale_t,
            config.interpolation_scale_h,
            config.interpolation_scale_w,
        ),
        device=make.device,
    )
    tables, grids = made[:3], made[3:]
    positions = torch.cartesian_prod(*(grid.long() for grid in grids)).T.unsqueeze(1).contiguous()
    return {
        "hidden_states": make.noise(batch, config.in_channels, *latent),
        "encoder_hidden_states": make.noise(batch, 1, 512, config.caption_channels),
        "timestep": make.timestep(batch, torch.int64),
        "encoder_attention_mask": make.valid(batch, 512),
        "image_rotary_emb": (tables, tuple(positions)),
    }


MODELS: dict[str, VideoModel] = {
    "WanTransformer3DModel": VideoModel((4, 8, 8), 999, _wan),
    "HunyuanVideoTransformer3DModel": VideoModel((4, 8, 8), 1000, _hunyuan),
    "CogVideoXTransformer3DModel": VideoModel((4, 8, 8), 999, _cogvideox),
    # The padding mask is resized by torchvision, which this package does not need otherwise.
    "CosmosTransformer3DModel": VideoModel(
        (8, 8, 8), 0.25 * math.log(80), _cosmos, config={"concat_padding_mask": False}
    ),
    "MochiTransformer3DModel": VideoModel((6, 8, 8), 0, _mochi, meta=False),
    "LTXVideoTransformer3DModel": VideoModel((8, 32, 32), 1000, _ltx),
    "AllegroTransformer3DModel": VideoModel((4, 8, 8), 999, _allegro, causal=False),
}


def build(
    name: str,
    config: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
) -> torch.nn.Module:
    """The diffusers class with its default config and `config`, randomly initialised; on meta without weights."""
    known = _known(name)
    needs("diffusers")
    import diffusers

    settings = {**(known.config or {}), **(config or {})}
    try:
        with torch.device(device):
            model: torch.nn.Module = getattr(diffusers, name)(**settings)
    except TypeError as error:
        raise StaError(f"{error}; pass arguments of {name}'s constructor") from error
    for tensor in (*model.parameters(), *model.buffers()):
        # Not model.to(dtype): diffusers warns of it, for weights that are not random.
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model.eval()


def make_inputs(
    model: torch.nn.Module,
    latent: Triple,
    *,
    batch: int = 1,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Keyword arguments of `model.forward` for a latent of (T, H, W), before patchify."""
    config: Any = model.config
    known = _known(type(model).__name__)
    make = Maker(torch.device(device), dtype, known.first_timestep)
    return known.inputs(make, config, batch, latent) | {"return_dict": False}


@contextmanager
def without_weights(name: str) -> Iterator[str]:
    """The device on which `build` and `make_inputs` of this class cost no memory: meta, or a fake CPU."""
    if _known(name).meta:
        yield "meta"
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield "cpu"


def latent_of(name: str, frames: int, height: int, width: int) -> Triple:
    """The latent (T, H, W) of a video in pixels."""
    return _known(name).latent(frames, height, width)


def first_timestep(name: str) -> float:
    """The timestep with which a run of this model starts."""
    return _known(name).first_timestep


def _known(name: str) -> VideoModel:
    if name not in MODELS:
        raise StaError(
            f"the inputs of {name!r} are not known here; pass one of {', '.join(MODELS)}"
        )
    return MODELS[name]
