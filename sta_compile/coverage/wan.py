"""Wan and what grew from it: SkyReels-V2, ChronoEdit, AnyFlow, Helios."""

from __future__ import annotations

from typing import Any

import torch

from .row import CHANNELS, HEAD_DIM, HEADS, TEXT_DIM, Built, Row, Size, transformer

_WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_DIM,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "text_dim": TEXT_DIM,
    "freq_dim": 16,
    "ffn_dim": 32,
    "cross_attn_norm": True,
}
IMAGE_DIM, IMAGE_TOKENS = 8, 257


def _build(size: Size, kind: Any = None, **config: Any) -> Built:
    model = (kind or transformer("WanTransformer3DModel"))(
        **{**_WAN, "num_layers": size.layers, **config}
    )
    return Built(
        model,
        {
            "hidden_states": size.latent(),
            "timestep": size.timestep(999, torch.int64),
            "encoder_hidden_states": size.prompt(),
            "return_dict": False,
        },
    )


def wan(size: Size) -> Built:
    return _build(size)


def _of_image(size: Size, kind: Any = None) -> Built:
    """Cross-attention to text and to an image, of lengths of which the model knows only 512."""
    built = _build(size, kind, image_dim=IMAGE_DIM, added_kv_proj_dim=HEADS * HEAD_DIM)
    return built.with_inputs(
        encoder_hidden_states=torch.randn(size.batch, 512, TEXT_DIM),
        encoder_hidden_states_image=torch.randn(size.batch, IMAGE_TOKENS, IMAGE_DIM),
    )


def wan_i2v(size: Size) -> Built:
    return _of_image(size)


