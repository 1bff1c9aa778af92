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

    Layers of kinds that are not linear or convolutions, or whose class has a forward of its own, keep their hook.
    """
    changed: list[tuple[Any, dict[str, Any]]] = []
    for module in model.modules():
        registry: Any = getattr(module, "_diffusers_hook", None)
        hook = registry.get_hook(HOOK) if registry is not None else None
        forward = next((f for kind, f in _FORWARDS if type(module) is kind), None)
        if hook is None or forward is None:
            continue
        reference = registry._fn_refs[registry._hook_order.index(HOOK)]
        fields = ("pre_forward", "post_forward", "forward")
        changed.append((reference, {name: getattr(reference, name) for name in fields}))
        reference.pre_forward = _unchanged_inputs
        reference.post_forward = _unchanged_output
        reference.forward = partial(forward, module, hook.compute_dtype)

    def undo() -> None:
        for reference, fields in changed:
            for name, value in fields.items():
                setattr(reference, name, value)

    return undo


def _unchanged_inputs(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def _unchanged_output(module: nn.Module, output: Any) -> Any:
    return output
