"""Images in one sequence with the text, whose grid the model knows: SD3, AuraFlow, CogView, Z-Image, Lumina 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .row import CHANNELS, HEAD_DIM, HEADS, IMAGE_GRIDS, TEXT_DIM, Built, Row, Size, transformer

POOLED = 8


def sd3(size: Size, **config: Any) -> Built:
    """[image, text]; positions are cut from the middle of a table."""
    model = transformer("SD3Transformer2DModel")(
        sample_size=32,
        patch_size=2,
        in_channels=CHANNELS,
        num_layers=size.layers,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        caption_projection_dim=HEADS * HEAD_DIM,
        pooled_projection_dim=POOLED,
        out_channels=CHANNELS,
        pos_embed_max_size=24,
        **config,
    )
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "encoder_hidden_states": size.prompt(),
            "pooled_projections": torch.randn(size.batch, POOLED),
            "timestep": size.timestep(1000.0),
            "return_dict": False,
        },
    )


def sd35(size: Size) -> Built:
    """The first layer has a second attention of the image alone."""
    return sd3(size, dual_attention_layers=(0,), qk_norm="rms_norm")


def sd3_control(size: Size) -> Built:
    """Residuals of a ControlNet are added after each layer."""
    built = sd3(size)
    residuals = [size.packed(HEADS * HEAD_DIM) for _ in range(size.layers)]
    return built.with_inputs(block_controlnet_hidden_states=residuals)


def auraflow(size: Size) -> Built:
    """[registers, text, image]; a patch is a row of a reshape."""
    model = transformer("AuraFlowTransformer2DModel")(
        sample_size=32,
        patch_size=2,
        in_channels=CHANNELS,
        num_mmdit_layers=size.layers,
        num_single_dit_layers=size.layers,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        caption_projection_dim=HEADS * HEAD_DIM,
        out_channels=CHANNELS,
        pos_embed_max_size=576,
    )
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(1.0),
            "return_dict": False,
        },
        before=8 + size.text,
    )


def _cogview(size: Size, kind: Any, **config: Any) -> Built:
    model = kind(
        patch_size=2,
        in_channels=CHANNELS,
        num_layers=size.layers,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        out_channels=CHANNELS,
        text_embed_dim=TEXT_DIM,
        time_embed_dim=8,
        condition_dim=4,
        **config,
    )
    pair = torch.tensor([[256.0, 256.0]]).expand(size.batch, -1)
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(999, torch.int64),
            "original_size": pair,
            "target_size": pair,
            "crop_coords": torch.zeros_like(pair),
            "return_dict": False,
        },
        before=size.text,
    )


def cogview3(size: Size) -> Built:
    kind = transformer("CogView3PlusTransformer2DModel")
    return _cogview(size, kind, pos_embed_max_size=24, sample_size=32)


def cogview4(size: Size) -> Built:
    """Rope is written into the image's part of queries and keys in place."""
    kind = transformer("CogView4Transformer2DModel")
    return _cogview(size, kind, rope_axes_dim=(32, 32), sample_size=32)


def glm_image(size: Size) -> Built:
    """Tokens of a language model are added to those of the image."""
    kind = transformer("GlmImageTransformer2DModel")
    built = _cogview(size, kind, prior_vq_quantizer_codebook_size=16)
    inputs = {key: value for key, value in built.inputs.items() if key != "original_size"}
    tokens = (size.batch, size.tokens)
    prior = {
        "prior_token_id": torch.randint(0, 16, tokens),
        "prior_token_drop": torch.zeros(tokens, dtype=torch.bool),
    }
    return Built(built.model, {**inputs, **prior}, before=size.text)


def hunyuan_image(size: Size) -> Built:
    """[image, text], padding of the text masked."""
    kind = transformer("HunyuanImageTransformer2DModel")
    model = kind(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=size.layers,
        num_single_layers=size.layers,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=(2, 2),
        text_embed_dim=TEXT_DIM,
        rope_axes_dim=(12, 12),
    )
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "timestep": size.timestep(1000.0),
            "encoder_hidden_states": size.prompt(),
            "encoder_attention_mask": size.valid(torch.int64),
            "return_dict": False,
        },
    )


def ernie(size: Size) -> Built:
    """[image, text] with the tokens first and the batch second; padding of the text masked."""
    kind = transformer("ErnieImageTransformer2DModel")
    model = kind(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_layers=size.layers,
        ffn_hidden_size=32,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        patch_size=2,
        text_in_dim=TEXT_DIM,
        rope_axes_dim=(8, 8, 8),
    )
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "timestep": size.timestep(1000.0),
            "text_bth": size.prompt(),
            "text_lens": size.valid(torch.int64).sum(1),
            "return_dict": False,
        },
    )


