"""FLUX and models like it: patches are made outside, and ids of every token tell where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .row import CHANNELS, HEAD_DIM, HEADS, IMAGE_GRIDS, TEXT_DIM, Built, Row, Size, transformer

POOLED = 8
REFERENCE = (1, 5, 7)  # grid of a second image
_CORE: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": CHANNELS,
    "attention_head_dim": HEAD_DIM,
    "num_attention_heads": HEADS,
    "joint_attention_dim": TEXT_DIM,
    "axes_dims_rope": (8, 8, 8),
}


def _layers(size: Size) -> dict[str, int]:
    return {"num_layers": size.layers, "num_single_layers": size.layers}


def ids(size: Size, axes: int = 3) -> Tensor:
    """float [tokens, axes]: zeros, and the row and the column last in three axes, or in the middle of four."""
    places = size.places().float()
    return places if axes == 3 else torch.nn.functional.pad(places, (0, axes - 3))


def _inputs(size: Size, axes: int = 3) -> dict[str, Any]:
    return {
        "hidden_states": size.packed(),
        "encoder_hidden_states": size.prompt(),
        "timestep": size.timestep(1.0),
        "img_ids": ids(size, axes),
        "txt_ids": torch.zeros(size.text, axes),
        "return_dict": False,
    }


def _with_reference(size: Size, built: Built, ahead: int = 1) -> Built:
    """Tokens of a second image follow those of the first, told apart by the first of the ids."""
    other = replace(size, grid=REFERENCE)
    shifted = ids(other, built.inputs["img_ids"].shape[-1])
    shifted[:, 0] = ahead
    return built.with_inputs(
        hidden_states=torch.cat((built.inputs["hidden_states"], other.packed()), 1),
        img_ids=torch.cat((built.inputs["img_ids"], shifted)),
    )


def flux(size: Size) -> Built:
    model = transformer("FluxTransformer2DModel")(
        **_CORE, **_layers(size), pooled_projection_dim=POOLED, guidance_embeds=True
    )
    inputs = _inputs(size) | {
        "pooled_projections": torch.randn(size.batch, POOLED),
        "guidance": size.timestep(3.5),
    }
    return Built(model, inputs, before=size.text)


def flux_kontext(size: Size) -> Built:
    return _with_reference(size, flux(size))


def flux_control(size: Size) -> Built:
    """Residuals of a ControlNet are added after each layer, in the order in which they came."""
    built = flux(size)
    dim = HEADS * HEAD_DIM
    return built.with_inputs(
        controlnet_block_samples=[size.packed(dim) for _ in range(size.layers)],
        controlnet_single_block_samples=[size.packed(dim) for _ in range(size.layers)],
    )


_FLUX2: dict[str, Any] = {
    **{key: value for key, value in _CORE.items() if key != "patch_size"},
    "axes_dims_rope": (6, 6, 6, 6),
    "mlp_ratio": 2.0,
}


def flux2(size: Size) -> Built:
    model = transformer("Flux2Transformer2DModel")(
        **_FLUX2, **_layers(size), timestep_guidance_channels=16
    )
    inputs = _inputs(size, 4) | {"guidance": size.timestep(4.0)}
    return Built(model, inputs, before=size.text)


def flux2_reference(size: Size) -> Built:
    return _with_reference(size, flux2(size), ahead=10)


def flux3(size: Size) -> Built:
    """Image and text have layers of their own first."""
    kind = transformer("Flux3Transformer2DModel")
    model = kind(**_FLUX2, **_layers(size), cond_in_channels=CHANNELS, timestep_channels=16)
    return Built(model, _inputs(size, 4), before=size.text)


def flux3_reference(size: Size) -> Built:
    """The reference has a stream of its own before the layers in common: [text, image, reference]."""
    built = flux3(size)
    other = replace(size, grid=REFERENCE)
    shifted = ids(other, 4)
    shifted[:, 0] = 10
    built = built.with_inputs(image_cond_hidden_states=other.packed(), image_cond_ids=shifted)
    return replace(built, other_grids={"mode_blocks.image_cond.": REFERENCE})


def chroma(size: Size) -> Built:
    model = transformer("ChromaTransformer2DModel")(
        **_CORE,
        **_layers(size),
        approximator_num_channels=16,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    return Built(model, _inputs(size), before=size.text)


def chroma_mask(size: Size) -> Built:
    """A mask of the caller over text and image, which says no more than what of the text is padding."""
    image = torch.ones(size.batch, size.tokens, dtype=torch.bool)
    mask = torch.cat((size.valid(torch.bool), image), 1)
    return chroma(size).with_inputs(attention_mask=mask)


def bria(size: Size) -> Built:
    kind = transformer("BriaTransformer2DModel")
    model = kind(**{**_CORE, "axes_dims_rope": [8, 8, 8]}, **_layers(size))
    return Built(model, _inputs(size), before=size.text)


def bria_fibo(size: Size) -> Built:
    """Half of the text's channels are replaced before each layer."""
    kind = transformer("BriaFiboTransformer2DModel")
    model = kind(**{**_CORE, "axes_dims_rope": [8, 8, 8]}, **_layers(size), text_encoder_dim=8)
    texts = [torch.randn(size.batch, size.text, 8) for _ in range(2 * size.layers)]
    return Built(model, _inputs(size) | {"text_encoder_layers": texts}, before=size.text)


