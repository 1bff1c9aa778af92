"""LoRA with peft, as diffusers loads it: before the compile, and changed after it."""

from __future__ import annotations

import torch
from peft import LoraConfig
from peft.utils.hotswap import hotswap_adapter_from_state_dict
from torch import Tensor, nn

RANK = 4
NAME = "first"


def add_lora(model: nn.Module) -> None:
    config = LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False
    )
    torch.manual_seed(3)
    model.add_adapter(config, NAME)  # type: ignore[operator]
    model.eval()


def other_lora(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """The weights of another adapter of the same rank."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator).to(value.dtype) / 4
        for name, value in model.state_dict().items()
        if ".lora_" in name
    }


def hot_swap(model: nn.Module, seed: int) -> None:
    config = model.peft_config[NAME]  # type: ignore[index]
    hotswap_adapter_from_state_dict(model, other_lora(model, seed), NAME, config)
