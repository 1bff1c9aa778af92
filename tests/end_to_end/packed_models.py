"""Models of diffusers whose video tokens are packed outside: what they are told of the grid are coordinates per token.

Sizes are as in `models`; `FAMILIES` has the same form.
"""

from __future__ import annotations

import diffusers
import torch
from torch import Tensor, nn

from tests.end_to_end.models import (
    CHANNELS,
    HEAD_DIM,
    HEADS,
    TEXT_DIM,
    Family,
    Inputs,
    Size,
    ltx,
)

AUDIO = 6  # tokens


def places(grid: tuple[int, int, int]) -> Tensor:
    """The frame, row and column of every token, [tokens, 3]."""
    return torch.cartesian_prod(*map(torch.arange, grid)).float()


def flux(size: Size) -> tuple[nn.Module, Inputs]:
    model = diffusers.FluxTransformer2DModel(
        in_channels=CHANNELS, num_layers=size.layers, num_single_layers=size.layers,
        attention_head_dim=HEAD_DIM, num_attention_heads=HEADS, joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=8, axes_dims_rope=(8, 8, 8),
    )  # fmt: skip
    return model, {
        **_packed(size),
        "pooled_projections": torch.randn(size.batch, 8),
        "img_ids": places(size.grid),
        "txt_ids": torch.zeros(size.text, 3),
    }


def flux2(size: Size) -> tuple[nn.Module, Inputs]:
    """Ids of four axes, the last of them the text's, with an axis for samples."""
    model = diffusers.Flux2Transformer2DModel(
        in_channels=CHANNELS, num_layers=size.layers, num_single_layers=size.layers,
        attention_head_dim=HEAD_DIM, num_attention_heads=HEADS, joint_attention_dim=TEXT_DIM,
        timestep_guidance_channels=16, axes_dims_rope=(8, 8, 4, 4), guidance_embeds=False,
    )  # fmt: skip
    text = torch.nn.functional.pad(torch.arange(size.text)[:, None], (3, 0))
    return model, {
        **_packed(size),
        "img_ids": torch.nn.functional.pad(places(size.grid), (0, 1))[None],
        "txt_ids": text[None],
    }


def chroma(size: Size) -> tuple[nn.Module, Inputs]:
    model = diffusers.ChromaTransformer2DModel(
        in_channels=CHANNELS, num_layers=size.layers, num_single_layers=size.layers,
        attention_head_dim=HEAD_DIM, num_attention_heads=HEADS, joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(8, 8, 8), approximator_num_channels=16, approximator_hidden_dim=16,
        approximator_layers=1,
    )  # fmt: skip
    return model, {
        **_packed(size),
        "img_ids": places(size.grid),
        "txt_ids": torch.zeros(size.text, 3),
    }


def _packed(size: Size) -> Inputs:
    return {
        "hidden_states": torch.randn(size.batch, size.tokens, CHANNELS),
        "encoder_hidden_states": size.prompt(),
        "timestep": torch.full((size.batch,), 0.9),
        "return_dict": False,
    }


def ltx_coords(size: Size) -> tuple[nn.Module, Inputs]:
    """Coordinates in pixels and seconds: the first frame is one pixel long, the others eight."""
    model, inputs = ltx(size)
    for name in ("num_frames", "height", "width"):
        del inputs[name]
    coords = (places(size.grid) * torch.tensor([8, 32, 32])).T
    coords[0] = (coords[0] - 7).clamp(min=0) / 24
    return model, {**inputs, "video_coords": coords.repeat(size.batch, 1, 1)}


