"""Tokens that go through operators of which nothing says where they put them, or through products that mix tokens.

As in test_moved_tokens: attention over tokens that may stand elsewhere is exact; what leaves each at its place is windowed.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.end_to_end.moving import GRID, Body, C, H, Model, N, T, W, check


def flat(x: Tensor) -> Tensor:
    return x.flatten(1, 3)


def grid(y: Tensor) -> Tensor:
    return y.unflatten(1, GRID)


def one_hot(model: Model, x: Tensor) -> Tensor:
    return F.one_hot(model.shuffled, N).to(x)


def matrix_by_einsum(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](grid(torch.einsum("ij,bjc->bic", one_hot(model, x), flat(x))))


def matrix_last_in_einsum(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](grid(torch.einsum("bjc,ij->bic", flat(x), one_hot(model, x))))


def matrix_by_bmm(model: Model, x: Tensor) -> Tensor:
    matrix = one_hot(model, x).expand(x.shape[0], N, N)
    return model.attn[1](grid(torch.bmm(matrix, flat(x))))


def matrix_on_the_right(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](grid((flat(x).mT @ one_hot(model, x)).mT))


def matrix_as_weights(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](grid(F.linear(flat(x).mT, one_hot(model, x)).mT))


def matrix_of_comparisons(model: Model, x: Tensor) -> Tensor:
    matrix = (model.shuffled[:, None] == torch.arange(N)).to(x)
    return model.attn[1](grid(matrix @ flat(x)))


def matrix_solved(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](grid(torch.linalg.solve(one_hot(model, x), flat(x))))


def sorted_falling(model: Model, x: Tensor) -> Tensor:
    """Not the way back: argsort of a permutation is its inverse only if the least comes first."""
    order = model.table[0, :, 0].argsort()
    return grid(flat(model.attn[1](grid(flat(x)[:, order])))[:, order.argsort(descending=True)])


def index_changed_in_place(model: Model, x: Tensor) -> Tensor:
    order = model.shuffled.clone()
    y = flat(model.attn[1](grid(flat(x)[:, order])))
    order.add_(1).remainder_(N)
    z = torch.zeros_like(y)
    z[:, order] = y
    return grid(z)


def index_of_three_dimensions(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](flat(x)[:, torch.arange(N).view(GRID).flip(2)])


def sampled(model: Model, x: Tensor) -> Tensor:
    y = x.flatten(0, 1).permute(0, 3, 1, 2)
    mirrored = torch.tensor([[-1.0, 0, 0], [0, 1, 0]]).expand(y.shape[0], 2, 3)
    places = F.affine_grid(mirrored, list(y.shape), align_corners=False)
    y = F.grid_sample(y, places, align_corners=False)
    return model.attn[1](y.permute(0, 2, 3, 1).reshape(x.shape))


def rolled_under_vmap(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](torch.vmap(lambda sample: sample.roll(1, 2))(x))


def flipped_in_a_branch(model: Model, x: Tensor) -> Tensor:
    def yes(y: Tensor) -> Tensor:
        return y.flip(3)

    return model.attn[1](torch.cond(x.sum() > -1e9, yes, torch.clone, (x,)))


def added_to_means_of_rows(model: Model, x: Tensor) -> Tensor:
    """The means have no rows, so the sum has those that were flipped."""
    return model.attn[1](x.flip(3) + x.mean(2, keepdim=True))


def rolled_by_the_whole_length(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](x.roll(-W, 3).roll((2 * H, T), (2, 1)))


def mixed_by_weights(model: Model, x: Tensor) -> Tensor:
    """As mixers do: what weights make of places is theirs."""
    weights = model.attn[1].qkv.weight[:H, :H]
    return model.attn[1](F.linear(x.permute(0, 1, 3, 4, 2), weights).permute(0, 1, 4, 2, 3))


def weights_on_the_left(model: Model, x: Tensor) -> Tensor:
    weights = model.attn[1].qkv.weight
    y = torch.einsum("dc,bnc->bnd", weights, flat(x)) + (weights @ flat(x).mT).mT
    return model.attn[1](grid(y[..., :C]))


def turned_in_space(model: Model, x: Tensor) -> Tensor:
    """As with rays of a camera: three channels of each token."""
    three = flat(x)[..., :3]
    return model.attn[1](x + grid(torch.cross(three, three * 2 + 1, -1)).mean(-1, keepdim=True))


@torch.library.custom_op("sta_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def operator_of_another_library(model: Model, x: Tensor) -> Tensor:
    """A fused norm, say: it is taken to leave tokens at their places."""
    return model.attn[1](doubled(x))


MOVED = (
    *(matrix_by_einsum, matrix_last_in_einsum, matrix_by_bmm, matrix_on_the_right),
    *(matrix_as_weights, matrix_of_comparisons, sorted_falling, index_changed_in_place),
    *(index_of_three_dimensions, sampled, rolled_under_vmap, flipped_in_a_branch),
    *(added_to_means_of_rows, matrix_solved),
)
IN_PLACE = (
    *(rolled_by_the_whole_length, mixed_by_weights, weights_on_the_left, turned_in_space),
    operator_of_another_library,
)
CASES = [*((body, [0]) for body in MOVED), *((body, [0, 1, 2]) for body in IN_PLACE)]


@pytest.mark.parametrize(("body", "windowed"), CASES, ids=[body.__name__ for body, _ in CASES])
def test_windows_are_over_places_of_the_video(body: Body, windowed: list[int]) -> None:
    reasons = check(body, windowed)
    assert all("rolled, flipped or picked" in reason for reason in reasons)
