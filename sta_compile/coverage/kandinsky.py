"""Kandinsky 5 and 6: latents with the channels last, rope as matrices of 2x2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .row import CHANNELS, HEAD_DIM, HEADS, TEXT_DIM, Built, Row, Size, transformer

POOLED, AUDIO = 8, 13
_AXES = (8, 8, 8)


def _latent(size: Size, channels: int = CHANNELS) -> Tensor:
    """[batch, frames, 2 * rows, 2 * cols, channels]"""
    return size.latent(channels).permute(0, 2, 3, 4, 1).contiguous()


def _kandinsky5(size: Size, **config: Any) -> Built:
    model = transformer("Kandinsky5Transformer3DModel")(
        in_visual_dim=CHANNELS,
        in_text_dim=TEXT_DIM,
        in_text_dim2=POOLED,
        time_dim=16,
        out_visual_dim=CHANNELS,
        model_dim=HEADS * HEAD_DIM,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=size.layers,
        axes_dims=_AXES,
        **config,
    )
    return Built(
        model,
        {
            "hidden_states": _latent(size),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(1000.0),
            "pooled_projections": torch.randn(size.batch, POOLED),
            "visual_rope_pos": tuple(torch.arange(length) for length in size.grid),
            "text_rope_pos": torch.arange(size.text),
            "return_dict": False,
        },
    )


def kandinsky5(size: Size) -> Built:
    return _kandinsky5(size)


def kandinsky5_nabla(size: Size) -> Built:
    """Blocks of 64 tokens are chosen by the values of queries and keys."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    built = _kandinsky5(size, attention_type="nabla")
    # Not by the model's own method, which sets the backend of all models.
    for module in built.model.modules():
        processor: Any = getattr(module, "processor", None)
        if processor is not None:
            processor._attention_backend = AttentionBackendName.FLEX
    blocks = size.tokens // 64
    prior = torch.eye(blocks, dtype=torch.bool)[None, None]
    return built.with_inputs(sparse_params={"sta_mask": prior, "P": 0.5, "to_fractal": True})


def _kandinsky6(size: Size, **config: Any) -> Built:
    model = transformer("Kandinsky6Transformer3DModel")(
        in_visual_dim=CHANNELS,
        out_visual_dim=CHANNELS,
        in_text_dim=TEXT_DIM,
        in_text_dim2=POOLED,
        time_dim=16,
        model_dim=HEADS * HEAD_DIM,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=size.layers,
        axes_dims=_AXES,
        visual_cond=False,
        in_audio_dim=CHANNELS,
        out_audio_dim=CHANNELS,
        **config,
    )
    return Built(
        model,
        {
            "hidden_states": _latent(size),
            "encoder_hidden_states": size.prompt(),
            "pooled_projections": torch.randn(size.batch, POOLED),
            "timestep": size.timestep(1000.0),
            "audio_hidden_states": torch.randn(size.batch, AUDIO, CHANNELS),
            "return_dict": False,
        },
    )


def kandinsky6(size: Size) -> Built:
    return _kandinsky6(size)


def kandinsky6_padded(size: Size) -> Built:
    """A mask of the text, types of frames, and rope in the attention between video and audio."""
    built = _kandinsky6(size, ca_rope=True, cross_gates=True, visual_token_type_num_embeddings=2)
    types = torch.ones(size.batch, size.grid[0], dtype=torch.int64)
    types[:, 0] = 0
    return built.with_inputs(
        visual_token_type_ids=types, encoder_attention_mask=size.valid(torch.bool)[:, None, None]
    )


def kandinsky6_sr(size: Size) -> Built:
    """Blocks of 1x8x8 tokens, a prior of sliding tiles, and more blocks chosen by values."""
    frames, rows, cols = size.grid
    model = transformer("Kandinsky6SRTransformer3DModel")(
        in_visual_dim=CHANNELS,
        out_visual_dim=CHANNELS,
        time_dim=16,
        model_dim=HEADS * HEAD_DIM,
        ff_dim=32,
        num_visual_blocks=size.layers,
        axes_dims=_AXES,
        nabla_window=(3, 1, 1),
    )
    latent = torch.randn(size.batch, frames, rows, cols, 2 * CHANNELS + 1)
    return Built(
        model,
        {"hidden_states": latent, "timestep": size.timestep(1000.0), "return_dict": False},
    )


_IN_BLOCKS = ((3, 16, 8), (2, 8, 24))  # rows and columns come in blocks of 8x8
ROWS = (
    Row(
        "Kandinsky5Transformer3DModel",
        "",
        kandinsky5,
        ("visual_transformer_blocks.{}.self_attention",),
    ),
    Row(
        "Kandinsky5Transformer3DModel",
        "NABLA",
        kandinsky5_nabla,
        refused="already sparse",
        grids=_IN_BLOCKS,
    ),
    Row(
        "Kandinsky6Transformer3DModel",
        "",
        kandinsky6,
        ("visual_transformer_blocks.{}.video_dec_block.self_attention",),
    ),
    Row(
        "Kandinsky6Transformer3DModel",
        "padded text",
        kandinsky6_padded,
        ("visual_transformer_blocks.{}.video_dec_block.self_attention",),
    ),
    Row(
        "Kandinsky6SRTransformer3DModel",
        "",
        kandinsky6_sr,
        refused="already sparse",
        grids=_IN_BLOCKS,
    ),
)