def ltx2(size: Size) -> tuple[nn.Module, Inputs]:
    """Video told by numbers of frames, rows and columns, beside audio."""
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM, cross_attention_dim=HEADS * HEAD_DIM,
        audio_in_channels=CHANNELS, audio_out_channels=CHANNELS, audio_num_attention_heads=HEADS,
        audio_attention_head_dim=HEAD_DIM, audio_cross_attention_dim=HEADS * HEAD_DIM,
        num_layers=size.layers, caption_channels=TEXT_DIM,
    )  # fmt: skip
    frames, rows, cols = size.grid
    return model, {
        **_packed(size),
        "timestep": torch.full((size.batch,), 900),
        "audio_hidden_states": torch.randn(size.batch, AUDIO, CHANNELS),
        "audio_encoder_hidden_states": size.prompt(),
        "num_frames": frames,
        "height": rows,
        "width": cols,
        "audio_num_frames": AUDIO,
    }


def ltx2_coords(size: Size) -> tuple[nn.Module, Inputs]:
    """The start and the end of every token along each axis."""
    model, inputs = ltx2(size)
    coords = model.rope.prepare_video_coords(
        size.batch, *(inputs.pop(name) for name in ("num_frames", "height", "width")),
        device="cpu", fps=24.0,
    )  # fmt: skip
    return model, {**inputs, "video_coords": coords}


def minimax(size: Size) -> tuple[nn.Module, Inputs]:
    """One packed sequence of text, audio and video, whose rows are addressed by index tensors."""
    model = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, hidden_size=HEADS * HEAD_DIM,
        num_layers=size.layers, num_refiner_layers=1, ffn_dim=32, in_channels=CHANNELS,
        audio_in_channels=CHANNELS, patch_size=(1, 1, 1), text_dim=TEXT_DIM, freq_dim=16,
        time_embed_hidden_dim=16, time_embed_dim=16, rope_freq_dim=2,
    )  # fmt: skip
    text, audio, video = torch.arange(size.text + AUDIO + size.tokens).split(
        [size.text, AUDIO, size.tokens]
    )
    sounds = torch.nn.functional.pad(torch.arange(AUDIO)[:, None], (0, 2)) + size.text
    return model, {
        **_packed(size),
        "audio_hidden_states": torch.randn(size.batch, AUDIO, CHANNELS),
        "timestep": torch.tensor([0.9, 0.0]),
        "timestep_indices": torch.cat(
            [torch.ones(size.text), torch.zeros(AUDIO + size.tokens)]
        ).long(),
        "token_tags": torch.cat([text * 0 + 1, audio * 0 + 2, video * 0]),
        "position_ids": torch.cat(
            [text[:, None].expand(-1, 3), sounds, places(size.grid) + size.text]
        ),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


def qwen_image(size: Size) -> tuple[nn.Module, Inputs]:
    """Told frames, rows and columns in a list of numbers."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=CHANNELS, out_channels=CHANNELS // 4, num_layers=size.layers,
        attention_head_dim=HEAD_DIM, num_attention_heads=HEADS, joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(8, 8, 8),
    )  # fmt: skip
    return model, {**_packed(size), "img_shapes": [[size.grid]] * size.batch}


_JOINT = ("transformer_blocks.{}.attn", "single_transformer_blocks.{}.attn")
_ATTN = ("transformer_blocks.{}.attn",)
_ATTN1 = ("transformer_blocks.{}.attn1",)
FAMILIES = {
    family.name: family
    for family in (
        Family("flux", flux, _JOINT, text_first=True, clean=0.9, noisy=0.98, noise="0..1"),
        Family("flux2", flux2, _JOINT, text_first=True, clean=0.9, noisy=0.98, noise="0..1"),
        Family("chroma", chroma, _JOINT, text_first=True, clean=0.9, noisy=0.98, noise="0..1"),
        Family("ltx_coords", ltx_coords, _ATTN1),
        Family("ltx2", ltx2, _ATTN1),
        Family("ltx2_coords", ltx2_coords, _ATTN1),
        Family("minimax", minimax, _ATTN, text_first=True, clean=0.9, noisy=0.98, noise="0..1"),
        Family(
            "qwen_image", qwen_image, _ATTN, text_first=True, clean=0.9, noisy=0.98, noise="0..1"
        ),
    )
}