def wan_ti2v(size: Size) -> Built:
    """Wan 2.2: a timestep per token, 0 in the first frame, which is given."""
    timestep = torch.full((size.batch, size.grid[0], size.tokens // size.grid[0]), 999)
    timestep[:, 0] = 0
    return _build(size).with_inputs(timestep=timestep.flatten(1))


def wan_vace(size: Size) -> Built:
    """A control stream with attention of its own over the same grid; it adds to the video in each layer."""
    built = _build(
        size,
        transformer("WanVACETransformer3DModel"),
        vace_layers=list(range(size.layers)),
        vace_in_channels=6,
    )
    return built.with_inputs(control_hidden_states=size.latent(6))


def wan_animate(size: Size) -> Built:
    """Adds poses to all but the first frame in place; faces by attention from each frame to few tokens of its own."""
    built = _build(
        size,
        transformer("WanAnimateTransformer3DModel"),
        in_channels=2 * CHANNELS + 4,
        latent_channels=CHANNELS,
        image_dim=IMAGE_DIM,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=min(2, size.layers),
    )
    latent = size.latent(2 * CHANNELS + 4)
    return built.with_inputs(
        hidden_states=latent,
        pose_hidden_states=torch.randn_like(latent[:, :CHANNELS, 1:]),
        face_pixel_values=torch.randn(size.batch, 3, 4 * (size.grid[0] - 1) - 3, 16, 16),
        encoder_hidden_states_image=torch.randn(size.batch, 5, IMAGE_DIM),
    )


def _animate2(size: Size, mode: str) -> Built:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    dim = HEADS * HEAD_DIM
    model = transformer("WanAnimate2Transformer3DModel")(
        text_len=size.text,
        in_dim=2 * CHANNELS,
        dim=dim,
        ffn_dim=32,
        freq_dim=16,
        text_dim=TEXT_DIM,
        out_dim=CHANNELS,
        num_heads=HEADS,
        num_layers=size.layers,
        use_img_emb=False,
    )
    frames, rows, cols = size.grid
    grid = torch.tensor([[frames, rows, cols]] * size.batch)
    cache = WanAnimate2KVCache(size.layers)
    inputs: dict[str, Any] = {
        "hidden_states": list(size.latent()),
        "condition_latents": list(size.latent()),
        "encoder_hidden_states": list(size.prompt()),
        "timestep": size.timestep(999.0),
        "kv_cache": cache,
        "kv_cache_mode": mode,
        "seq_len": size.tokens,
        "return_dict": False,
    }
    if mode == "extract":
        return Built(model, {**inputs, "offset_grid_sizes": grid})
    for layer in range(size.layers):
        cache.get(layer).store(
            *(torch.randn(size.batch, size.tokens, HEADS, HEAD_DIM) for _ in range(2))
        )
    pixels = {"origin_len": 4 * (frames - 1), "origin_area": [16 * rows, 16 * cols]}
    return Built(model, {**inputs, **pixels, "reference_grid_sizes": grid})


def animate2_extract(size: Size) -> Built:
    return _animate2(size, "extract")


def animate2_cached(size: Size) -> Built:
    return _animate2(size, "cached")


def skyreels(size: Size) -> Built:
    return _build(size, transformer("SkyReelsV2Transformer3DModel"))


def skyreels_i2v(size: Size) -> Built:
    return _of_image(size, transformer("SkyReelsV2Transformer3DModel"))


def skyreels_forcing(size: Size) -> Built:
    """Diffusion forcing: a timestep per frame."""
    built = _build(size, transformer("SkyReelsV2Transformer3DModel"), inject_sample_info=True)
    return built.with_inputs(
        timestep=torch.full((size.batch, size.grid[0]), 999),
        enable_diffusion_forcing=True,
        fps=[0],
    )


def skyreels_causal(size: Size) -> Built:
    """A frame sees its own block of frames and those before: a mask over the video."""
    return _build(size, transformer("SkyReelsV2Transformer3DModel"), num_frame_per_block=2)


def chronoedit(size: Size) -> Built:
    return _of_image(size, transformer("ChronoEditTransformer3DModel"))


def _anyflow(size: Size, kind: Any, **config: Any) -> Built:
    built = _build(size, kind, **config)
    frames = (size.batch, size.grid[0])
    return built.with_inputs(
        hidden_states=size.latent().transpose(1, 2),
        timestep=torch.full(frames, 999.0),
        r_timestep=torch.full(frames, 500.0),
    )


def anyflow(size: Size) -> Built:
    return _anyflow(size, transformer("AnyFlowTransformer3DModel"))


def anyflow_far(size: Size) -> Built:
    """Chunks of frames, causal by a block mask of flex attention."""
    kind = transformer("AnyFlowFARTransformer3DModel")
    built = _anyflow(size, kind, compressed_patch_size=(1, 4, 4), full_chunk_limit=3)
    return built.with_inputs(chunk_partition=[1, size.grid[0] - 1])


def _helios(size: Size, **config: Any) -> Built:
    return _build(
        size,
        transformer("HeliosTransformer3DModel"),
        rope_dim=(8, 8, 8),
        guidance_cross_attn=True,
        **config,
    )


def helios(size: Size) -> Built:
    """The first chunk: there is no history yet."""
    return _helios(size, zero_history_timestep=False)


def helios_history(size: Size, **config: Any) -> Built:
    """[long, mid, short history, video]; each history has patches of its own size."""
    built = _helios(size, **config)
    frames, rows, cols = size.grid
    counts = {"short": 2, "mid": 2, "long": 4}
    inputs: dict[str, Any] = {}
    start = 0
    for name, count in reversed(counts.items()):
        inputs[f"latents_history_{name}"] = torch.randn(
            size.batch, CHANNELS, count, 2 * rows, 2 * cols
        )
        index = torch.arange(start, start + count).expand(size.batch, -1)
        inputs[f"indices_latents_history_{name}"] = index
        start += count
    inputs["indices_hidden_states"] = torch.arange(start, start + frames).expand(size.batch, -1)
    before = 2 * rows * cols + _ceil(rows, 2) * _ceil(cols, 2) + _ceil(rows, 4) * _ceil(cols, 4)
    built = built.with_inputs(**inputs)
    return Built(built.model, built.inputs, before=before)


def helios_amplified(size: Size) -> Built:
    """Keys of the history are scaled per head."""
    return helios_history(size, is_amplify_history=True)


def _ceil(length: int, by: int) -> int:
    return -(-length // by)


_ATTN1 = ("blocks.{}.attn1",)
ROWS = (
    Row("WanTransformer3DModel", "2.1 T2V", wan, _ATTN1),
    Row("WanTransformer3DModel", "2.1 I2V", wan_i2v, _ATTN1),
    Row("WanTransformer3DModel", "2.2 TI2V", wan_ti2v, _ATTN1),
    Row("WanVACETransformer3DModel", "", wan_vace, ("vace_blocks.{}.attn1", *_ATTN1)),
    Row("WanAnimateTransformer3DModel", "", wan_animate, _ATTN1),
    Row(
        "WanAnimate2Transformer3DModel",
        "reference pass",
        animate2_extract,
        ("blocks.{}.self_attn",),
        breaks=True,
    ),
    Row(
        "WanAnimate2Transformer3DModel",
        "generation pass",
        animate2_cached,
        refused="a block mask over video keys",
        breaks=True,
    ),
    Row("SkyReelsV2Transformer3DModel", "T2V", skyreels, _ATTN1),
    Row("SkyReelsV2Transformer3DModel", "I2V", skyreels_i2v, _ATTN1),
    Row("SkyReelsV2Transformer3DModel", "diffusion forcing", skyreels_forcing, _ATTN1),
    Row(
        "SkyReelsV2Transformer3DModel",
        "causal",
        skyreels_causal,
        refused="a mask over video keys",
        grids=((6, 9, 11), (4, 8, 14)),
    ),
    Row("ChronoEditTransformer3DModel", "", chronoedit, _ATTN1),
    Row("AnyFlowTransformer3DModel", "", anyflow, _ATTN1),
    Row(
        "AnyFlowFARTransformer3DModel",
        "",
        anyflow_far,
        refused="a block mask over video keys",
    ),
    Row("HeliosTransformer3DModel", "first chunk", helios, _ATTN1),
    Row("HeliosTransformer3DModel", "with history", helios_history, _ATTN1),
    Row("HeliosTransformer3DModel", "amplified history", helios_amplified, _ATTN1),
)
