"""`sta::attention` and its backward: registration of everything that torch asks of an operator.

`out` has the strides of `empty_like(q)`: q [batch, heads, tokens, head_dim] that is a transposed
[batch, tokens, heads, head_dim] gives an `out` of that order. `lse` is float32, natural log,
contiguous [batch, heads, tokens], and not differentiable.

Everything that selects a kernel is in the arguments. Fake kernels read no length of `segments` or
`grid`, which may be unknown (unbacked) when a graph is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..errors import StaError
from ..ir.attention_spec import AttentionSpec
from ..ir.visibility import Visibility
from ..runtime import launch, launch_backward
from . import quantized_reference, reference, tiered_reference
from .arguments import check_kinds, check_sizes, geometry_of
from .library import LIBRARY, define, register_autograd

_PROBLEM = (
    "Tensor? key_lengths, Tensor? dense, SymInt[] segments, SymInt[] grid, str spec, float scale, "
    "Tensor? key_mask=None, Tensor? video_mask=None"
)
define(f"attention(Tensor q, Tensor k, Tensor v, {_PROBLEM}) -> (Tensor out, Tensor lse)")
define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_PROBLEM}) -> (Tensor dq, Tensor dk, Tensor dv)"
)

Lengths = Sequence[int]


def _visible(
    key_lengths: Tensor | None,
    dense: Tensor | None,
    segments: Lengths,
    grid: Lengths,
    spec: str,
    scale: float,
    key_mask: Tensor | None = None,
    video_mask: Tensor | None = None,
) -> Visibility:
    return Visibility(geometry_of(segments, grid, spec), key_lengths, key_mask, dense, video_mask)


def _attention(q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    call = launch.Call(q, k, v, *problem)
    key = launch.key_of(call)
    launched = launch.launch_again(call, key)
    if launched is not None:
        return launched
    check_kinds(q, k, v)
    visible = _visible(*problem)
    check_sizes(q, k, v, visible)
    asked = AttentionSpec.parse(call.spec)
    launched = launch.attention_forward(call, visible, asked.kernel, key)
    if launched is not None:
        return launched
    if q.numel() == 0:
        return reference.forward(q, k, v, visible, call.scale)
    if asked.precision == "tiered":
        return tiered_reference.forward(q, k, v, visible, call.scale, asked.trade)
    if asked.precision == "native":
        return reference.forward(q, k, v, visible, call.scale)
    return quantized_reference.forward(q, k, v, visible, call.scale, asked.precision)


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    check_kinds(q, k, v)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *problem: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    check_kinds(q, k, v)
    visible = _visible(*problem)
    check_sizes(q, k, v, visible)
    call = launch.Call(q, k, v, *problem)
    kernel = AttentionSpec.parse(call.spec).kernel
    grads = launch_backward.attention_backward(call, visible, kernel, out, lse, dout)
    return grads or reference.backward(dout, q, k, v, out, lse, visible, call.scale)


def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _recorded(q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Any, ...]:
    """Only native precision has gradients, so what they are gradients of is native too."""
    key_lengths, dense, segments, grid, text, *rest = problem
    spec = AttentionSpec.parse(text)
    if spec.precision != "native":
        text = replace(spec, precision="native").text()
    return (q, k, v, key_lengths, dense, segments, grid, text, *rest)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, key_lengths, dense, *problem, key_mask, video_mask = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, key_lengths, dense, key_mask, video_mask)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.problem = problem


def _differentiate(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 11
    *tensors, key_mask, video_mask = ctx.saved_tensors
    grads = torch.ops.sta.attention_backward(dout, *tensors, *ctx.problem, key_mask, video_mask)
    return (*grads, *(None,) * 8)


def _refuse_second_order(ctx: Any, *grads: Any) -> None:
    raise StaError(
        "sta::attention has no second derivative; compute higher-order gradients on the model "
        'without backend="sta"'
    )


def _vmap(op: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """The mapped axis becomes part of the batch. tensors: leading arguments that are never None."""
    folded_arguments = {
        *range(tensors + 2),
        tensors + 6,
        tensors + 7,
    }  # and those that say what is seen

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size

        def fold(x: Tensor | None, dim: int | None) -> Tensor | None:
            if x is None:
                return None
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        pairs = enumerate(zip(arguments, in_dims, strict=True))
        outputs = op(*(fold(x, dim) if i in folded_arguments else x for i, (x, dim) in pairs))
        return tuple(x.unflatten(0, (size, -1)) for x in outputs), (0,) * len(outputs)

    return rule


def _autocast(device: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """What torch does for scaled_dot_product_attention: q, k, v in the active autocast dtype."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}")

    def rule(q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device)

        def cast(x: Tensor) -> Tensor:
            eligible = x.device.type == device and x.dtype != torch.float64
            return x.to(dtype) if eligible and x.is_floating_point() else x

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            result: tuple[Tensor, Tensor] = torch.ops.sta.attention(
                cast(q), cast(k), cast(v), *problem
            )
        return result

    return rule


def _pairs(q_shape: Sequence[int], segments: Lengths, grid: Lengths, spec: str) -> int:
    batch, heads, _, head_dim = q_shape
    return batch * head_dim * geometry_of(segments, grid, spec).pairs(heads)


LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("sta::attention", _attention_fake, lib=LIBRARY)
torch.library.register_fake("sta::attention_backward", _backward_fake, lib=LIBRARY)
register_autograd("attention", _differentiate, _setup_context, _attention, _recorded)
torch.library.register_autograd("sta::attention_backward", _refuse_second_order, lib=LIBRARY)
torch.library.register_vmap("sta::attention", _vmap(torch.ops.sta.attention, 3), lib=LIBRARY)
torch.library.register_vmap(
    "sta::attention_backward", _vmap(torch.ops.sta.attention_backward, 6), lib=LIBRARY
)
LIBRARY.impl("attention", _autocast("cuda"), "AutocastCUDA")
LIBRARY.impl("attention", _autocast("cpu"), "AutocastCPU")


@register_flop_formula(torch.ops.sta.attention)
def attention_flops(
    q: Any,
    k: Any,
    v: Any,
    key_lengths: Any,
    dense: Any,
    segments: Lengths,
    grid: Lengths,
    spec: str,
    *rest: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """Two products over the pairs of the sparse branch, with all context keys valid."""
    return 4 * _pairs(q, segments, grid, spec)


@register_flop_formula(torch.ops.sta.attention_backward)
def attention_backward_flops(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    key_lengths: Any,
    dense: Any,
    segments: Lengths,
    grid: Lengths,
    spec: str,
    *rest: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """Five products: scores again, dP, dV, dQ, dK."""
    return 10 * _pairs(q, segments, grid, spec)