def prx(size: Size) -> Built:
    """Queries of the image, keys of text and image."""
    kind = transformer("PRXTransformer2DModel")
    model = kind(
        in_channels=CHANNELS,
        patch_size=2,
        context_in_dim=TEXT_DIM,
        hidden_size=HEADS * 16,
        mlp_ratio=2.0,
        num_heads=HEADS,
        depth=size.layers,
        axes_dim=[8, 8],
    )
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "timestep": size.timestep(1.0),
            "encoder_hidden_states": size.prompt(),
            "return_dict": False,
        },
        before=size.text,
        queries_before=0,
    )


def prx_mask(size: Size) -> Built:
    return prx(size).with_inputs(attention_mask=size.valid(torch.bool))


def z_image(size: Size) -> Built:
    """[image, filling up to 32, text, filling]; images come as a list."""
    kind = transformer("ZImageTransformer2DModel")
    model = kind(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=CHANNELS,
        dim=HEADS * HEAD_DIM,
        n_layers=size.layers,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=TEXT_DIM,
        axes_dims=[8, 8, 8],
        axes_lens=[128, 64, 64],
    )
    return Built(
        model,
        {
            "x": list(size.latent()),
            "t": size.timestep(0.0),
            "cap_feats": list(size.prompt()),
            "return_dict": False,
        },
    )


def _lumina2(size: Size, mask: torch.Tensor) -> Built:
    """[valid text, image, filling], put together sample by sample; the image's first layers see the image alone."""
    kind = transformer("Lumina2Transformer2DModel")
    model = kind(
        sample_size=32,
        patch_size=2,
        in_channels=CHANNELS,
        hidden_size=HEADS * HEAD_DIM,
        num_layers=size.layers,
        num_refiner_layers=1,
        num_attention_heads=HEADS,
        num_kv_heads=1,
        axes_dim_rope=(8, 8, 8),
        axes_lens=(64, 64, 64),
        cap_feat_dim=TEXT_DIM,
        multiple_of=8,
    )
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "timestep": size.timestep(0.0),
            "encoder_hidden_states": size.prompt(),
            "encoder_attention_mask": mask,
            "return_dict": False,
        },
        before=size.text,
    )


def lumina2(size: Size) -> Built:
    return _lumina2(size, torch.ones(size.batch, size.text, dtype=torch.bool))


def _row(model: str, mode: str, build: Callable[[Size], Built], *sites: str, **more: Any) -> Row:
    return Row(model, mode, build, sites, grids=IMAGE_GRIDS, **more)


_ATTN, _ATTN1 = "transformer_blocks.{}.attn", "transformer_blocks.{}.attn1"
_SINGLE = "single_transformer_blocks.{}.attn"
ROWS = (
    _row("SD3Transformer2DModel", "", sd3, _ATTN),
    _row(
        "SD3Transformer2DModel",
        "3.5",
        sd35,
        _ATTN,
        "transformer_blocks.0.attn2",
        alone=("transformer_blocks.0.attn2",),
    ),
    _row("SD3Transformer2DModel", "ControlNet", sd3_control, _ATTN),
    _row("AuraFlowTransformer2DModel", "", auraflow, "joint_transformer_blocks.{}.attn", _SINGLE),
    _row("CogView3PlusTransformer2DModel", "", cogview3, _ATTN1),
    _row("CogView4Transformer2DModel", "", cogview4, _ATTN1),
    _row("GlmImageTransformer2DModel", "", glm_image, _ATTN1),
    _row("HunyuanImageTransformer2DModel", "", hunyuan_image, _ATTN, _SINGLE),
    _row("ErnieImageTransformer2DModel", "", ernie, "layers.{}.self_attention"),
    _row("PRXTransformer2DModel", "", prx, "blocks.{}.attention"),
    _row("PRXTransformer2DModel", "padded text", prx_mask, "blocks.{}.attention"),
    _row(
        "ZImageTransformer2DModel",
        "",
        z_image,
        "noise_refiner.0.attention",
        "layers.{}.attention",
        breaks=True,
    ),
    _row(
        "Lumina2Transformer2DModel",
        "",
        lumina2,
        "noise_refiner.0.attn",
        "layers.{}.attn",
        alone=("noise_refiner.0.attn",),
        breaks=True,
    ),
)
