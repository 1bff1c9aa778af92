"""Small diffusers video transformers with random weights, in which attention matters and frames, rows and columns differ.

family("wan").case(batch=2, grid=(5, 9, 11)) is a two-layer WanTransformer3DModel and its inputs; its self-attentions over
the 5x9x11 grid are the modules blocks.0.attn1 and blocks.1.attn1, and no text stands in their sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from sta_compile.coverage.row import (
    CHANNELS,
    HEAD_DIM,
    HEADS,
    LENGTH,
    TEXT_DIM,
    Inputs,
    Size,
    randomize,
)
from sta_compile.ir.attention_spec import Triple


@dataclass(frozen=True)
class Case:
    """sites: module paths of the self-attentions over the grid. text_first: the sequence is [text, video]."""

    model: nn.Module
    inputs: Inputs
    sites: tuple[str, ...]
    size: Size
    text_first: bool

    def at(self, *timesteps: float) -> Inputs:
        """The inputs with one timestep per sample; tokens that are given (timestep 0) stay given."""
        old = self.inputs["timestep"]
        new = torch.tensor(timesteps).to(old.dtype).view(-1, *[1] * (old.dim() - 1))
        return {**self.inputs, "timestep": torch.where(old == 0, old, new.expand_as(old))}


@dataclass(frozen=True)
class Family:
    """build: size -> (model, inputs). attention: module paths, {} the layer.

    clean, noisy: timesteps at noise level 0.9 and 0.98 in the convention `noise`.
    """

    name: str
    build: Callable[[Size], tuple[nn.Module, Inputs]]
    attention: tuple[str, ...]
    text_first: bool = False
    clean: float = 900.0
    noisy: float = 980.0
    noise: str = "0..1000"

    def case(self, batch: int, grid: Triple, layers: int = 2, text: int = LENGTH) -> Case:
        size = Size(batch, grid, layers, text)
        torch.manual_seed(0)
        model, inputs = self.build(size)
        randomize(model)
        sites = tuple(path.format(i) for path in self.attention for i in range(layers))
        case = Case(model.eval(), inputs, sites, size, self.text_first)
        return Case(model, case.at(*[self.clean] * batch), sites, size, self.text_first)


def _timestep(size: Size) -> Tensor:
    return torch.full((size.batch,), 900)


def wan(size: Size, images: int | None = None) -> tuple[nn.Module, Inputs]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=HEADS, attention_head_dim=HEAD_DIM,
        in_channels=CHANNELS, out_channels=CHANNELS, text_dim=TEXT_DIM, freq_dim=16, ffn_dim=32,
        num_layers=size.layers, cross_attn_norm=True, rope_max_seq_len=64, image_dim=images,
        added_kv_proj_dim=None if images is None else HEADS * HEAD_DIM,
    )  # fmt: skip
    return model, {
        "hidden_states": size.latent(),
        "timestep": _timestep(size),
        "encoder_hidden_states": size.prompt(),
        "return_dict": False,
    }


def wan_i2v(size: Size) -> tuple[nn.Module, Inputs]:
    """Cross-attention to text and to an image, of lengths of which the model knows only 512."""
    model, inputs = wan(size, images=8)
    text = torch.randn(size.batch, 512, TEXT_DIM)
    image = torch.randn(size.batch, 257, 8)
    return model, {**inputs, "encoder_hidden_states": text, "encoder_hidden_states_image": image}


def wan_ti2v(size: Size) -> tuple[nn.Module, Inputs]:
    """Wan 2.2: a timestep per token, 0 in the first frame, which is given."""
    model, inputs = wan(size)
    timestep = torch.full((size.batch, size.grid[0], size.tokens // size.grid[0]), 900)
    timestep[:, 0] = 0
    return model, {**inputs, "timestep": timestep.flatten(1)}


def hunyuan(size: Size, single_layers: int | None = None) -> tuple[nn.Module, Inputs]:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM, num_layers=size.layers,
        num_single_layers=size.layers if single_layers is None else single_layers,
        num_refiner_layers=1, mlp_ratio=2.0, patch_size=2, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=TEXT_DIM, pooled_projection_dim=8, rope_axes_dim=(8, 8, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": size.latent(),
        "timestep": _timestep(size),
        "encoder_hidden_states": size.prompt(),
        "encoder_attention_mask": size.valid(torch.int64),
        "pooled_projections": torch.randn(size.batch, 8),
        "guidance": torch.full((size.batch,), 6000.0),
        "return_dict": False,
    }


def _cogvideox(size: Size, **config: Any) -> tuple[nn.Module, Inputs]:
    frames, rows, cols = size.grid
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, in_channels=CHANNELS,
        out_channels=CHANNELS, time_embed_dim=8, text_embed_dim=TEXT_DIM, num_layers=size.layers,
        sample_width=2 * cols, sample_height=2 * rows, sample_frames=(frames - 1) * 4 + 1,
        patch_size=2, temporal_compression_ratio=4, max_text_seq_length=size.text, **config,
    )  # fmt: skip
    return model, {
        "hidden_states": size.latent().transpose(1, 2),
        "encoder_hidden_states": size.prompt(),
        "timestep": _timestep(size),
        "return_dict": False,
    }


def cogvideox_2b(size: Size) -> tuple[nn.Module, Inputs]:
    return _cogvideox(size)


def _rope(size: Size) -> tuple[Tensor, Tensor]:
    """Any rotation per token, as the pipeline passes it: cos and sin, each twice."""
    angles = torch.randn(size.tokens, HEAD_DIM // 2).repeat_interleave(2, 1)
    return angles.cos(), angles.sin()


def cogvideox_5b(size: Size) -> tuple[nn.Module, Inputs]:
    model, inputs = _cogvideox(size, use_rotary_positional_embeddings=True)
    return model, {**inputs, "image_rotary_emb": _rope(size)}


def cogvideox_15(size: Size) -> tuple[nn.Module, Inputs]:
    """Patches of two frames, made by reshape and a linear layer."""
    model, inputs = _cogvideox(
        size, use_rotary_positional_embeddings=True, patch_size_t=2, patch_bias=False
    )
    latent = inputs["hidden_states"].repeat_interleave(2, 1)
    latent = latent + torch.randn_like(latent)
    return model, {**inputs, "hidden_states": latent, "image_rotary_emb": _rope(size)}


def cosmos(size: Size) -> tuple[nn.Module, Inputs]:
    frames, rows, cols = size.grid
    model = diffusers.CosmosTransformer3DModel(
        in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM, num_layers=size.layers, mlp_ratio=2, text_embed_dim=TEXT_DIM,
        adaln_lora_dim=4, max_size=(frames, 2 * rows, 2 * cols), patch_size=(1, 2, 2),
        rope_scale=(2.0, 1.0, 1.0), concat_padding_mask=False, extra_pos_embed_type="learnable",
    )  # fmt: skip
    return model, {
        "hidden_states": size.latent(),
        "timestep": torch.full((size.batch,), 0.9),
        "encoder_hidden_states": size.prompt(),
        "attention_mask": size.valid(torch.float32),
        "fps": 24,
        "return_dict": False,
    }


def allegro(size: Size) -> tuple[nn.Module, Inputs]:
    """Rope as tables that are looked up by the positions of every token."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    frames, rows, cols = size.grid
    model = diffusers.AllegroTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, in_channels=CHANNELS,
        out_channels=CHANNELS, num_layers=size.layers, cross_attention_dim=HEADS * HEAD_DIM,
        sample_width=2 * cols, sample_height=2 * rows, sample_frames=frames,
        caption_channels=TEXT_DIM, patch_size=2, patch_size_t=1,
    )  # fmt: skip
    *tables, t, h, w = get_3d_rotary_pos_embed_allegro(
        embed_dim=HEAD_DIM, crops_coords=((0, 0), (rows, cols)), grid_size=(rows, cols),
        temporal_size=frames, interpolation_scale=(1.0, 1.0, 1.0),
    )  # fmt: skip
    places = torch.cartesian_prod(t.long(), h.long(), w.long()).T.reshape(3, 1, -1).contiguous()
    return model, {
        "hidden_states": size.latent(),
        "encoder_hidden_states": size.prompt(),
        "timestep": _timestep(size),
        "encoder_attention_mask": size.valid(torch.float32),
        "image_rotary_emb": (tuple(tables), tuple(places)),
        "return_dict": False,
    }


