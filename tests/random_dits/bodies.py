"""What models do to their tokens between attentions, [batch, tokens, width] -> the same.

FOLLOWED keep the tokens' order, or add to it what a conversion around them gives: they may not cost a replacement.
MOVED give the tokens another order, of which the graph may know nothing: attention after them may stay dense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tests.random_dits.model import RandomDit

Body = Callable[["RandomDit", Tensor], Tensor]


def frame(m: RandomDit) -> int:
    return m.dit.grid[1] * m.dit.grid[2]


def mean_of_frames(m: RandomDit, x: Tensor) -> Tensor:
    means = x.unflatten(1, (m.dit.grid[0], -1)).mean(2)
    return x + means.repeat_interleave(frame(m), 1)


def frames_apart(m: RandomDit, x: Tensor) -> Tensor:
    y = x.reshape(-1, frame(m), x.shape[2])
    return x + F.gelu(y + y.mean(1, keepdim=True)).reshape(x.shape)


def attention_in_frames(m: RandomDit, x: Tensor) -> Tensor:
    y = x.unflatten(1, (m.dit.grid[0], -1)).flatten(0, 1).unflatten(2, (2, -1)).transpose(1, 2)
    y = m.in_frames(y).transpose(1, 2).flatten(2)
    return x + y.unflatten(0, (x.shape[0], -1)).flatten(1, 2)


def conv_over_grid(m: RandomDit, x: Tensor) -> Tensor:
    y = x.mT.unflatten(2, m.dit.grid)
    return x + F.conv3d(y, m.kernel, padding=1, groups=x.shape[2]).flatten(2).mT


def conv_over_tokens(m: RandomDit, x: Tensor) -> Tensor:
    return x + F.conv1d(x.mT, m.kernel[:, :, 0, 0], padding=1, groups=x.shape[2]).mT


def first_frame_scaled(m: RandomDit, x: Tensor) -> Tensor:
    return torch.cat([x[:, : frame(m)] * 2, x[:, frame(m) :] + 1], 1)


def first_frame_written(m: RandomDit, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, : frame(m)] = x[:, : frame(m)] * 2
    return x


def first_frame_added(m: RandomDit, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, : frame(m)] += m.places[: frame(m)]
    return x


def last_token_zeroed(m: RandomDit, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, -1] = 0
    return x


def where_by_place(m: RandomDit, x: Tensor) -> Tensor:
    return torch.where((torch.arange(x.shape[1]) < frame(m))[:, None], x * 2, x)


def cumulative_sum(m: RandomDit, x: Tensor) -> Tensor:
    return x + x.cumsum(1) / x.shape[1]


def rolled(m: RandomDit, x: Tensor) -> Tensor:
    return x + x.roll(3, 1)


def flipped(m: RandomDit, x: Tensor) -> Tensor:
    return x + x.flip(1)


def rows_selected(m: RandomDit, x: Tensor) -> Tensor:
    return x + x.index_select(1, m.order)


def rows_by_index(m: RandomDit, x: Tensor) -> Tensor:
    return x + x[:, m.order]


def rows_gathered(m: RandomDit, x: Tensor) -> Tensor:
    return x + x.gather(1, m.order[None, :, None].expand_as(x))


def rows_copied(m: RandomDit, x: Tensor) -> Tensor:
    return x + torch.zeros_like(x).index_copy(1, m.order, x)


def rows_scattered(m: RandomDit, x: Tensor) -> Tensor:
    return x + torch.zeros_like(x).scatter_add(1, m.order[None, :, None].expand_as(x), x)


def some_rows_added(m: RandomDit, x: Tensor) -> Tensor:
    return x.index_add(1, m.order[:5], x[:, :5])


def shifted_by_padding(m: RandomDit, x: Tensor) -> Tensor:
    return x + F.pad(x, (0, 0, 2, 0))[:, : x.shape[1]]


def mean_of_tokens(m: RandomDit, x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def softmax_of_tokens(m: RandomDit, x: Tensor) -> Tensor:
    return x + x.softmax(1)


def place_of_largest(m: RandomDit, x: Tensor) -> Tensor:
    return x + x.argmax(1)[:, None] / x.shape[1]


def table_added(m: RandomDit, x: Tensor) -> Tensor:
    return x + m.places


def table_of_frames(m: RandomDit, x: Tensor) -> Tensor:
    t, h, w = m.dit.grid
    return (x.unflatten(1, (t, h * w)) + m.places[:t, None]).flatten(1, 2)


def scaled_by_kind(m: RandomDit, x: Tensor) -> Tensor:
    """A row of a small table for each token, as in MiniMax-H3."""
    return x * (1 + m.places[:3].index_select(0, m.kinds)) + m.places[3:6][m.kinds]


def halves_swapped(m: RandomDit, x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    return torch.cat([x[:, half:], x[:, :half]], 1)


def sorted_tokens(m: RandomDit, x: Tensor) -> Tensor:
    return x.sort(1).values


def shuffled(m: RandomDit, x: Tensor) -> Tensor:
    return x[:, m.order]


def reversed_tokens(m: RandomDit, x: Tensor) -> Tensor:
    return x.flip(1)


def rows_and_columns_swapped(m: RandomDit, x: Tensor) -> Tensor:
    return x.unflatten(1, m.dit.grid).transpose(2, 3).flatten(1, 3)


def channels_and_tokens_mixed(m: RandomDit, x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)


def batch_and_tokens_reversed(m: RandomDit, x: Tensor) -> Tensor:
    return x.flatten(0, 1).flip(0).view_as(x)


def mixed_by_matrix(m: RandomDit, x: Tensor) -> Tensor:
    return F.linear(x.mT, m.mixing).mT


FOLLOWED: dict[str, Body] = {
    body.__name__: body
    for body in (
        mean_of_tokens, scaled_by_kind, softmax_of_tokens, table_added, table_of_frames, mean_of_frames, frames_apart,
        attention_in_frames, conv_over_grid, conv_over_tokens, first_frame_scaled, first_frame_written,
        first_frame_added, last_token_zeroed, where_by_place, cumulative_sum, rolled, flipped,
        rows_selected, rows_by_index, rows_gathered, rows_copied, rows_scattered, some_rows_added,
        shifted_by_padding, place_of_largest,
    )
}  # fmt: skip
MOVED: dict[str, Body] = {
    body.__name__: body
    for body in (
        halves_swapped, sorted_tokens, shuffled, reversed_tokens, rows_and_columns_swapped,
        channels_and_tokens_mixed, batch_and_tokens_reversed, mixed_by_matrix,
    )
}  # fmt: skip
BODIES = FOLLOWED | MOVED
PLACES = ("before", "in blocks", "after")
