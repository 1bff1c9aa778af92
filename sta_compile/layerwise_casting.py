"""Layerwise casting that a graph can hold.

diffusers stores weights in fp8 and casts a layer with `module.to(dtype)` before its forward and back after it. Dynamo
can't trace a module that changes its parameters, so every layer is a graph break, and no graph shows where q, k and v
come from. The same arithmetic with the cast inside the product, `linear(x, weight.to(dtype))`, is traced, and the weights
stay in fp8: inductor makes the cast when the layer runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .diffusers_hooks import Changes, hook_of

HOOK = "layerwise_casting"


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _linear(module: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    return F.linear(x, module.weight.to(dtype), _cast(module.bias, dtype))


def _conv(module: Any, dtype: torch.dtype, x: Tensor) -> Tensor:
    out: Tensor = module._conv_forward(x, module.weight.to(dtype), _cast(module.bias, dtype))
    return out


_FORWARDS: tuple[tuple[type[nn.Module], Callable[..., Tensor]], ...] = (
    (nn.Linear, _linear),
    (nn.Conv1d, _conv),
    (nn.Conv2d, _conv),
    (nn.Conv3d, _conv),
)


def cast_inside(model: nn.Module) -> Callable[[], None]:
    """Makes the casts of diffusers' layerwise casting part of the layers' forwards; returns what undoes it.

    Layers of kinds that are not linear or convolutions, whose class has a forward of its own, or on which another hook acts
    inside of the cast, keep their hook.
    """
    changes = Changes()
    for module in model.modules():
        found = hook_of(module, HOOK)
        forward = next((f for kind, f in _FORWARDS if type(module) is kind), None)
        if found is not None and forward is not None and found.innermost:
            changes.make(found, partial(forward, module, found.hook.compute_dtype))
    return changes.undo