def mochi(size: Size) -> tuple[nn.Module, Inputs]:
    """Attends sample by sample to the valid tokens of the text: their number depends on data."""
    model = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=HEADS, attention_head_dim=HEAD_DIM,
        num_layers=size.layers, pooled_projection_dim=16, in_channels=CHANNELS,
        text_embed_dim=TEXT_DIM, time_embed_dim=8, max_sequence_length=size.text,
    )  # fmt: skip
    return model, {
        "hidden_states": size.latent(),
        "encoder_hidden_states": size.prompt(),
        "timestep": torch.full((size.batch,), 100.0),
        "encoder_attention_mask": size.valid(torch.bool),
        "return_dict": False,
    }


def ltx(size: Size) -> tuple[nn.Module, Inputs]:
    """Tokens are packed outside of the model; it is told the grid in numbers."""
    frames, rows, cols = size.grid
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM, cross_attention_dim=HEADS * HEAD_DIM, num_layers=size.layers,
        caption_channels=TEXT_DIM,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(size.batch, size.tokens, CHANNELS),
        "encoder_hidden_states": size.prompt(),
        "timestep": _timestep(size),
        "encoder_attention_mask": size.valid(torch.float32),
        "num_frames": frames,
        "height": rows,
        "width": cols,
        "rope_interpolation_scale": (1.0, 1.0, 1.0),
        "return_dict": False,
    }


_JOINT = ("transformer_blocks.{}.attn", "single_transformer_blocks.{}.attn")
_ATTN1 = ("transformer_blocks.{}.attn1",)
FAMILIES = {
    family.name: family
    for family in (
        Family("wan", wan, ("blocks.{}.attn1",)),
        Family("wan_i2v", wan_i2v, ("blocks.{}.attn1",)),
        Family("wan_ti2v", wan_ti2v, ("blocks.{}.attn1",)),
        Family("hunyuan", hunyuan, _JOINT),
        Family("cogvideox_2b", cogvideox_2b, _ATTN1, text_first=True),
        Family("cogvideox_5b", cogvideox_5b, _ATTN1, text_first=True),
        Family("cogvideox_15", cogvideox_15, _ATTN1, text_first=True),
        # 0.25 * log(sigma): the level is sigma / (1 + sigma)
        Family("cosmos", cosmos, _ATTN1, clean=0.55, noisy=0.98, noise="log_sigma"),
        Family("allegro", allegro, _ATTN1),
        Family("mochi", mochi, _ATTN1, clean=100.0, noisy=20.0, noise="reversed"),
        Family("ltx", ltx, _ATTN1),
    )
}
