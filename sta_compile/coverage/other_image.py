"""Images that ask the text by cross-attention, and models whose masks or linear attention leave nothing to replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .row import CHANNELS, HEAD_DIM, HEADS, IMAGE_GRIDS, TEXT_DIM, Built, Row, Size, transformer


def pixart(size: Size) -> Built:
    model = transformer("PixArtTransformer2DModel")(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=CHANNELS,
        out_channels=2 * CHANNELS,
        num_layers=size.layers,
        cross_attention_dim=HEADS * HEAD_DIM,
        sample_size=32,
        patch_size=2,
        caption_channels=TEXT_DIM,
        use_additional_conditions=False,
    )
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(999, torch.int64),
            "encoder_attention_mask": size.valid(torch.float32),
            "return_dict": False,
        },
    )


def hunyuan_dit(size: Size) -> Built:
    """Late layers take what early ones gave; rope comes from the caller."""
    text, pooled = 4, 8
    model = transformer("HunyuanDiT2DModel")(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=CHANNELS,
        patch_size=2,
        sample_size=32,
        hidden_size=HEADS * HEAD_DIM,
        num_layers=4,
        mlp_ratio=2.0,
        cross_attention_dim=TEXT_DIM,
        cross_attention_dim_t5=TEXT_DIM,
        pooled_projection_dim=pooled,
        text_len=size.text,
        text_len_t5=text,
    )
    angles = torch.randn(size.tokens, HEAD_DIM // 2).repeat_interleave(2, 1)
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "timestep": size.timestep(999.0),
            "encoder_hidden_states": size.prompt(),
            "text_embedding_mask": size.valid(torch.float32),
            "encoder_hidden_states_t5": torch.randn(size.batch, text, TEXT_DIM),
            "text_embedding_mask_t5": torch.ones(size.batch, text),
            "image_meta_size": torch.ones(size.batch, 6),
            "style": torch.zeros(size.batch, dtype=torch.int64),
            "image_rotary_emb": (angles.cos(), angles.sin()),
            "return_dict": False,
        },
    )


def dit(size: Size) -> Built:
    """Square images only."""
    model = transformer("DiTTransformer2DModel")(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=CHANNELS,
        num_layers=size.layers,
        sample_size=2 * size.grid[1],
        num_embeds_ada_norm=10,
    )
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "timestep": size.timestep(999, torch.int64),
            "class_labels": torch.zeros(size.batch, dtype=torch.int64),
            "return_dict": False,
        },
    )


def lumina_next(size: Size) -> Built:
    """A mask over the image that is made of ones; rope is cut from a table of rows and columns."""
    import diffusers.models.embeddings as embeddings

    rope: Any = embeddings.get_2d_rotary_pos_embed_lumina
    model = transformer("LuminaNextDiT2DModel")(
        sample_size=32,
        patch_size=2,
        in_channels=CHANNELS,
        hidden_size=HEADS * HEAD_DIM,
        num_layers=size.layers,
        num_attention_heads=HEADS,
        num_kv_heads=1,
        multiple_of=8,
        cross_attention_dim=TEXT_DIM,
        learn_sigma=False,
    )
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "timestep": size.timestep(0.0),
            "encoder_hidden_states": size.prompt(),
            "encoder_mask": size.valid(torch.int64),
            "image_rotary_emb": rope(HEAD_DIM, 24, 24),
            "cross_attention_kwargs": {},
            "return_dict": False,
        },
    )


def _in_unet(size: Size, kind: Any, **config: Any) -> Built:
    model = kind(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=32,
        num_layers=size.layers,
        cross_attention_dim=TEXT_DIM,
        **config,
    )
    frames, rows, cols = size.grid
    return Built(
        model,
        {
            "hidden_states": torch.randn(size.batch * frames, 32, rows, cols),
            "encoder_hidden_states": size.prompt(),
            "return_dict": False,
        },
    )


def transformer_2d(size: Size) -> Built:
    """A part of a UNet: each pixel of a feature map is a token."""
    return _in_unet(size, transformer("Transformer2DModel"))


def dreamlite(size: Size) -> Built:
    return _in_unet(size, transformer("DreamLiteTransformer2DModel"), qk_norm="rms_norm", ff_mult=2)


def hidream(size: Size) -> Built:
    """[image, filling unless it is square, texts]; filling has keys of zero. Experts are chosen for each token."""
    kind = transformer("HiDreamImageTransformer2DModel")
    model = kind(
        patch_size=2,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=size.layers,
        num_single_layers=size.layers,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        caption_channels=[TEXT_DIM, TEXT_DIM],
        text_emb_dim=8,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=(8, 8, 8),
        max_resolution=(48, 48),
        llama_layers=[0] * (2 * size.layers),
        force_inference_output=True,
    )
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "timesteps": size.timestep(1000.0),
            "encoder_hidden_states_t5": size.prompt(),
            "encoder_hidden_states_llama3": size.prompt()[None],
            "pooled_embeds": torch.randn(size.batch, 8),
            "return_dict": False,
        },
    )


def sana(size: Size) -> Built:
    """Linear attention, and cross-attention to text."""
    model = transformer("SanaTransformer2DModel")(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=size.layers,
        num_cross_attention_heads=HEADS,
        cross_attention_head_dim=HEAD_DIM,
        cross_attention_dim=HEADS * HEAD_DIM,
        caption_channels=TEXT_DIM,
        mlp_ratio=2.0,
        sample_size=32,
        patch_size=2,
    )
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(999, torch.int64),
            "return_dict": False,
        },
    )


def omnigen(size: Size) -> Built:
    """[words and time, image] under a mask of the caller over all pairs."""
    model = transformer("OmniGenTransformer2DModel")(
        in_channels=CHANNELS,
        patch_size=2,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=32,
        num_layers=size.layers,
        pad_token_id=0,
        vocab_size=32,
        pos_embed_max_size=24,
        time_step_dim=8,
        rope_scaling={
            "long_factor": [1.0] * (HEAD_DIM // 2),
            "short_factor": [1.0] * (HEAD_DIM // 2),
        },
    )
    total = size.text + 1 + size.tokens
    mask = torch.ones(size.batch, total, total).tril()
    mask[:, size.text + 1 :] = 1
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "timestep": size.timestep(0.0),
            "input_ids": torch.arange(size.text).expand(size.batch, -1),
            "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": mask,
            "position_ids": torch.arange(total).expand(size.batch, -1),
            "return_dict": False,
        },
    )


def ideogram4(size: Size) -> Built:
    """Samples packed into one sequence: tokens see those of the same number, which is data."""
    kind = transformer("Ideogram4Transformer2DModel")
    model = kind(
        in_channels=CHANNELS,
        num_layers=size.layers,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        intermediate_size=32,
        adaln_dim=16,
        llm_features_dim=TEXT_DIM,
        mrope_section=(4, 4, 4),
    )
    total = size.text + size.tokens
    words = torch.arange(size.text)[:, None].expand(-1, 3)
    places = torch.cat((words, size.places() + size.text)).expand(size.batch, -1, -1)
    return Built(
        model,
        {
            "hidden_states": torch.randn(size.batch, total, CHANNELS),
            "timestep": size.timestep(0.0),
            "encoder_hidden_states": torch.randn(size.batch, total, TEXT_DIM),
            "position_ids": places,
            "segment_ids": torch.ones(size.batch, total, dtype=torch.int64),
            "indicator": torch.tensor([3] * size.text + [2] * size.tokens).expand(size.batch, -1),
            "return_dict": False,
        },
    )


def _row(model: str, mode: str, build: Callable[[Size], Built], *sites: str, **more: Any) -> Row:
    return Row(model, mode, build, sites, **{"grids": IMAGE_GRIDS, **more})


_ATTN1 = "transformer_blocks.{}.attn1"
_HIDREAM = (
    "double_stream_blocks.{}.block.attn1",
    "single_stream_blocks.{}.block.attn1",
)
_SQUARE = ((1, 12, 12), (1, 9, 9))
ROWS = (
    _row("PixArtTransformer2DModel", "", pixart, _ATTN1),
    _row("HunyuanDiT2DModel", "", hunyuan_dit, "blocks.{}.attn1", layers=4),
    _row("DiTTransformer2DModel", "", dit, _ATTN1, grids=_SQUARE),
    _row("LuminaNextDiT2DModel", "", lumina_next, "layers.{}.attn1"),
    _row("Transformer2DModel", "", transformer_2d, _ATTN1),
    _row("DreamLiteTransformer2DModel", "", dreamlite, _ATTN1),
    _row(
        "HiDreamImageTransformer2DModel",
        "square",
        hidream,
        *_HIDREAM,
        breaks=True,
        layers=1,
        grids=_SQUARE,
    ),
    _row("HiDreamImageTransformer2DModel", "filled up", hidream, *_HIDREAM, breaks=True, layers=1),
    _row("SanaTransformer2DModel", "", sana, refused="linear attention"),
    _row("OmniGenTransformer2DModel", "", omnigen, refused="a mask over image keys", breaks=True),
    _row("Ideogram4Transformer2DModel", "", ideogram4, refused="a mask over image keys"),
)
