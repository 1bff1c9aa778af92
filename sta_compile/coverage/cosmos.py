"""Cosmos 1, 2, 2.5 and 3."""

from __future__ import annotations

from typing import Any

import torch

from .row import CHANNELS, HEAD_DIM, HEADS, TEXT_DIM, Built, Row, Size, transformer


def _build(size: Size, **config: Any) -> Built:
    frames, rows, cols = size.grid
    model = transformer("CosmosTransformer3DModel")(
        **{
            "in_channels": CHANNELS,
            "out_channels": CHANNELS,
            "num_attention_heads": HEADS,
            "attention_head_dim": HEAD_DIM,
            "num_layers": size.layers,
            "mlp_ratio": 2,
            "text_embed_dim": TEXT_DIM,
            "adaln_lora_dim": 4,
            "max_size": (frames, 2 * rows, 2 * cols),
            "patch_size": (1, 2, 2),
            "rope_scale": (2.0, 1.0, 1.0),
            # The padding mask is resized by torchvision, which this package does not need otherwise.
            "concat_padding_mask": False,
            "extra_pos_embed_type": None,
            **config,
        }
    )
    return Built(
        model,
        {
            "hidden_states": size.latent(),
            "timestep": size.timestep(0.25 * 4.382),  # 0.25 * log(80)
            "encoder_hidden_states": size.prompt(),
            "attention_mask": size.valid(torch.float32),
            "fps": 24,
            "return_dict": False,
        },
    )


def cosmos1(size: Size) -> Built:
    """A learned table of positions is added in every layer."""
    return _build(size, extra_pos_embed_type="learnable")


def cosmos2(size: Size) -> Built:
    return _build(size)


def cosmos2_v2w(size: Size) -> Built:
    """A timestep per frame, and a mask that tells which frames are given."""
    given = torch.zeros(size.batch, 1, size.grid[0], 2 * size.grid[1], 2 * size.grid[2])
    given[:, :, 0] = 1
    timestep = torch.full((size.batch, 1, size.grid[0], 1, 1), 0.98)
    timestep[:, :, 0] = 1e-4
    built = _build(size, in_channels=CHANNELS + 1)
    return built.with_inputs(condition_mask=given, timestep=timestep)


def cosmos25(size: Size) -> Built:
    """Text and image are asked side by side."""
    built = _build(
        size,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=TEXT_DIM,
        encoder_hidden_states_channels=TEXT_DIM,
        img_context_dim_in=8,
        img_context_num_tokens=3,
        img_context_dim_out=HEADS * HEAD_DIM,
    )
    image = torch.randn(size.batch, 3, 8)
    return built.with_inputs(encoder_hidden_states=(size.prompt(), image), attention_mask=None)


def cosmos3(size: Size) -> Built:
    """One sample; text sees itself causally, and the video sees the text and itself."""
    frames, rows, cols = size.grid
    model = transformer("Cosmos3OmniTransformer")(
        head_dim=HEAD_DIM,
        hidden_size=32,
        intermediate_size=32,
        latent_channel=CHANNELS,
        latent_patch_size=2,
        patch_latent_dim=4 * CHANNELS,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=size.layers,
        rope_axes_dim=[4, 4, 4],
        vocab_size=32,
    )
    text, total = size.text, size.text + size.tokens
    words = torch.arange(text).expand(3, -1)
    return Built(
        model,
        {
            "input_ids": torch.arange(text),
            "text_indexes": torch.arange(text),
            "position_ids": torch.cat((words, size.places().T + text), 1),
            "und_len": text,
            "sequence_length": total,
            "vision_tokens": [torch.randn(1, CHANNELS, frames, 2 * rows, 2 * cols)],
            "vision_token_shapes": [size.grid],
            "vision_sequence_indexes": torch.arange(text, total),
            "vision_mse_loss_indexes": torch.arange(text, total),
            "vision_timesteps": torch.full((size.tokens,), 999.0),
            "vision_noisy_frame_indexes": [torch.arange(frames)],
            "return_dict": False,
        },
        before=text,
        queries_before=0,
    )


def cosmos3_i2v(size: Size) -> Built:
    """The first frame is given: only the others carry a timestep and are predicted."""
    frames, rows, cols = size.grid
    built = cosmos3(size)
    first = rows * cols
    return Built(
        built.model,
        {
            **built.inputs,
            "vision_mse_loss_indexes": torch.arange(size.text + first, size.text + size.tokens),
            "vision_timesteps": torch.full((size.tokens - first,), 999.0),
            "vision_noisy_frame_indexes": [torch.arange(1, frames)],
        },
        before=built.before,
        queries_before=0,
    )


_ATTN1 = ("transformer_blocks.{}.attn1",)
_LAYERS = ("layers.{}.self_attn",)
ROWS = (
    Row("CosmosTransformer3DModel", "1", cosmos1, _ATTN1),
    Row("CosmosTransformer3DModel", "2", cosmos2, _ATTN1),
    Row("CosmosTransformer3DModel", "2 video to world", cosmos2_v2w, _ATTN1),
    Row("CosmosTransformer3DModel", "2.5 text and image", cosmos25, _ATTN1),
    Row("Cosmos3OmniTransformer", "T2V", cosmos3, _LAYERS),
    Row("Cosmos3OmniTransformer", "I2V", cosmos3_i2v, _LAYERS),
)
