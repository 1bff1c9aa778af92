"""Operations between two attentions that move, mix, pick or write tokens: tile order must not be seen by any of them.

Whatever a body does, the compiled model equals the eager one in which the replaced attentions see their windows. An
attention whose tokens can't be followed stays dense.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.oracle import Oracle, site_mask
from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo

GRID = T, H, W = (3, 6, 8)
N = T * H * W


def roll(x):
    return torch.roll(x, 5, 1)


def flip(x):
    return x.flip(1)


def cumulative_sum(x):
    return x.cumsum(1) / N


def sort(x):
    return x.sort(1).values


def conv_along_tokens(x):
    return F.conv1d(
        x.mT, torch.linspace(-1, 1, 3).expand(x.shape[2], 1, 3), padding=1, groups=16
    ).mT


def conv_over_the_grid(x):
    video = x.mT.unflatten(2, GRID)
    weight = torch.linspace(-1, 1, 27).view(1, 1, 3, 3, 3).expand(16, 1, 3, 3, 3)
    return F.conv3d(video, weight, padding=1, groups=16).flatten(2).mT


def mean_per_frame(x):
    return x + x.unflatten(1, (T, H * W)).mean(2).repeat_interleave(H * W, 1)


def mean_per_row(x):
    return x + x.view(x.shape[0], T, H, W, -1).mean(3, keepdim=True).expand(
        -1, -1, -1, W, -1
    ).flatten(1, 3)


def positions(x):
    return x + torch.arange(N)[:, None] / N


def positions_of_rows(x):
    return x + (torch.arange(N) // W % H)[None, :, None]


def write_to_a_slice(x):
    x = x.clone()
    x[:, : H * W] += 1
    return x


def write_to_every_second(x):
    x = x.clone()
    x[:, ::2] *= -1
    return x


def write_to_a_view(x):
    x = x.clone()
    x.view(-1, T, H, W, x.shape[2])[:, 1, 2].zero_()
    return x


def write_by_mask(x):
    return x.masked_fill((torch.arange(N) % 7 == 0)[:, None], 0.5)


def halves_swapped(x):
    return torch.cat([x[:, N // 2 :], x[:, : N // 2]], 1)


def first_frame_given(x):
    return torch.cat([x[:, : H * W] * 2, x[:, H * W :] + 1], 1)


def gather(x):
    return x[:, torch.arange(N).flip(0)]


def index_by_values(x):
    return torch.gather(x, 1, x[..., :1].argsort(1).expand_as(x))


def softmax_over_tokens(x):
    return x * x.softmax(1) * N


def norm_over_tokens(x):
    return F.normalize(x, dim=1) * 10


def largest_token(x):
    return x + x.amax(1, keepdim=True)


def tokens_and_channels_swapped(x):
    return F.linear(x.mT, torch.eye(N).roll(1, 0)).mT


def transposed_grid(x):
    """Rows become columns: as many tokens, in another order."""
    return x.view(-1, T, H, W, x.shape[2]).transpose(2, 3).flatten(1, 3)


def frames_in_the_batch(x):
    y = x.reshape(-1, H * W, x.shape[2])
    return (y + y.roll(1, 1)).view_as(x)


def batch_and_tokens_merged(x):
    y = x.reshape(-1, x.shape[2])
    return y.flip(0).view_as(x)


def unfold(x):
    return x.unfold(1, 4, 4).mean(-1).repeat_interleave(4, 1)


def triangle(x):
    return (x.mT @ torch.ones(N, N).tril()).mT / N


def pooled(x):
    return F.interpolate(F.avg_pool1d(x.mT, 2), scale_factor=2.0).mT


def through_a_list(x):
    return torch.stack([token * (1 + i % 3) for i, token in enumerate(x.unbind(1)[:N])], 1)


BODIES = [
    roll, flip, cumulative_sum, sort, conv_along_tokens, conv_over_the_grid, mean_per_frame,
    mean_per_row, positions, positions_of_rows, write_to_a_slice, write_to_every_second,
    write_to_a_view, write_by_mask, halves_swapped, first_frame_given, gather, index_by_values,
    softmax_over_tokens, norm_over_tokens, largest_token, tokens_and_channels_swapped,
    transposed_grid, frames_in_the_batch, batch_and_tokens_merged, unfold, triangle, pooled,
    through_a_list,
]  # fmt: skip


class WithBody(TinyVideo):
    def __init__(self, body) -> None:
        super().__init__(layers=2)
        self.body = body

    def forward(self, latent: Tensor) -> Tensor:
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        x = self.blocks[1](self.body(self.blocks[0](x)))
        return self.out(x).unflatten(1, GRID).permute(0, 4, 1, 2, 3)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_the_order_of_tokens_is_not_seen(body, batch):
    model, latent = WithBody(body), torch.randn(batch, CHANNELS, *GRID)
    variant = compile_variants(model, {"latent": latent}, {"sta": SPARSE})["sta"]
    sites = variant.report.replaced
    assert "blocks.0.attn" in [site.name for site in sites]
    with ExitStack() as stack:
        for site in sites:  # one body makes another grid
            assert site.window == (1, 3, 3)
            stack.enter_context(Oracle(model, [site.name], site_mask(site)))
        expected = model(latent)
    assert relative_error(variant.run(latent=latent), expected) < 1e-5
    assert relative_error(expected, model(latent)) > 1e-3


class ApartKeys(TinyVideo):
    """Keys and values come from the tokens after the body, queries from those before."""

    def __init__(self, body) -> None:
        super().__init__()
        self.body = body

    def forward(self, latent: Tensor) -> Tensor:
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        x = x + self.blocks[0].attn(x, self.body(x))
        return self.out(x).unflatten(1, GRID).permute(0, 4, 1, 2, 3)


@pytest.mark.parametrize(
    "body",
    [roll, flip, sort, gather, halves_swapped, transposed_grid, batch_and_tokens_merged],
    ids=lambda body: body.__name__,
)
@torch.no_grad()
def test_keys_in_another_order_are_not_near_their_queries(body):
    model, latent = ApartKeys(body), torch.randn(2, CHANNELS, *GRID)
    variant = compile_variants(model, {"latent": latent}, {"sta": SPARSE})["sta"]
    assert not variant.report.replaced
    assert relative_error(variant.run(latent=latent), model(latent)) < 1e-6
