"""Qwen-Image, its editing forms and 2.1, and NucleusMoE: the shapes of images are Python numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .row import CHANNELS, HEAD_DIM, HEADS, IMAGE_GRIDS, TEXT_DIM, Built, Row, Size, transformer

REFERENCE = (1, 5, 7)  # grid of a second image
_QWEN: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "attention_head_dim": HEAD_DIM,
    "num_attention_heads": HEADS,
    "joint_attention_dim": TEXT_DIM,
    "axes_dims_rope": (8, 8, 8),
}


def qwen_image(size: Size, **config: Any) -> Built:
    """[text, image]; the shapes of images are Python lists."""
    kind = transformer("QwenImageTransformer2DModel")
    model = kind(**_QWEN, num_layers=size.layers, **config)
    return Built(
        model,
        {
            "hidden_states": size.packed(),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(1.0),
            "img_shapes": [[size.grid]] * size.batch,
            "return_dict": False,
        },
        before=size.text,
    )


def qwen_image_mask(size: Size) -> Built:
    return qwen_image(size).with_inputs(encoder_hidden_states_mask=size.valid(torch.bool))


def qwen_image_edit(size: Size, **config: Any) -> Built:
    """A second image of another grid follows the first."""
    built = qwen_image(size, **config)
    other = torch.randn(size.batch, REFERENCE[1] * REFERENCE[2], CHANNELS)
    return built.with_inputs(
        hidden_states=torch.cat((built.inputs["hidden_states"], other), 1),
        img_shapes=[[size.grid, REFERENCE]] * size.batch,
    )


def qwen_image_edit_plus(size: Size) -> Built:
    """The second image is modulated as at timestep 0."""
    return qwen_image_edit(size, zero_cond_t=True)


def qwen_image_layered(size: Size) -> Built:
    return qwen_image(size, use_layer3d_rope=True)


def qwen_image_21(size: Size) -> Built:
    """Text sees itself causally, and the image sees the text and itself; masks of places tell which is which."""
    kind = transformer("QwenImage21Transformer2DModel")
    model = kind(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=size.layers,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        context_in_dim=TEXT_DIM,
        mlp_ratio=2,
        axes_dims_rope=(8, 8, 8),
    )
    image = torch.arange(size.text + size.tokens // 4) >= size.text
    return Built(
        model,
        {
            "hidden_states": size.packed(),
            "encoder_hidden_states": size.prompt(),
            "timestep": torch.ones(1),
            "img_shapes": [[size.grid]] * size.batch,
            "img_mask": image.expand(size.batch, -1),
            "return_dict": False,
        },
        before=size.text,
        queries_before=0,
    )


def nucleus(size: Size) -> Built:
    """Queries of the image, keys of image and text, and experts that choose their tokens."""
    kind = transformer("NucleusMoEImageTransformer2DModel")
    model = kind(
        patch_size=1,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=size.layers,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(8, 8, 8),
        mlp_ratio=2.0,
        dense_moe_strategy="leave_first_block_dense",
        num_experts=2,
        moe_intermediate_dim=16,
        capacity_factors=1.0,
    )
    return Built(
        model,
        {
            "hidden_states": size.packed(),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(1.0),
            "img_shapes": [size.grid] * size.batch,
            "return_dict": False,
        },
        queries_before=0,
    )


def _row(mode: str, build: Callable[[Size], Built]) -> Row:
    sites = ("transformer_blocks.{}.attn",)
    return Row("QwenImageTransformer2DModel", mode, build, sites, grids=IMAGE_GRIDS)


ROWS = (
    _row("", qwen_image),
    _row("padded text", qwen_image_mask),
    _row("edit", qwen_image_edit),
    _row("edit, clean reference", qwen_image_edit_plus),
    _row("layered", qwen_image_layered),
    Row(
        "QwenImage21Transformer2DModel",
        "",
        qwen_image_21,
        ("transformer_blocks.{}.attn",),
        breaks=True,
        grids=((1, 12, 18), (1, 10, 14)),
    ),
    Row(
        "NucleusMoEImageTransformer2DModel",
        "",
        nucleus,
        ("transformer_blocks.{}.attn",),
        grids=IMAGE_GRIDS,
    ),
)
