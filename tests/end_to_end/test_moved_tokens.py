"""Tokens that are rolled, flipped or picked in another order before attention: their places are none of the video's.

Each body has three attentions, the second one over tokens that it may have moved. Those over moved tokens stay exact; the
others see the definition's window.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.end_to_end.moving import Body, C, H, Model, T, W, check


def shifted(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](x.roll((1, 2), (2, 3))).roll((-1, -2), (2, 3))


def shifted_beside(model: Model, x: Tensor) -> Tensor:
    return x + model.attn[1](x.roll(1, 2)).roll(-1, 2)


def shifted_all_round(model: Model, x: Tensor) -> Tensor:
    """Two rolls that together go once around."""
    return model.attn[1](x.roll(1, 1)).roll(2, 1)


def tokens_rolled(model: Model, x: Tensor) -> Tensor:
    y = x.flatten(1, 3).roll(5, 1).view(x.shape)
    return model.attn[1](y).flatten(1, 3).roll(-5, 1).view(x.shape)


def flipped(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](x.flip(2)).flip(2)


def flipped_frames_and_columns(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](x.flip(1, 3)).flip((3,)).flip([1])


BACK = (
    shifted,
    shifted_beside,
    shifted_all_round,
    tokens_rolled,
    flipped,
    flipped_frames_and_columns,
)


def serpentine(model: Model, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :, 1::2] = x[:, :, 1::2].flip(3)
    return model.attn[1](x)


def left_rolled(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](x.roll(1, 3))


def picked(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](x[:, :, :, model.order])


def written_flipped(model: Model, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:] = x.flip(3)
    return model.attn[1](y)


def put_behind(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](torch.cat([x[:, 1:], x[:, :1]], 1))


def last_frame_first(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](torch.stack(x.unbind(1)[::-1], 1))


def listed(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](x[:, :, [2, 0, 1, 3]])


def chosen_by_rows(model: Model, x: Tensor) -> Tensor:
    odd = (torch.arange(H) % 2 == 1)[:, None, None]
    return model.attn[1](torch.where(odd, x.flip(3), x))


def by_frame(x: Tensor) -> Tensor:
    """Frames in the batch, and back: [batch, tokens of some frames, C]"""
    batch, tokens, _ = x.shape
    return F.gelu(x.reshape(batch * tokens // (H * W), H * W, C)).reshape(batch, tokens, C)


def first_frame_twice(model: Model, x: Tensor) -> Tensor:
    first, y = x[:, 0].flatten(1, 2), x.flatten(1, 3)
    return model.attn[1](torch.cat([first, by_frame(y[:, : -H * W])], 1).view_as(x))


FOR_GOOD = (
    *(serpentine, left_rolled, picked, written_flipped, put_behind, last_frame_first),
    *(listed, chosen_by_rows, first_frame_twice),
)


def added_to_itself(model: Model, x: Tensor) -> Tensor:
    """A neighbour is added to each token, which stays where it is."""
    return model.attn[1](x + x.roll(1, 3))


def channels_rolled(model: Model, x: Tensor) -> Tensor:
    return model.attn[1](x.roll(1, 4))


def there_and_back(model: Model, x: Tensor) -> Tensor:
    y = F.gelu(x.roll((1, 1), (1, 2)).flip(3)).flip(3).roll((-1, -1), (1, 2))
    return model.attn[1](y)


def first_frame_apart(model: Model, x: Tensor) -> Tensor:
    first, others = x.flatten(1, 3).split([H * W, (T - 1) * H * W], 1)
    y = torch.cat([first, by_frame(others)], 1)
    return model.attn[1]((y + F.pad(by_frame(y[:, H * W :]), (0, 0, H * W, 0))).view_as(x))


IN_PLACE = (added_to_itself, channels_rolled, there_and_back, first_frame_apart)
CASES = [
    *((body, [0, 2]) for body in BACK),
    *((body, [0]) for body in FOR_GOOD),
    *((body, [0, 1, 2]) for body in IN_PLACE),
]


@pytest.mark.parametrize(("body", "windowed"), CASES, ids=[body.__name__ for body, _ in CASES])
def test_windows_are_over_places_of_the_video(body: Body, windowed: list[int]) -> None:
    reasons = check(body, windowed)
    if body not in (
        put_behind,
        last_frame_first,
        first_frame_twice,
    ):  # their frames are another axis to the graph
        assert len(reasons) == 3 - len(windowed)
        assert all("rolled, flipped or picked" in reason for reason in reasons)
