"""Frames that are embedded one by one, or some at a time, and put one behind the other: one video, or none that is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.models import randomize
from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo, check

GRID = (4, 4, 6)
Embed = Callable[
    ["InPieces", Tensor], Tensor
]  # latent [batch, channels, frames, rows, cols] -> tokens


class InPieces(TinyVideo):
    def __init__(self, embed: Embed) -> None:
        super().__init__(layers=2)
        self.embed = embed
        self.by_frame, self.by_pixel = nn.Conv2d(CHANNELS, 16, 1), nn.Linear(CHANNELS, 16)
        self.places = nn.Parameter(torch.randn(GRID[1] * GRID[2], 16))
        randomize(self)

    def forward(self, latent: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(self, latent)
        for block in self.blocks:
            x = block(x)
        return self.out(x).unflatten(1, latent.shape[2:]).movedim(-1, 1)

    def frame(self, latent: Tensor) -> Tensor:
        """[batch, channels, rows, cols]"""
        return self.by_frame(latent).flatten(2).mT + self.places

    def frames(self, latent: Tensor) -> Tensor:
        return self.patchify(latent).flatten(2).mT


def selected(model: InPieces, x: Tensor) -> Tensor:
    return torch.cat([model.frame(x[:, :, i]) for i in range(x.shape[2])], 1)


def split_by_products(model: InPieces, x: Tensor) -> Tensor:
    pieces = [model.by_pixel(u[:, :, 0].flatten(2).mT) for u in x.split(1, 2)]
    return torch.cat(pieces, 1)


def first_apart(model: InPieces, x: Tensor) -> Tensor:
    return torch.cat([model.frames(x[:, :, :1]), model.frames(x[:, :, 1:])], 1)


def two_at_a_time(model: InPieces, x: Tensor) -> Tensor:
    """Frames are samples of the convolution."""
    pieces = [model.frame(u.transpose(1, 2).flatten(0, 1)) for u in x.split(2, 2)]
    return torch.cat([u.unflatten(0, (len(x), 2)).flatten(1, 2) for u in pieces], 1)


def rows_at_a_time(model: InPieces, x: Tensor) -> Tensor:
    return torch.cat([model.frames(u) for u in x.split(2, 3)], 1)


def in_another_order(model: InPieces, x: Tensor) -> Tensor:
    return torch.cat([model.frame(u) for u in x.unbind(2)[::-1]], 1)


def some_twice(model: InPieces, x: Tensor) -> Tensor:
    return torch.cat([model.frame(x[:, :, i]) for i in (0, 1, 1, 3)], 1)


@pytest.mark.parametrize("embed", [selected, split_by_products, first_apart, two_at_a_time])
def test_all_frames_in_turn_are_the_video(embed: Embed) -> None:
    model = InPieces(embed).eval()
    variant = check(model, model.sites, SPARSE, latent=torch.randn(2, CHANNELS, *GRID))
    assert {site.grid for site in variant.report.replaced} == {GRID}


@pytest.mark.parametrize("embed", [rows_at_a_time, in_another_order, some_twice])
@torch.no_grad()
def test_none_of_others_is_taken_for_the_video(embed: Embed) -> None:
    model, inputs = InPieces(embed).eval(), {"latent": torch.randn(2, CHANNELS, *GRID)}
    variant = compile_variants(model, inputs, {"sta": SPARSE})["sta"]
    assert not variant.report.replaced
    assert relative_error(variant.run(**inputs), model(**inputs)) < 1e-6
