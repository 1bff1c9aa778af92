"""CogVideoX, ConsisID and EasyAnimate: one sequence of the text with the video after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .row import CHANNELS, HEAD_DIM, HEADS, TEXT_DIM, Built, Row, Size, transformer


def _build(size: Size, kind: Any = None, **config: Any) -> Built:
    frames, rows, cols = size.grid
    model = (kind or transformer("CogVideoXTransformer3DModel"))(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        time_embed_dim=8,
        text_embed_dim=TEXT_DIM,
        num_layers=size.layers,
        sample_width=2 * cols,
        sample_height=2 * rows,
        sample_frames=(frames - 1) * 4 + 1,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=size.text,
        **config,
    )
    return Built(
        model,
        {
            "hidden_states": size.latent().transpose(1, 2),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(999, torch.int64),
            "return_dict": False,
        },
        before=size.text,
    )


def rope(size: Size, dim: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    """Any rotation per token, as a pipeline passes it: cos and sin, each twice."""
    angles = torch.randn(size.tokens, dim // 2).repeat_interleave(2, 1)
    return angles.cos(), angles.sin()


def cogvideox_2b(size: Size) -> Built:
    return _build(size)


def cogvideox_5b(size: Size) -> Built:
    built = _build(size, use_rotary_positional_embeddings=True)
    return built.with_inputs(image_rotary_emb=rope(size))


def cogvideox_i2v(size: Size) -> Built:
    """5B I2V: a learned table of positions beside rope, and the strength of the motion."""
    built = _build(
        size,
        use_rotary_positional_embeddings=True,
        use_learned_positional_embeddings=True,
        ofs_embed_dim=8,
    )
    return built.with_inputs(image_rotary_emb=rope(size), ofs=torch.full((1,), 2.0))


def cogvideox_15(size: Size) -> Built:
    """Patches of two frames, made by reshape and a linear layer."""
    built = _build(size, use_rotary_positional_embeddings=True, patch_size_t=2, patch_bias=False)
    latent = built.inputs["hidden_states"].repeat_interleave(2, 1)
    latent = latent + torch.randn_like(latent)
    return built.with_inputs(hidden_states=latent, image_rotary_emb=rope(size))


def consisid(size: Size) -> Built:
    """The video asks features of a face between its layers, by softmax written out."""
    inner = HEADS * HEAD_DIM
    built = _build(
        size,
        transformer("ConsisIDTransformer3DModel"),
        use_rotary_positional_embeddings=True,
        is_train_face=True,
        cross_attn_interval=1,
        cross_attn_dim_head=8,
        cross_attn_num_heads=2,
        LFE_id_dim=8,
        LFE_vit_dim=8,
        LFE_depth=2,
        LFE_dim_head=8,
        LFE_num_heads=1,
        LFE_num_id_token=2,
        LFE_num_querie=3,
        LFE_output_dim=inner * 2 // 3,
        LFE_ff_mult=1,
        LFE_num_scale=2,
    )
    return built.with_inputs(
        image_rotary_emb=rope(size),
        id_cond=torch.randn(size.batch, 8),
        id_vit_hidden=[torch.randn(size.batch, 4, 8) for _ in range(2)],
    )


def _easyanimate(size: Size, **config: Any) -> Built:
    model = transformer("EasyAnimateTransformer3DModel")(
        num_attention_heads=HEADS,
        attention_head_dim=16,  # a quarter of it for frames, the rest for rows and columns
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        patch_size=2,
        num_layers=size.layers,
        time_embed_dim=8,
        text_embed_dim=TEXT_DIM,
        **config,
    )
    return Built(
        model,
        {
            "hidden_states": size.latent(),
            "timestep": size.timestep(1000.0),
            "encoder_hidden_states": size.prompt(),
            "return_dict": False,
        },
        before=size.text,
    )


def easyanimate(size: Size) -> Built:
    """Its last layer has one stream of weights for text and video."""
    return _easyanimate(size, mmdit_layers=1)


def easyanimate_two_texts(size: Size) -> Built:
    built = _easyanimate(size, text_embed_dim_t5=TEXT_DIM, mmdit_layers=size.layers)
    built = built.with_inputs(encoder_hidden_states_t5=size.prompt())
    return Built(built.model, built.inputs, before=2 * size.text)


_ATTN1 = ("transformer_blocks.{}.attn1",)
ROWS = (
    Row("CogVideoXTransformer3DModel", "2b", cogvideox_2b, _ATTN1),
    Row("CogVideoXTransformer3DModel", "5b", cogvideox_5b, _ATTN1),
    Row("CogVideoXTransformer3DModel", "5b I2V", cogvideox_i2v, _ATTN1),
    Row("CogVideoXTransformer3DModel", "1.5", cogvideox_15, _ATTN1),
    Row("ConsisIDTransformer3DModel", "", consisid, _ATTN1),
    Row("EasyAnimateTransformer3DModel", "", easyanimate, _ATTN1),
    Row("EasyAnimateTransformer3DModel", "two texts", easyanimate_two_texts, _ATTN1),
)
