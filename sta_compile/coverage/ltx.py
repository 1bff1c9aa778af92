"""LTX and LTX-2: patches are made outside of the model, and the grid is told in numbers or in coordinates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .row import CHANNELS, HEAD_DIM, HEADS, TEXT_DIM, Built, Row, Size, transformer

AUDIO = 13  # tokens
HISTORY = 2  # frames


def _numbers(size: Size) -> dict[str, int]:
    return dict(zip(("num_frames", "height", "width"), size.grid, strict=True))


def coordinates(size: Size) -> Tensor:
    """float [batch, 3, tokens]"""
    return size.places().T.float().expand(size.batch, -1, -1).contiguous()


def _ltx(size: Size) -> Built:
    model = transformer("LTXVideoTransformer3DModel")(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=HEADS * HEAD_DIM,
        num_layers=size.layers,
        caption_channels=TEXT_DIM,
    )
    return Built(
        model,
        {
            "hidden_states": size.packed(),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(1000, torch.int64),
            "encoder_attention_mask": size.valid(torch.float32),
            "return_dict": False,
        },
    )


def ltx(size: Size) -> Built:
    return _ltx(size).with_inputs(**_numbers(size), rope_interpolation_scale=(1.0, 1.0, 1.0))


def ltx_coordinates(size: Size) -> Built:
    return _ltx(size).with_inputs(video_coords=coordinates(size))


def ltx_conditioned(size: Size) -> Built:
    """A timestep per token; the first frame is given."""
    timestep = torch.full((size.batch, size.grid[0], size.tokens // size.grid[0]), 1000)
    timestep[:, 0] = 0
    return ltx_coordinates(size).with_inputs(timestep=timestep.flatten(1))


def _ltx2(size: Size, kind: Any = None, **config: Any) -> Built:
    model = (kind or transformer("LTX2VideoTransformer3DModel"))(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=HEADS * HEAD_DIM,
        audio_in_channels=CHANNELS,
        audio_out_channels=CHANNELS,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=12,
        audio_cross_attention_dim=HEADS * 12,
        num_layers=size.layers,
        caption_channels=TEXT_DIM,
        rope_double_precision=False,
        **config,
    )
    return Built(
        model,
        {
            "hidden_states": size.packed(),
            "audio_hidden_states": torch.randn(size.batch, AUDIO, CHANNELS),
            "encoder_hidden_states": size.prompt(),
            "audio_encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(1000.0),
            "encoder_attention_mask": size.valid(torch.int64),
            "audio_encoder_attention_mask": size.valid(torch.int64),
            "audio_num_frames": AUDIO,
            "fps": 24.0,
            "return_dict": False,
        },
    )


def ltx2(size: Size) -> Built:
    return _ltx2(size).with_inputs(**_numbers(size))


def ltx2_split(size: Size) -> Built:
    """Gates per head, and rope that rotates halves of each head, in place."""
    built = _ltx2(size, rope_type="split", gated_attn=True, audio_gated_attn=True)
    return built.with_inputs(**_numbers(size))


def ltx2_coordinates(size: Size) -> Built:
    """Coordinates of both ends of each patch: [batch, 3, tokens, 2]."""
    start = coordinates(size)
    return _ltx2(size).with_inputs(video_coords=torch.stack((start, start + 1), -1))


def sana_wm_refiner(size: Size) -> Built:
    """LTX-2 without its audio; a timestep per token, and rope tables that the model makes outside of its forward."""
    built = _ltx2(size, transformer("SanaWMLTX2RefinerTransformer3DModel"))
    unused = ("fps", "audio_num_frames")
    inputs = {
        name: value
        for name, value in built.inputs.items()
        if name not in unused and not name.startswith("audio_")
    }
    frames, rows, cols = size.grid
    places = list(range(HISTORY, HISTORY + frames))
    model: Any = built.model
    tables = model.build_rotary_emb_for_absolute_positions(
        size.batch, places, rows, cols, device="cpu", fps=24.0
    )
    timestep = torch.full((size.batch, size.tokens), 900.0)
    return Built(model, {**inputs, "video_rotary_emb": tables, "timestep": timestep})


def sana_wm_refiner_history(size: Size) -> Built:
    """The video also sees keys of frames before it, which come from a cache."""
    from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache

    built = sana_wm_refiner(size)
    past = HISTORY * size.grid[1] * size.grid[2]
    cache = SanaWMRefinerKVCache(size.layers)
    for layer in range(size.layers):
        keys, values = (torch.randn(size.batch, past, HEADS * HEAD_DIM) for _ in range(2))
        cache.get(layer).store_history(keys, values)
    built = built.with_inputs(kv_cache=cache, kv_cache_mode="inject")
    return Built(built.model, built.inputs, before=past, queries_before=0)


_ATTN1 = ("transformer_blocks.{}.attn1",)
ROWS = (
    Row("LTXVideoTransformer3DModel", "numbers", ltx, _ATTN1),
    Row("LTXVideoTransformer3DModel", "coordinates", ltx_coordinates, _ATTN1),
    Row("LTXVideoTransformer3DModel", "given first frame", ltx_conditioned, _ATTN1),
    Row("LTX2VideoTransformer3DModel", "numbers", ltx2, _ATTN1),
    Row("LTX2VideoTransformer3DModel", "split rope, gates", ltx2_split, _ATTN1),
    Row("LTX2VideoTransformer3DModel", "coordinates", ltx2_coordinates, _ATTN1),
    Row("SanaWMLTX2RefinerTransformer3DModel", "", sana_wm_refiner, _ATTN1),
    Row("SanaWMLTX2RefinerTransformer3DModel", "with history", sana_wm_refiner_history, _ATTN1),
)
