"""Tokens that are put together from pieces: written through views, by an index, after pointwise operations, and cropped.

As in test_moved_tokens: the second attention is exact where a piece may be at another place than it was.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sta_compile.analysis import written_pieces
from tests.end_to_end.moving import GRID, Body, C, H, Model, N, T, W, check


def flat(x: Tensor) -> Tensor:
    return x.flatten(1, 3)


def grid(y: Tensor) -> Tensor:
    return y.unflatten(1, GRID)


def copied_to_views(model: Model, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:, 0].copy_(x[:, 2])
    y.narrow(1, 1, 2).copy_(x[:, :2])
    return model.attn[1](y)


def added_to_views(model: Model, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for frame, other in zip(y.unbind(1), x.unbind(1)[::-1], strict=True):
        frame.add_(other)
    return model.attn[1](y)


def copied_all_at_once(model: Model, x: Tensor) -> Tensor:
    y = x.clone()
    torch._foreach_copy_(list(y.chunk(2, 3)), list(x.chunk(2, 3))[::-1])
    return model.attn[1](y)


def written_after_pointwise(model: Model, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    for i in range(T):
        y[:, i] = F.gelu(x[:, T - 1 - i]) * 2
    return model.attn[1](y)


def written_to_rows_of_a_view(model: Model, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    rows = y.flatten(1, 2)
    rows[:, :H], rows[:, H:] = x.flatten(1, 2)[:, -H:], x.flatten(1, 2)[:, :-H]
    return model.attn[1](y)


def written_in_turn(model: Model, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:, :, :, ::2], y[:, :, :, 1::2] = x[:, :, :, : W // 2], x[:, :, :, W // 2 :]
    return model.attn[1](y)


def swapped_by_lists(model: Model, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, [0, 2]] = x[:, [2, 0]]
    return model.attn[1](y)


def picked_in_two_parts(model: Model, x: Tensor) -> Tensor:
    first, last = model.shuffled.split(N // 2)
    return model.attn[1](grid(torch.cat([flat(x)[:, first], flat(x).index_select(1, last)], 1)))


def written_by_a_mask(model: Model, x: Tensor) -> Tensor:
    y, even = torch.zeros_like(flat(x)), torch.arange(N) % 2 == 0
    y[:, even], y[:, ~even] = flat(x)[:, : N // 2], flat(x)[:, N // 2 :]
    return model.attn[1](grid(y + model.table))


def crop_of_a_bigger_buffer(model: Model, x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], T + 1, H, W, C)
    y[:, 1:].copy_(x)
    return model.attn[1](y[:, :-1])


def crop_before_it_is_filled(model: Model, x: Tensor) -> Tensor:
    buffer = x.new_zeros(x.shape[0], T + 1, H, W, C)
    y = buffer[:, :-1]
    buffer[:, 1:] = x
    return model.attn[1](y)


def frames_attended_one_by_one(model: Model, x: Tensor) -> Tensor:
    """Each as a slice of all tokens, and put back from the last to the first."""
    y = torch.empty_like(x)
    for i, frame in enumerate(flat(x).split(H * W, 1)):
        y[:, T - 1 - i] = F.scaled_dot_product_attention(frame, frame, frame).unflatten(1, (H, W))
    return model.attn[1](y)


def frames_scattered(model: Model, x: Tensor) -> Tensor:
    y = torch.slice_scatter(x, x[:, :2], 1, 1, 3)
    return model.attn[1](torch.select_scatter(y, x[:, 2], 1, 0))


def columns_split(model: Model, x: Tensor) -> Tensor:
    first, last = torch.hsplit(x.transpose(1, 3), 2)
    return model.attn[1](torch.cat([last, first], 1).transpose(1, 3))


def parts_flipped_alike(model: Model, x: Tensor) -> Tensor:
    y = torch.cat([part.flip(3) for part in x.chunk(2, 3)], 3)
    return model.attn[1](y).flip(3)


def frames_filled_into_tokens(model: Model, x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], 5 + N, C)
    for i in range(T):
        y[:, 5 + i * H * W : 5 + (i + 1) * H * W] = x[:, T - 1 - i].flatten(1, 2) * 2
    return model.attn[1](grid(y[:, 5:]))


def rows_copied_into_tokens(model: Model, x: Tensor) -> Tensor:
    y = flat(x).clone()
    for i, row in enumerate(row for frame in x.unbind(1) for row in frame.unbind(1)[::-1]):
        y[:, i * W : (i + 1) * W].copy_(row)
    return model.attn[1](grid(y))


def frames_filled_into_a_view(model: Model, x: Tensor) -> Tensor:
    y = x.contiguous().clone()
    y.view(len(x), N, C)[:, : H * W] = x[:, 2].flatten(1, 2)
    y.view(len(x), N, C).index_copy_(1, torch.arange(2 * H * W, N), x[:, 0].flatten(1, 2))
    return model.attn[1](y)


def columns_shifted_by_padding(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](F.pad(x, (0, 0, 1, -1)))


def padded_in_front_cropped_behind(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](grid(F.pad(F.pad(flat(x), (0, 0, 5, 0)), (0, 0, 0, -5))))


def strided_from_another_token(model: Model, x: Tensor) -> Tensor:
    y = torch.cat([flat(x), flat(x)], 1)
    return model.attn[1](grid(y.as_strided((len(x), N, C), (2 * N * C, C, 1), 3 * C)))


MOVED = (
    *(copied_to_views, added_to_views, copied_all_at_once, written_after_pointwise),
    *(written_to_rows_of_a_view, written_in_turn, swapped_by_lists, picked_in_two_parts),
    *(written_by_a_mask, crop_of_a_bigger_buffer, frames_scattered, columns_split),
    *(parts_flipped_alike, crop_before_it_is_filled, frames_attended_one_by_one),
    *(frames_filled_into_tokens, rows_copied_into_tokens, frames_filled_into_a_view),
    *(columns_shifted_by_padding, padded_in_front_cropped_behind, strided_from_another_token),
)


def each_frame_in_its_place(model: Model, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    for i, frame in enumerate(x.unbind(1)):
        y[:, i].copy_(F.linear(F.layer_norm(frame, (C,)), model.attn[0].qkv.weight[:C]))
    return model.attn[1](y)


def frames_convolved_one_by_one(model: Model, x: Tensor) -> Tensor:
    kernel = torch.ones(C, 1, 3, 3)
    maps = [F.conv2d(f.movedim(-1, 1), kernel, padding=1, groups=C) for f in x.unbind(1)]
    return model.attn[1](torch.stack(maps, 2).movedim(1, -1))


def first_frame_given(model: Model, x: Tensor) -> Tensor:
    given = grid(model.table)[:, :1].expand(len(x), -1, -1, -1, -1)
    y = torch.cat([given, x[:, 1:] * 2], 1)
    y[:, 0].mul_(2)
    return model.attn[1](y)


def joint_buffer(model: Model, x: Tensor) -> Tensor:
    """Video behind text, put together and taken apart again."""
    y = x.new_zeros(len(x), 5 + N, C)
    y[:, :5] = model.table[:, :5]
    y[:, 5:] = flat(x)
    return model.attn[1](grid(F.gelu(y)[:, 5:]))


def halves_in_their_places(model: Model, x: Tensor) -> Tensor:
    halves = [flat(half) * 2 for half in x.chunk(2, 3)]
    return model.attn[1](torch.cat([half.unflatten(1, (T, H, W // 2)) for half in halves], 3))


def channels_turned_in_place(model: Model, x: Tensor) -> Tensor:
    y = x.clone()
    y[..., : C // 2] = x[..., : C // 2] * 2 - x[..., C // 2 :]
    y[..., C // 2 :].add_(x[..., : C // 2])
    return model.attn[1](y)


def picked_rows_in_their_places(model: Model, x: Tensor) -> Tensor:
    y, some, even = flat(x).clone(), model.shuffled[:9], torch.arange(N) % 2 == 0
    y[:, some] = flat(x)[:, some] * 2
    y[:, [1, 4]] = y[:, [1, 4]] + y[:, 2:3]
    y[:, even] = y[:, even] * 3
    return model.attn[1](grid(y))


def frames_between_others(model: Model, x: Tensor) -> Tensor:
    """References before the video, and registers within, which are left out again."""
    y = torch.cat([x[:, -1:], x, x[:, :1]], 1)[:, 1:-1]
    y = torch.cat([flat(x)[:, :30], model.table[:, :2].expand(len(x), -1, -1), flat(y)[:, 30:]], 1)
    return model.attn[1](grid(torch.cat([y[:, :30], y[:, 32:]], 1)))


def filled_in_order(model: Model, x: Tensor) -> Tensor:
    """Frame by frame, and one of them row by row; padded, cropped, and the first frame written once more."""
    y = x.new_zeros(x.shape[0], N, C)
    for i in range(T - 1):
        y[:, i * H * W : (i + 1) * H * W] = x[:, i].flatten(1, 2)
    for i, row in enumerate(x[:, -1].unbind(1)):
        y[:, N + (i - H) * W : N + (i + 1 - H) * W] = row
    y = F.pad(F.pad(y, (0, 0, 4, 5)), (0, 0, -4, -5))
    return model.attn[1](torch.cat([y[:, : H * W].view(len(x), 1, H, W, C) * 2, grid(y)[:, 1:]], 1))


IN_PLACE = (
    *(each_frame_in_its_place, first_frame_given, joint_buffer, halves_in_their_places),
    *(channels_turned_in_place, picked_rows_in_their_places, frames_between_others),
    *(frames_convolved_one_by_one, filled_in_order),
)
CASES = [*((body, [0]) for body in MOVED), *((body, [0, 1, 2]) for body in IN_PLACE)]


@pytest.mark.parametrize(("body", "windowed"), CASES, ids=[body.__name__ for body, _ in CASES])
def test_windows_are_over_places_of_the_video(body: Body, windowed: list[int]) -> None:
    check(body, windowed)


def every_second_in_its_place(model: Model, x: Tensor) -> Tensor:
    y = flat(x).clone()
    y[:, ::2] = flat(x)[:, ::2] * 2
    y.index_copy_(1, torch.arange(1, N, 2), flat(x)[:, 1::2] * 3)
    return model.attn[1](grid(y))


@pytest.mark.parametrize(
    ("body", "windowed"), [(written_in_turn, [0]), (every_second_in_its_place, [0, 1, 2])]
)
def test_many_rows_are_judged_at_once(body: Body, windowed: list[int], monkeypatch) -> None:
    monkeypatch.setattr(written_pieces, "_MANY", 2)
    check(body, windowed)
