"""Mochi, Allegro, MiniMax-H3, JoyImage, and the models whose attention is factorised or linear."""

from __future__ import annotations

from typing import Any

import torch

from .row import CHANNELS, HEAD_DIM, HEADS, TEXT_DIM, Built, Row, Size, transformer

AUDIO = 6  # tokens


def mochi(size: Size) -> Built:
    """Attends sample by sample to the valid tokens of the text: their number depends on data."""
    model = transformer("MochiTransformer3DModel")(
        patch_size=2,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=size.layers,
        pooled_projection_dim=16,
        in_channels=CHANNELS,
        text_embed_dim=TEXT_DIM,
        time_embed_dim=8,
        max_sequence_length=size.text,
    )
    return Built(
        model,
        {
            "hidden_states": size.latent(),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(0.0),
            "encoder_attention_mask": size.valid(torch.bool),
            "return_dict": False,
        },
    )


def _allegro(size: Size, **inputs: Any) -> Built:
    """Rope as tables that are looked up by the positions of every token."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    frames, rows, cols = size.grid
    model = transformer("AllegroTransformer3DModel")(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=size.layers,
        cross_attention_dim=HEADS * HEAD_DIM,
        sample_width=2 * cols,
        sample_height=2 * rows,
        sample_frames=frames,
        caption_channels=TEXT_DIM,
        patch_size=2,
        patch_size_t=1,
    )
    tables: Any = get_3d_rotary_pos_embed_allegro(
        embed_dim=HEAD_DIM,
        crops_coords=((0, 0), (rows, cols)),
        grid_size=(rows, cols),
        temporal_size=frames,
        interpolation_scale=(1.0, 1.0, 1.0),
    )
    places = size.places().T.reshape(3, 1, -1).contiguous()
    return Built(
        model,
        {
            "hidden_states": size.latent(),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(999, torch.int64),
            "encoder_attention_mask": size.valid(torch.float32),
            "image_rotary_emb": (tuple(tables[:3]), tuple(places)),
            "return_dict": False,
            **inputs,
        },
    )


def allegro(size: Size) -> Built:
    return _allegro(size)


def allegro_mask(size: Size) -> Built:
    """Parts of the latent may be padding."""
    mask = torch.ones(size.batch, size.grid[0], 2 * size.grid[1], 2 * size.grid[2])
    mask[:, :, :, -4:] = 0
    return _allegro(size, attention_mask=mask)


def minimax_h3(size: Size) -> Built:
    """Text, audio and video in one sequence, each put to its place by a list of indices."""
    model = transformer("MiniMaxH3Transformer3DModel")(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        hidden_size=32,
        num_layers=size.layers,
        num_refiner_layers=1,
        ffn_dim=32,
        in_channels=CHANNELS,
        audio_in_channels=CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=16,
        time_embed_hidden_dim=16,
        time_embed_dim=16,
        rope_freq_dim=4,
    )
    counts = (size.text, AUDIO, size.tokens)
    text, audio, video = torch.arange(sum(counts)).split(counts)
    line = torch.arange(size.text + AUDIO)[:, None].expand(-1, 3)
    return Built(
        model,
        {
            "hidden_states": size.packed(4 * CHANNELS),
            "audio_hidden_states": torch.randn(size.batch, AUDIO, CHANNELS),
            "encoder_hidden_states": size.prompt(),
            "timestep": torch.tensor([0.0, 1.0]),
            "timestep_indices": torch.tensor([0, 1, 1]).repeat_interleave(torch.tensor(counts)),
            "token_tags": torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor(counts)),
            "position_ids": torch.cat((line, size.places() + len(line))).float(),
            "video_indices": video,
            "audio_indices": audio,
            "text_indices": text,
            "return_dict": False,
        },
        before=size.text + AUDIO,
    )


_JOY: dict[str, Any] = {
    "in_channels": CHANNELS,
    "hidden_size": HEADS * HEAD_DIM,
    "num_attention_heads": HEADS,
    "text_dim": TEXT_DIM,
    "mlp_width_ratio": 2.0,
    "rope_dim_list": [8, 8, 8],
}


def joyimage(size: Size) -> Built:
    model = transformer("JoyImageEditTransformer3DModel")(num_layers=size.layers, **_JOY)
    return Built(
        model,
        {
            "hidden_states": size.latent(),
            "timestep": size.timestep(1000.0),
            "encoder_hidden_states": size.prompt(),
            "return_dict": False,
        },
    )


def joyimage_items(size: Size) -> Built:
    """Frames are images, of which the last comes first in the sequence."""
    built = joyimage(size)
    images = built.inputs["hidden_states"].transpose(1, 2).unsqueeze(3)
    return built.with_inputs(hidden_states=images)


def joyimage_plus(size: Size, references: int = 0) -> Built:
    """Patches are made outside of the model, and numbers tell the grid of each image."""
    model = transformer("JoyImageEditPlusTransformer3DModel")(num_layers=size.layers, **_JOY)
    shapes = [size.grid] + [(1, 3, 5)] * references
    tokens = size.tokens + 15 * references
    return Built(
        model,
        {
            "hidden_states": torch.randn(size.batch, tokens, CHANNELS, 1, 2, 2),
            "timestep": size.timestep(1000.0),
            "encoder_hidden_states": size.prompt(),
            "shape_list": [shapes] * size.batch,
            "return_dict": False,
        },
    )


def joyimage_reference(size: Size) -> Built:
    """Tokens of another image follow those of the first; all text is valid."""
    built = joyimage_plus(size, references=1)
    return built.with_inputs(encoder_hidden_states_mask=torch.ones(size.batch, size.text))


def latte(size: Size) -> Built:
    """Attends within frames, then along time: factorised, so short already."""
    frames, rows, _ = size.grid
    model = transformer("LatteTransformer3DModel")(
        sample_size=2 * rows,
        num_layers=size.layers,
        patch_size=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        caption_channels=TEXT_DIM,
        in_channels=CHANNELS,
        out_channels=2 * CHANNELS,
        cross_attention_dim=HEADS * HEAD_DIM,
        attention_bias=True,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        num_embeds_ada_norm=1000,
        activation_fn="gelu-approximate",
        video_length=frames,
    )
    return Built(
        model,
        {
            "hidden_states": size.latent(),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(900, torch.int64),
            "return_dict": False,
        },
    )


def temporal(size: Size) -> Built:
    """A motion module of AnimateDiff: attends along time at each place of an image."""
    frames, rows, cols = size.grid
    model = transformer("TransformerTemporalModel")(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=32,
        num_layers=size.layers,
        positional_embeddings="sinusoidal",
        num_positional_embeddings=frames,
        activation_fn="geglu",
    )
    return Built(
        model,
        {
            "hidden_states": torch.randn(size.batch * frames, 32, rows, cols),
            "num_frames": frames,
            "return_dict": False,
        },
    )


def sana_video(size: Size) -> Built:
    """Linear attention, and cross-attention to text."""
    model = transformer("SanaVideoTransformer3DModel")(
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
        sample_size=16,
        patch_size=(1, 2, 2),
    )
    return Built(
        model,
        {
            "hidden_states": size.latent(),
            "encoder_hidden_states": size.prompt(),
            "timestep": size.timestep(900, torch.int64),
            "return_dict": False,
        },
    )


def sana_wm(size: Size) -> Built:
    """Linear attention that runs along time, and softmax in each second layer here (each fourth in the original)."""
    frames, rows, cols = size.grid
    model = transformer("SanaWMTransformer3DModel")(
        in_channels=CHANNELS,
        num_layers=size.layers,
        hidden_size=32,
        num_attention_heads=2,
        softmax_every_n=2,
        linear_head_dim=16,
        caption_channels=8,
        mlp_ratio=2.0,
        chunk_plucker_channels=8,
        chunk_plucker_post_attn_blocks=size.layers,
    )
    pose = torch.eye(4).repeat(size.batch, frames, 1, 1)
    pose[..., 2, 3] = 0.1 * torch.arange(frames)
    lens = torch.tensor([cols, rows, cols / 2, rows / 2]).expand(size.batch, frames, 4)
    return Built(
        model,
        {
            "hidden_states": torch.randn(size.batch, CHANNELS, *size.grid),
            "timestep": torch.full((size.batch, 1, frames), 999.0),
            "encoder_hidden_states": torch.randn(size.batch, 1, size.text, 8),
            "encoder_attention_mask": torch.ones(size.batch, size.text, dtype=torch.int64),
            "camera_conditions": torch.cat((pose.flatten(-2), lens), -1),
            "chunk_plucker": torch.randn(size.batch, 8, *size.grid),
            "return_dict": False,
        },
    )


_JOINT = ("transformer_blocks.{}.attn",)
_DOUBLE = ("double_blocks.{}.attn",)
ROWS = (
    Row("MochiTransformer3DModel", "", mochi, ("transformer_blocks.{}.attn1",)),
    Row("AllegroTransformer3DModel", "", allegro, ("transformer_blocks.{}.attn1",)),
    Row(
        "AllegroTransformer3DModel",
        "mask over the latent",
        allegro_mask,
        refused="a mask over video keys",
    ),
    Row("MiniMaxH3Transformer3DModel", "", minimax_h3, _JOINT),
    Row("JoyImageEditTransformer3DModel", "", joyimage, _DOUBLE),
    Row("JoyImageEditTransformer3DModel", "several images", joyimage_items, _DOUBLE),
    Row("JoyImageEditPlusTransformer3DModel", "", joyimage_plus, _DOUBLE),
    Row("JoyImageEditPlusTransformer3DModel", "reference", joyimage_reference, _DOUBLE),
    Row(
        "LatteTransformer3DModel",
        "",
        latte,
        refused="factorised attention",
        grids=((3, 6, 6), (5, 7, 7)),
        layers=1,
    ),
    Row("TransformerTemporalModel", "", temporal, refused="factorised attention", layers=1),
    Row("SanaVideoTransformer3DModel", "", sana_video, refused="linear attention"),
    Row("SanaWMTransformer3DModel", "", sana_wm, ("blocks.1.attn.attn", "blocks.1.attn.cam_attn")),
)
