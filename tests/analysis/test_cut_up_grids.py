"""Bodies that keep [batch, frames, rows, cols, width]: tile order passes through what has no regard for the axes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.analysis.small_dits import (
    DIM,
    GRID,
    Hook,
    SmallDiT,
    T,
    W,
    compiled,
    expected,
    inputs,
    no_rope,
    relative_error,
)

FREE: dict[str, Hook] = {
    "pointwise": lambda m, x: F.silu(x) * m.weight[0] + 1,
    "modulated": lambda m, x: x * x.mean((1, 2, 3), keepdim=True) + m.weight[0][None, None, None, None],
    "linear": lambda m, x: F.linear(x, m.layers[0].q.weight),
    "norm of channels": lambda m, x: F.layer_norm(x, (DIM,), m.weight[0], m.weight[1]),
    "norm spelled out": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1),
    "channels apart": lambda m, x: torch.cat([x[..., DIM // 2 :], x[..., : DIM // 2]], -1),
    "channels chunked": lambda m, x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "channels first": lambda m, x: (x.permute(0, 4, 1, 2, 3) * 2).movedim(1, -1),
    "frames and positions": lambda m, x: F.gelu(x.flatten(2, 3)).view_as(x),
    "added in place": lambda m, x: x.clone().add_(x),
}  # fmt: skip
BOUND: dict[str, Hook] = {
    "softmax of rows": lambda m, x: x.softmax(2),
    "norm of cols": lambda m, x: F.layer_norm(x, (W, DIM)),
    "normalised cols": lambda m, x: F.normalize(x, dim=3),
    "attention in rows": lambda m, x: F.scaled_dot_product_attention(x, x, x),
    "mean of frames": lambda m, x: x - x.mean(1, keepdim=True),
    "largest of cols": lambda m, x: x - x.amax(3, keepdim=True),
    "sum over other rows": lambda m, x: x + torch.einsum("bthwd,btgwd->bthwd", x, x) / 50,
    "frames weighted": lambda m, x: x * m.weight[:T].view(1, T, 1, 1, DIM),
    "rows mixed": lambda m, x: F.linear(x.mT, m.weight[:W, :W]).mT / 5,
    "rows rolled": lambda m, x: x + x.roll(1, 2),
    "frames summed up": lambda m, x: x.cumsum(1) / T,
    "first frame written": lambda m, x: F.pad(x[:, 1:], (0, 0, 0, 0, 0, 0, 1, 0)) + x,
    "frame written in place": lambda m, x: (y := x.clone(), y[:, :1].mul_(3), y)[2],
    "frames reversed": lambda m, x: x + torch.stack(x.unbind(1)[::-1], 1),
    "frames in the batch": lambda m, x: F.gelu((y := x.flatten(0, 1)) + y.mean(0)).view_as(x),
    "rows as frames": lambda m, x: x + x.permute(0, 2, 1, 3, 4).reshape(x.shape),
}  # fmt: skip


def cut_up(hook: Hook) -> Hook:
    return lambda m, x: hook(m, x.unflatten(1, GRID)).flatten(1, 3)


@pytest.mark.parametrize("name", FREE)
def test_operations_without_regard_for_axes(name: str) -> None:
    model, args = (
        SmallDiT(rope=no_rope, before=cut_up(FREE[name]), after=cut_up(FREE[name])),
        inputs(),
    )
    result = compiled(model, *args)
    assert relative_error(result.output, expected(model, result, *args)) < 1e-5
    assert result.report.conversions == 2


@pytest.mark.parametrize("name", BOUND)
def test_operations_that_tell_axes_apart(name: str) -> None:
    """Before and after an attention, so that tile order would be the cheaper one for them."""
    hook, args = cut_up(BOUND[name]), inputs()
    model = SmallDiT(rope=no_rope, layers=2, before=hook, after=hook)
    for layer in model.layers:
        layer.o.register_forward_hook(lambda module, args, y: hook(model, y))
    result = compiled(model, *args)
    assert relative_error(result.output, expected(model, result, *args)) < 1e-5
