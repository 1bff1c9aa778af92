"""HunyuanVideo, 1.5 and FramePack, and Motif: one sequence of the video with the text after it."""

from __future__ import annotations

from typing import Any

import torch

from .row import CHANNELS, HEAD_DIM, HEADS, TEXT_DIM, Built, Row, Size, transformer

POOLED = 8
_HUNYUAN: dict[str, Any] = {
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_DIM,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "patch_size": 2,
    "patch_size_t": 1,
    "text_embed_dim": TEXT_DIM,
    "rope_axes_dim": (8, 8, 8),
}


def _hunyuan(size: Size, kind: Any = None, **config: Any) -> Built:
    model = (kind or transformer("HunyuanVideoTransformer3DModel"))(
        **{
            **_HUNYUAN,
            "num_layers": size.layers,
            "num_single_layers": size.layers,
            "pooled_projection_dim": POOLED,
            **config,
        }
    )
    inputs = {
        "hidden_states": size.latent(),
        "timestep": size.timestep(1000, torch.int64),
        "encoder_hidden_states": size.prompt(),
        "encoder_attention_mask": size.valid(torch.int64),
        "pooled_projections": torch.randn(size.batch, POOLED),
        "return_dict": False,
    }
    if model.config.guidance_embeds:
        inputs["guidance"] = size.timestep(6000.0)
    return Built(model, inputs)


def hunyuan(size: Size) -> Built:
    return _hunyuan(size)


def hunyuan_token_replace(size: Size) -> Built:
    """The first frame is modulated by numbers of its own, in every layer."""
    return _hunyuan(size, image_condition_type="token_replace", guidance_embeds=False)


def hunyuan_latent_concat(size: Size) -> Built:
    return _hunyuan(size, image_condition_type="latent_concat", guidance_embeds=False)


def framepack(size: Size) -> Built:
    """[history at a quarter, at half, in full, video, text]; a batch of one trims its text by value."""
    built = _hunyuan(
        size,
        transformer("HunyuanVideoFramepackTransformer3DModel"),
        has_image_proj=True,
        image_proj_dim=8,
        has_clean_x_embedder=True,
    )
    frames, rows, cols = size.grid

    def past(count: int) -> torch.Tensor:
        return torch.randn(size.batch, CHANNELS, count, 2 * rows, 2 * cols)

    def index(start: int, count: int) -> torch.Tensor:
        return torch.arange(start, start + count)

    half, quarter = _ceil(rows, 2) * _ceil(cols, 2), _ceil(rows, 4) * _ceil(cols, 4)
    built = built.with_inputs(
        image_embeds=torch.randn(size.batch, 3, 8),
        indices_latents=index(22, frames),
        latents_clean=past(2),
        indices_latents_clean=index(20, 2),
        latents_history_2x=past(2),
        indices_latents_history_2x=index(18, 2),
        latents_history_4x=past(4),
        indices_latents_history_4x=index(14, 4),
    )
    return Built(built.model, built.inputs, before=2 * rows * cols + half + quarter)


def _ceil(length: int, by: int) -> int:
    return -(-length // by)


def _hunyuan15(size: Size, image: torch.Tensor) -> Built:
    """[video, valid text, padding]: the text is sorted by values of its masks, and all pairs with padding are masked."""
    model = transformer("HunyuanVideo15Transformer3DModel")(
        **{
            **_HUNYUAN,
            "num_layers": size.layers,
            "patch_size": 2,
            "text_embed_2_dim": 8,
            "image_embed_dim": image.shape[-1],
            "target_size": 16,
        }
    )
    second = torch.tensor([[1, 1, 0]] * size.batch)
    return Built(
        model,
        {
            "hidden_states": size.latent(),
            "timestep": size.timestep(1000.0),
            "encoder_hidden_states": size.prompt(),
            "encoder_attention_mask": size.valid(torch.int64),
            "encoder_hidden_states_2": torch.randn(size.batch, 3, 8),
            "encoder_attention_mask_2": second,
            "image_embeds": image,
            "return_dict": False,
        },
    )


def hunyuan15(size: Size) -> Built:
    return _hunyuan15(size, torch.zeros(size.batch, 4, 8))


def hunyuan15_i2v(size: Size) -> Built:
    return _hunyuan15(size, torch.randn(size.batch, 4, 8))


def _motif(size: Size, **config: Any) -> Built:
    settings = {key: value for key, value in _HUNYUAN.items() if key != "num_refiner_layers"}
    model = transformer("MotifVideoTransformer3DModel")(
        **{
            **settings,
            "num_layers": size.layers,
            "num_single_layers": size.layers,
            "image_embed_dim": 8,
            **config,
        }
    )
    return Built(
        model,
        {
            "hidden_states": size.latent(),
            "timestep": size.timestep(1000.0),
            "encoder_hidden_states": size.prompt(),
            "encoder_attention_mask": size.valid(torch.int64),
            "image_embeds": torch.randn(size.batch, 4, 8),
            "return_dict": False,
        },
    )


def motif(size: Size) -> Built:
    return _motif(size)


def motif_cross(size: Size) -> Built:
    """Beside the joint attention, its output asks the text once more."""
    return _motif(
        size, enable_text_cross_attention_dual=True, enable_text_cross_attention_single=True
    )


def motif_decoder(size: Size) -> Built:
    """The last layer attends over the video twice: [tokens of the patches, tokens of the layers before]."""
    return _motif(size, num_decoder_layers=1)


_JOINT = ("transformer_blocks.{}.attn", "single_transformer_blocks.{}.attn")
_DUAL = ("transformer_blocks.{}.attn",)
ROWS = (
    Row("HunyuanVideoTransformer3DModel", "T2V", hunyuan, _JOINT),
    Row("HunyuanVideoTransformer3DModel", "I2V, token_replace", hunyuan_token_replace, _JOINT),
    Row("HunyuanVideoTransformer3DModel", "I2V, latent_concat", hunyuan_latent_concat, _JOINT),
    Row("HunyuanVideo15Transformer3DModel", "T2V", hunyuan15, _DUAL, breaks=True),
    Row("HunyuanVideo15Transformer3DModel", "I2V", hunyuan15_i2v, _DUAL, breaks=True),
    Row("HunyuanVideoFramepackTransformer3DModel", "", framepack, _JOINT),
    Row("MotifVideoTransformer3DModel", "", motif, _JOINT),
    Row("MotifVideoTransformer3DModel", "text cross-attention", motif_cross, _JOINT),
    Row("MotifVideoTransformer3DModel", "decoder layers", motif_decoder, _JOINT),
)
