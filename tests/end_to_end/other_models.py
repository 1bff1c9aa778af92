"""Models in which there is nothing to replace, each with its inputs, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.end_to_end.models import CHANNELS, HEAD_DIM, HEADS, TEXT_DIM, Inputs, randomize

FRAMES, ROWS, COLS = 3, 4, 6


def latte() -> tuple[nn.Module, Inputs]:
    """Attends within frames, then along time: factorised, so short already."""
    model = diffusers.LatteTransformer3DModel(
        sample_size=2 * ROWS, num_layers=1, patch_size=2, attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS, caption_channels=TEXT_DIM, in_channels=CHANNELS,
        out_channels=2 * CHANNELS, cross_attention_dim=HEADS * HEAD_DIM, attention_bias=True,
        norm_type="ada_norm_single", norm_elementwise_affine=False, num_embeds_ada_norm=1000,
        activation_fn="gelu-approximate", video_length=FRAMES,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, CHANNELS, FRAMES, 2 * ROWS, 2 * ROWS),
        "encoder_hidden_states": torch.randn(2, 5, TEXT_DIM),
        "timestep": torch.full((2,), 900),
        "return_dict": False,
    }


def sana_video() -> tuple[nn.Module, Inputs]:
    """Linear attention, and cross-attention to text."""
    model = diffusers.SanaVideoTransformer3DModel(
        in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM, num_layers=1, num_cross_attention_heads=HEADS,
        cross_attention_head_dim=HEAD_DIM, cross_attention_dim=HEADS * HEAD_DIM,
        caption_channels=TEXT_DIM, mlp_ratio=2.0, sample_size=16, patch_size=(1, 2, 2),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, CHANNELS, FRAMES, 2 * ROWS, 2 * COLS),
        "encoder_hidden_states": torch.randn(2, 5, TEXT_DIM),
        "timestep": torch.full((2,), 900),
        "return_dict": False,
    }


def language_model() -> tuple[nn.Module, Inputs]:
    """Causal attention over text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config), {
        "input_ids": torch.arange(24).view(2, 12),
        "use_cache": False,
        "return_dict": False,
    }


class ResNet(nn.Module):
    """No attention at all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = self.stem(x).relu()
        x = (x + self.norm(self.inner(x))).relu()
        return (self.head(x.mean((-2, -1))),)


def resnet() -> tuple[nn.Module, Inputs]:
    return ResNet(), {"x": torch.randn(2, 3, 16, 16)}


# model -> a part of the reason that a user reads
OTHERS: dict[Callable[[], tuple[nn.Module, Inputs]], str] = {
    latte: "factorised attention",
    sana_video: "not self-attention over video tokens",
    language_model: "token grid of 12 tokens is not known",
    resnet: "no attention",
}


def build(builder: Callable[[], tuple[nn.Module, Inputs]]) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = builder()
    randomize(model)
    return model.eval(), inputs
