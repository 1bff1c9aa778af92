"""Tiny random diffusers models with the inputs of a first denoising step, and their captured graphs.

Every model is captured once per process and batch size; a test that edits a graph takes a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import diffusers
import torch
import torch._dynamo
from torch.fx import GraphModule

Inputs = dict[str, Any]
FRAMES, ROWS, COLS = 3, 4, 6  # the token grid


@dataclass(frozen=True)
class Capture:
    gm: GraphModule
    example_inputs: list[Any]
    inputs: Inputs

    def copy(self) -> GraphModule:
        """A copy whose nodes keep their fake values."""
        return GraphModule(self.gm, copy.deepcopy(self.gm.graph))


def capture_all(
    model: Callable[..., Any],
    inputs: Inputs,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    grad: bool = False,
) -> list[Capture]:
    """The graphs that Dynamo hands to a backend."""
    captured: list[Capture] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        captured.append(Capture(gm, list(example_inputs), inputs))
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    # Mochi drops padded text by its value.
    with (
        torch.set_grad_enabled(grad),
        torch._dynamo.config.patch(
            capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
        ),
    ):
        compiled(**inputs)
    torch._dynamo.reset()
    return captured


def capture(model: Callable[..., Any], inputs: Inputs, **options: Any) -> Capture:
    (only,) = capture_all(model, inputs, **options)
    return only


def latents(batch: int) -> torch.Tensor:
    return torch.randn(batch, 4, FRAMES, 2 * ROWS, 2 * COLS)


def wan(batch: int) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=1, rope_max_seq_len=64,
    )  # fmt: skip
    text = torch.randn(batch, 5, 16)
    return model, {
        "hidden_states": latents(batch),
        "timestep": torch.full((batch,), 999),
        "encoder_hidden_states": text,
    }


def wan_ti2v(batch: int) -> tuple[torch.nn.Module, Inputs]:
    """Wan 2.2 TI2V: a timestep per token, 0 for the given first frame."""
    model, inputs = wan(batch)
    timestep = torch.full((batch, FRAMES, ROWS * COLS), 999)
    timestep[:, 0] = 0
    return model, {**inputs, "timestep": timestep.flatten(1)}


def hunyuan_video(batch: int) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, mlp_ratio=2.0, patch_size=2, patch_size_t=1,
        guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=16, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    return model, {
        "hidden_states": latents(batch),
        "timestep": torch.full((batch,), 1000.0),
        "encoder_hidden_states": torch.randn(batch, 6, 16),
        "encoder_attention_mask": torch.ones(batch, 6),
        "pooled_projections": torch.randn(batch, 16),
        "guidance": torch.full((batch,), 6000.0),
    }


def cogvideox(batch: int) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        time_embed_dim=8, text_embed_dim=16, num_layers=1, sample_width=2 * COLS,
        sample_height=2 * ROWS, sample_frames=9, patch_size=2, temporal_compression_ratio=4,
        max_text_seq_length=6, use_rotary_positional_embeddings=True,
    )  # fmt: skip
    tokens = FRAMES * ROWS * COLS
    return model, {
        "hidden_states": latents(batch).transpose(1, 2),
        "timestep": torch.full((batch,), 999),
        "encoder_hidden_states": torch.randn(batch, 6, 16),
        "image_rotary_emb": (torch.randn(tokens, 16), torch.randn(tokens, 16)),
    }


def cosmos(batch: int) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        mlp_ratio=2, text_embed_dim=16, adaln_lora_dim=8, max_size=(4, 16, 16),
        patch_size=(1, 2, 2), concat_padding_mask=False,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(batch),
        "timestep": torch.full((batch,), 1.0955),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "attention_mask": torch.ones(batch, 5),
        "fps": 16,
    }


def cosmos_per_frame(batch: int) -> tuple[torch.nn.Module, Inputs]:
    """Cosmos 2 video to world: [batch, 1, frames, 1, 1], the first frame nearly clean."""
    model, inputs = cosmos(batch)
    timestep = torch.full((batch, 1, FRAMES, 1, 1), 0.98)
    timestep[:, :, 0] = 0.0001
    return model, {**inputs, "timestep": timestep}


def mochi(batch: int) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2,
        pooled_projection_dim=16, in_channels=4, text_embed_dim=16, time_embed_dim=8,
        max_sequence_length=6,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(batch),
        "timestep": torch.zeros(batch),
        "encoder_hidden_states": torch.randn(batch, 6, 16),
        "encoder_attention_mask": torch.ones(batch, 6).bool(),
    }


def ltx(batch: int) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=32, num_layers=1, caption_channels=16,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(batch, FRAMES * ROWS * COLS, 4),
        "timestep": torch.full((batch,), 1000.0),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "encoder_attention_mask": torch.ones(batch, 5),
        "num_frames": FRAMES,
        "height": ROWS,
        "width": COLS,
    }


def allegro(batch: int) -> tuple[torch.nn.Module, Inputs]:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    model = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2, attention_head_dim=24, in_channels=4, out_channels=4, num_layers=1,
        cross_attention_dim=48, sample_width=2 * COLS, sample_height=2 * ROWS,
        sample_frames=FRAMES, caption_channels=16,
    )  # fmt: skip
    tables = get_3d_rotary_pos_embed_allegro(
        embed_dim=24, crops_coords=((0, 0), (ROWS, COLS)), grid_size=(ROWS, COLS),
        temporal_size=FRAMES, interpolation_scale=(2.0, 2.0, 2.0), device=torch.device("cpu"),
    )[:3]  # fmt: skip
    grid = torch.cartesian_prod(
        torch.arange(FRAMES), torch.arange(ROWS), torch.arange(COLS)
    )  # [tokens, 3]
    ids = tuple(grid[:, axis][None] for axis in range(3))
    return model, {
        "hidden_states": latents(batch),
        "timestep": torch.full((batch,), 999),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "encoder_attention_mask": torch.ones(batch, 5),
        "image_rotary_emb": (tables, ids),
    }


def flux(batch: int) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16,
        guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(batch, ROWS * COLS, 4),
        "timestep": torch.ones(batch),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "pooled_projections": torch.randn(batch, 16),
        "guidance": torch.full((batch,), 3.5),
        "img_ids": torch.zeros(ROWS * COLS, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def lumina2(batch: int) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, hidden_size=48, num_layers=1,
        num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1, axes_dim_rope=(4, 6, 6),
        axes_lens=(64, 64, 64), cap_feat_dim=16, multiple_of=8,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(batch, 4, 2 * ROWS, 2 * COLS),
        "timestep": torch.zeros(batch),
        "encoder_hidden_states": torch.randn(batch, 6, 16),
        "encoder_attention_mask": torch.ones(batch, 6).bool(),
    }


def z_image(batch: int) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=4, dim=48, n_layers=1,
        n_refiner_layers=1, n_heads=3, n_kv_heads=3, cap_feat_dim=16, axes_dims=[4, 6, 6],
        axes_lens=[64, 64, 64],
    )  # fmt: skip
    return model, {
        "x": [torch.randn(4, 1, 2 * ROWS, 2 * COLS) for _ in range(batch)],
        "t": torch.zeros(batch),
        "cap_feats": [torch.randn(6, 16) for _ in range(batch)],
    }


MODELS = {
    builder.__name__: builder
    for builder in (
        wan, wan_ti2v, hunyuan_video, cogvideox, cosmos, cosmos_per_frame, mochi, ltx, allegro,
        flux, lumina2, z_image,
    )
}  # fmt: skip
# Dynamo splits these after the timestep's embedding; the first graph is the one that has it.
BROKEN = ("lumina2", "z_image")


@cache
def captured(name: str, batch: int) -> Capture:
    """The graph of a model that holds its timestep input."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](batch)
    return capture_all(model.eval(), inputs, fullgraph=name not in BROKEN)[0]
