"""Work on the first frame and on the others becomes a select over all tokens, if that is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.analysis.small_dits import (
    DIM,
    TEXT,
    VIDEO,
    H,
    SmallDiT,
    W,
    compiled,
    expected,
    inputs,
    no_rope,
    relative_error,
)
from tests.analysis.traced import calls

FIRST = H * W
Hook = Callable[[SmallDiT, Tensor], Tensor]


def split_in_two(m: SmallDiT, x: Tensor) -> Tensor:
    first, rest = x.split([FIRST, x.shape[1] - FIRST], 1)
    return torch.cat((first * m.weight[0], rest), dim=-2)


def two_values(m: SmallDiT, x: Tensor) -> Tensor:
    y = F.silu(x)
    return torch.cat([x[:, :FIRST] + y[:, :FIRST] * m.weight[0], x[:, FIRST:] - y[:, FIRST:]], 1)


def written(m: SmallDiT, x: Tensor) -> Tensor:
    """The slices are read before the write, and what they are slices of after it."""
    x = x.clone()
    first, rest = x[:, :FIRST] * 2, x[:, FIRST:] + 1
    x.mul_(3)
    return torch.cat([first, rest], 1) + x


JOINED: dict[str, Hook] = {
    "slices": lambda m, x: torch.cat([x[:, :FIRST] * m.weight[0] + 1, x[:, FIRST:] * 0.5], 1),
    "a split": split_in_two,
    "narrow": lambda m, x: torch.cat(
        [x.narrow(1, 0, FIRST), x.narrow(1, FIRST, x.shape[1] - FIRST).neg()], 1
    ),
    "three ranges": lambda m, x: torch.cat([x[:, :5] * 0.5, x[:, 5:FIRST], -x[:, FIRST:]], 1),
    "two values": two_values,
    "ellipsis": lambda m, x: torch.cat([x[..., :FIRST, :] * 2, x[..., FIRST:, :]], -2),
}
APART: dict[str, Hook] = {
    "work in other places": lambda m, x: torch.cat([x[:, :FIRST].flip(1), x[:, FIRST:]], 1),
    "numbers for each token": lambda m, x: torch.cat(
        [x[:, :FIRST] * m.weight[:FIRST], x[:, FIRST:]], 1
    ),
    "other tokens": lambda m, x: torch.cat([x[:, -FIRST:] * 2, x[:, FIRST:]], 1),
    "tokens twice": lambda m, x: torch.cat([x[:, : FIRST + 1], x[:, FIRST:]], 1)[:, 1:],
    "nothing of the rest": lambda m, x: torch.cat(
        [x[:, :FIRST] * 2, torch.zeros_like(x[:, FIRST:])], 1
    ),
    "not defined everywhere": lambda m, x: torch.cat([x[:, :FIRST], x[:, FIRST:].abs().log()], 1),
    "memory that is written": written,
}


def model_with(hook: Hook, layers: int) -> SmallDiT:
    model = SmallDiT(rope=no_rope, text=(0, TEXT), layers=layers)
    for layer in model.layers:
        layer.norm.register_forward_hook(lambda module, args, y: hook(model, y))
    return model


def conversions(hook: Hook, layers: int) -> int:
    model, args = model_with(hook, layers), inputs(2, TEXT)
    result = compiled(model, *args)
    assert len(result.report.replaced) == layers
    assert relative_error(result.output, expected(model, result, *args)) < 1e-5
    return result.report.conversions


@pytest.mark.parametrize("name", JOINED)
def test_a_frame_of_its_own_costs_no_conversion_in_a_layer(name: str) -> None:
    assert conversions(JOINED[name], 1) == conversions(JOINED[name], 3)


@pytest.mark.parametrize("name", APART)
def test_what_is_no_select_stays_as_it_is(name: str) -> None:
    model, args = model_with(APART[name], 1), inputs(2, TEXT)
    result = compiled(model, *args, window="full")
    assert not calls(result.gm, "where")
    assert relative_error(result.output, model(*args).detach()) < 1e-5


def test_slices_of_the_text_are_left_alone() -> None:
    hook: Hook = lambda m, x: torch.cat([x[:, :VIDEO] * 2, x[:, VIDEO:]], 1)  # noqa: E731
    assert conversions(hook, 1) == 2


def test_outputs_keep_their_strides() -> None:
    class Output(SmallDiT):
        def forward(self, latent: Tensor, text: Tensor) -> Tensor:
            x = self.embed3(latent).flatten(2).transpose(1, 2)
            x = self.layers[0](self, x)
            y = F.linear(x.mT.contiguous().mT, torch.eye(DIM)) + x.mT.contiguous().mT
            return torch.cat([y[:, :FIRST] * 2, y[:, FIRST:]], 1)

    model, args = Output(rope=no_rope), inputs()
    result, plain = compiled(model, *args, window="full"), model(*args)
    assert result.output.stride() == plain.stride()
    assert relative_error(result.output, plain.detach()) < 1e-5