def bria_fibo2(size: Size) -> Built:
    """A text of few tokens stands before the image; ids are made from the shape of the latent."""
    kind = transformer("BriaFibo2Transformer2DModel")
    model = kind(
        in_channels=CHANNELS,
        dim=HEADS * HEAD_DIM,
        n_layers=size.layers,
        n_refiner_layers=1,
        n_heads=HEADS,
        cap_feat_dim=TEXT_DIM,
        injection_layer_ids=(0,),
        perceiver_num_layers=1,
        min_num_gist_tokens=4,
        max_num_gist_tokens=8,
        gist_step=2,
        gist_min_text_len=2,
        gist_max_text_len=16,
        axes_dims=(8, 8, 8),
        axes_lens=(64, 64, 64),
    )
    texts = torch.randn(size.batch, 2, size.text, TEXT_DIM)
    return Built(
        model,
        {
            "hidden_states": size.picture(),
            "timestep": size.timestep(0.0),
            "encoder_hidden_states": texts,
            "return_dict": False,
        },
        before=6,
    )


def longcat(size: Size) -> Built:
    kind = transformer("LongCatImageTransformer2DModel")
    config = {**_CORE, "axes_dims_rope": [8, 8, 8], "pooled_projection_dim": POOLED}
    return Built(kind(**config, **_layers(size)), _inputs(size), before=size.text)


def ovis(size: Size) -> Built:
    kind = transformer("OvisImageTransformer2DModel")
    model = kind(**_CORE, **_layers(size), out_channels=CHANNELS)
    return Built(model, _inputs(size), before=size.text)


def krea2(size: Size) -> Built:
    """Text of several layers is joined first; position ids cover text and image."""
    kind = transformer("Krea2Transformer2DModel")
    model = kind(
        in_channels=CHANNELS,
        num_layers=size.layers,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=TEXT_DIM,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(8, 8, 8),
    )
    return Built(
        model,
        {
            "hidden_states": size.packed(),
            "encoder_hidden_states": torch.randn(size.batch, size.text, 2, TEXT_DIM),
            "timestep": size.timestep(1.0),
            "position_ids": torch.cat((torch.zeros(size.text, 3), ids(size))),
            "return_dict": False,
        },
        before=size.text,
    )


def krea2_mask(size: Size) -> Built:
    return krea2(size).with_inputs(encoder_attention_mask=size.valid(torch.bool))


_JOINT = ("transformer_blocks.{}.attn", "single_transformer_blocks.{}.attn")


def _row(
    model: str,
    mode: str,
    build: Callable[[Size], Built],
    sites: tuple[str, ...] = _JOINT,
    **more: Any,
) -> Row:
    return Row(model, mode, build, sites, grids=IMAGE_GRIDS, **more)


ROWS = (
    _row("FluxTransformer2DModel", "", flux),
    _row("FluxTransformer2DModel", "Kontext", flux_kontext),
    _row("FluxTransformer2DModel", "ControlNet", flux_control),
    _row("Flux2Transformer2DModel", "", flux2),
    _row("Flux2Transformer2DModel", "reference", flux2_reference),
    _row(
        "Flux3Transformer2DModel",
        "",
        flux3,
        ("mode_blocks.image.{}.attn", "single_transformer_blocks.{}.attn"),
        alone=("mode_blocks.image.{}.attn",),
    ),
    _row(
        "Flux3Transformer2DModel",
        "reference",
        flux3_reference,
        (
            "mode_blocks.image.{}.attn",
            "mode_blocks.image_cond.{}.attn",
            "single_transformer_blocks.{}.attn",
        ),
        alone=("mode_blocks.image.{}.attn", "mode_blocks.image_cond.{}.attn"),
    ),
    _row("ChromaTransformer2DModel", "", chroma),
    _row(
        "ChromaTransformer2DModel",
        "padded text",
        chroma_mask,
        (),
        refused="a mask of the caller over image keys",
    ),
    _row("BriaTransformer2DModel", "", bria),
    _row("BriaFiboTransformer2DModel", "", bria_fibo),
    _row(
        "BriaFibo2Transformer2DModel",
        "",
        bria_fibo2,
        ("noise_refiner.0.attention", "layers.{}.attention"),
        alone=("noise_refiner.0.attention",),
        breaks=True,
    ),
    _row("LongCatImageTransformer2DModel", "", longcat),
    _row("OvisImageTransformer2DModel", "", ovis),
    _row("Krea2Transformer2DModel", "", krea2, ("transformer_blocks.{}.attn",)),
    _row("Krea2Transformer2DModel", "padded text", krea2_mask, ("transformer_blocks.{}.attn",)),
)
