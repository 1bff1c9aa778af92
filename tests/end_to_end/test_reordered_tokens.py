"""Tokens that other operations than rolls and flips put in another order: by an index, by writing, in pieces.

As in test_moved_tokens: the second attention may be over moved tokens, and is exact then; the third is windowed where the
graph shows that they are back.
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


def spread(index: Tensor, y: Tensor) -> Tensor:
    return index[None, :, None].expand_as(y)


def written_and_read(model: Model, x: Tensor) -> Tensor:
    y = torch.empty_like(flat(x))
    y[:, model.shuffled] = flat(x)
    return grid(flat(model.attn[1](grid(y)))[:, model.shuffled])


def read_and_written(model: Model, x: Tensor) -> Tensor:
    y = flat(model.attn[1](grid(flat(x)[:, model.shuffled])))
    return grid(torch.zeros_like(y).index_copy_(1, model.shuffled, y))


def scattered(model: Model, x: Tensor) -> Tensor:
    y = flat(x)
    y = torch.zeros_like(y).scatter(1, spread(model.shuffled, y), y)
    return grid(flat(model.attn[1](grid(y))).gather(1, spread(model.shuffled, y)))


def added_to_nothing(model: Model, x: Tensor) -> Tensor:
    y = torch.zeros_like(flat(x)).index_add(1, model.shuffled, flat(x))
    return grid(flat(model.attn[1](grid(y))).index_select(1, model.shuffled))


def sorted_and_restored(model: Model, x: Tensor) -> Tensor:
    """As masked autoencoders do."""
    order = model.table[0, :, 0].argsort()
    y = flat(x).gather(1, spread(order, flat(x)))
    return grid(flat(model.attn[1](grid(y))).gather(1, spread(order.argsort(), y)))


def list_written(model: Model, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, :, [2, 0, 1, 3]] = x
    return model.attn[1](y)[:, :, [2, 0, 1, 3]]


def flipped_by_numbers(model: Model, x: Tensor) -> Tensor:
    backwards = torch.arange(W - 1, -1, -1)
    return model.attn[1](x[:, :, :, backwards]).flip(3)


def rolled_by_numbers(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](x[:, :, :, (torch.arange(W) - 2) % W]).roll(-2, 3)


def fft_shifted(model: Model, x: Tensor) -> Tensor:
    return torch.fft.ifftshift(model.attn[1](torch.fft.fftshift(x, dim=(1, 3))), dim=(1, 3))


def padded_around(model: Model, x: Tensor) -> Tensor:
    y = F.pad(flat(x).mT, (3, 0), mode="circular")[..., :N].mT
    return grid(F.pad(flat(model.attn[1](grid(y))).mT, (0, 3), mode="circular")[..., 3:].mT)


def frames_behind_each_other(model: Model, x: Tensor) -> Tensor:
    y = torch.hstack([flat(x)[:, H * W :], flat(x)[:, : H * W]])
    return grid(flat(model.attn[1](grid(y))).roll(H * W, 1))


def flipped_in_place(model: Model, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.copy_(x.flip(3))
    return model.attn[1](y).flip(3)


def rolled_before_a_table(model: Model, x: Tensor) -> Tensor:
    """A table says nothing of the tokens that it is added to."""
    return model.attn[1](x.roll(1, 3) + grid(model.table)).roll(-1, 3)


def mean_of_flipped(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](torch.stack([x.flip(3), 2 * x.flip(3)]).mean(0)).flip(3)


def by_one_hot_rows(model: Model, x: Tensor) -> Tensor:
    matrix = F.one_hot(model.shuffled, N).to(x)
    y = torch.empty_like(flat(x))
    y[:, model.shuffled] = flat(model.attn[1](grid(matrix @ flat(x) + model.table)))
    return grid(y)


BACK = (
    *(written_and_read, read_and_written, scattered, added_to_nothing, sorted_and_restored),
    *(list_written, flipped_by_numbers, rolled_by_numbers, fft_shifted, padded_around),
    *(frames_behind_each_other, flipped_in_place, rolled_before_a_table, mean_of_flipped),
    by_one_hot_rows,
)


def put_by_places(model: Model, x: Tensor) -> Tensor:
    places = (model.shuffled[:, None] * C + torch.arange(C)) + torch.arange(2)[
        :, None, None
    ] * N * C
    y = torch.zeros_like(flat(x)).put_(places, flat(x))
    return model.attn[1](grid(y + model.table))


def taken(model: Model, x: Tensor) -> Tensor:
    places = (model.shuffled[:, None] * C + torch.arange(C)) + torch.arange(2)[
        :, None, None
    ] * N * C
    return model.attn[1](grid(flat(x).take(places) + model.table))


def written_by_two_indices(model: Model, x: Tensor) -> Tensor:
    y = torch.zeros_like(flat(x))
    y.index_put_((torch.arange(2)[:, None], model.shuffled[None]), flat(x))
    return model.attn[1](grid(y))


def sorted_values(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](x.sort(2).values + grid(model.table))


def frames_written_behind(model: Model, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:, 1:], y[:, 0] = x[:, :-1], x[:, -1]
    return model.attn[1](y)


def frame_before(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](torch.cat([x[:, :1], x[:, :-1]], 1) + grid(model.table))


def shifted_by_padding(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1] + grid(model.table))


def every_second_first(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](torch.cat([x[:, :, ::2], x[:, :, 1::2]], 2) + grid(model.table))


def halves_in_turn(model: Model, x: Tensor) -> Tensor:
    y = torch.stack(flat(x).chunk(2, 1), 2).flatten(1, 2)
    return model.attn[1](grid(y + model.table))


def read_as_another_grid(model: Model, x: Tensor) -> Tensor:
    y = flat(x).unflatten(1, (W, H, T)).transpose(1, 3)
    return model.attn[1](grid(y.flatten(1, 3) + model.table))


def channels_shuffled_by_rows(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](grid(F.channel_shuffle(flat(x), 4) + model.table))


def beside_flipped_samples(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](torch.cat([x, x.flip(3)]))[: len(x)]


FOR_GOOD = (
    *(put_by_places, taken, written_by_two_indices, sorted_values, frames_written_behind),
    *(frame_before, shifted_by_padding, every_second_first, halves_in_turn, read_as_another_grid),
    *(channels_shuffled_by_rows, beside_flipped_samples),
)


def frames_shifted_in_some_channels(model: Model, x: Tensor) -> Tensor:
    """The other channels of a token stay where they are."""
    y = torch.cat([x[..., :4].roll(1, 1), x[..., 4:8].roll(-1, 1), x[..., 8:]], -1)
    return model.attn[1](x + F.linear(y, model.attn[0].qkv.weight[:C]))


def frames_shifted_in_written_channels(model: Model, x: Tensor) -> Tensor:
    """As in TSM; no sum with tokens that were not shifted."""
    y = torch.zeros_like(x)
    y[:, :-1, ..., :4] = x[:, 1:, ..., :4]
    y[:, 1:, ..., 4:8] = x[:, :-1, ..., 4:8]
    y[..., 8:] = x[..., 8:]
    return model.attn[1](F.linear(y, model.attn[0].qkv.weight[:C]))


def only_shifted_in_some_channels(model: Model, x: Tensor) -> Tensor:
    y = torch.cat([x[..., :4].roll(1, 1), x[..., 4:]], -1)
    return model.attn[1](F.linear(y, model.attn[0].qkv.weight[:C]))


def first_frame_copied(model: Model, x: Tensor) -> Tensor:
    few = torch.arange(H * W)
    return model.attn[1](grid(flat(x).index_copy(1, few, flat(x)[:, few] * 2)))


def first_frame_written(model: Model, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :1] = x[:, :1] * 2
    return model.attn[1](y)


IN_PLACE = (
    *(frames_shifted_in_some_channels, frames_shifted_in_written_channels),
    *(only_shifted_in_some_channels, first_frame_copied, first_frame_written),
)
CASES = [
    *((body, [0, 2]) for body in BACK),
    *((body, [0]) for body in FOR_GOOD),
    *((body, [0, 1, 2]) for body in IN_PLACE),
]


@pytest.mark.parametrize(("body", "windowed"), CASES, ids=[body.__name__ for body, _ in CASES])
def test_windows_are_over_places_of_the_video(body: Body, windowed: list[int]) -> None:
    reasons = check(body, windowed)
    if windowed == [0, 2]:
        assert len(reasons) == 1
        assert "rolled, flipped or picked" in reasons[0]
