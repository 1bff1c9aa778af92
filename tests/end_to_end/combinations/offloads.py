"""Ways to keep a model's weights elsewhere until they are needed, with the real hooks of accelerate and diffusers.

Without a GPU both places are the CPU: the hooks run and graphs break at them as they do on a GPU, and no byte moves. The
streams of group offload need CUDA.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

CPU = torch.device("cpu")


def nothing(model: nn.Module) -> None:
    pass


def whole_model(model: nn.Module) -> None:
    """What `pipe.enable_model_cpu_offload()` does to each of its models."""
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(model, CPU)


def groups_of_blocks(model: nn.Module) -> None:
    model.enable_group_offload(  # type: ignore[operator]
        CPU, CPU, offload_type="block_level", num_blocks_per_group=1
    )


def groups_of_leaves(model: nn.Module) -> None:
    model.enable_group_offload(CPU, CPU, offload_type="leaf_level")  # type: ignore[operator]


OFFLOADS: dict[str, Callable[[nn.Module], None]] = {
    "none": nothing,
    "model": whole_model,
    "group, blocks": groups_of_blocks,
    "group, leaves": groups_of_leaves,
}
