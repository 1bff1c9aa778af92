"""Frames, rows and columns are those of the video, whatever the order of its tokens: windows, tiles and kept frames follow.

The mask is that of the definition over (frames, rows, cols), and its tokens are then put in the model's order.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.oracle import window_mask
from tests.end_to_end.packed_models import FAMILIES

GRID = T, H, W = 4, 6, 8
C, HEADS = 16, 2
OPTIONS = {"window": (1, 6, 3), "tile": (1, 2, 2)}  # a frame, all rows, columns around
Order = tuple[int, int, int]
ORDERS: list[Order] = [(0, 1, 2), (1, 2, 0), (2, 1, 0), (0, 2, 1)]


def by_conv3d(model: Model, latent: Tensor) -> Tensor:
    return model.conv3d(latent)


def by_conv2d(model: Model, latent: Tensor) -> Tensor:
    x = model.conv2d(latent.transpose(1, 2).flatten(0, 1))
    return x.unflatten(0, (-1, latent.shape[2])).transpose(1, 2)


def by_patches(model: Model, latent: Tensor) -> Tensor:
    b, c, t, h, w = latent.shape
    x = latent.view(b, c, t, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6).flatten(4)
    return model.linear(x).permute(0, 4, 1, 2, 3)


class Model(nn.Module):
    """Tokens [batch, tokens, C] in an order of (frames, rows, cols); `text` stands before them."""

    def __init__(self, embed: Callable[[Model, Tensor], Tensor], order: Order) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv3d = nn.Conv3d(4, C, (1, 2, 2), stride=(1, 2, 2))
        self.conv2d = nn.Conv2d(4, C, 2, stride=2)
        self.linear, self.qkv = nn.Linear(16, C), nn.Linear(C, 3 * C)
        self.out = nn.Linear(C, 16)
        self.text = nn.Parameter(torch.randn(1, 5, C))
        self.embed, self.order, self.mask = embed, order, None

    def forward(self, latent: Tensor) -> Tensor:
        x = self.embed(self, latent).movedim(1, -1)  # [batch, frames, rows, cols, C]
        back = [1 + self.order.index(axis) for axis in range(3)]
        x = x.permute(0, *(1 + axis for axis in self.order), 4)
        shape = x.shape[1:4]
        y = torch.cat([self.text.expand(x.shape[0], -1, -1), x.flatten(1, 3)], 1)
        q, k, v = (u.unflatten(-1, (HEADS, -1)).transpose(1, 2) for u in self.qkv(y).chunk(3, -1))
        y = y + F.scaled_dot_product_attention(q, k, v, self.mask).transpose(1, 2).flatten(2)
        x = self.out(y[:, 5:]).unflatten(1, shape).permute(0, *back, 4)
        x = x.unflatten(4, (4, 2, 2)).permute(0, 4, 1, 2, 5, 3, 6)
        return x.flatten(5, 6).flatten(3, 4)


def beside_text(mask: Tensor, order: Order) -> Tensor:
    """A mask over (frames, rows, cols), for tokens in another order that stand behind text."""
    places = torch.arange(prod(GRID)).view(GRID).permute(order).flatten()
    whole = torch.ones(5 + len(mask), 5 + len(mask), dtype=torch.bool)
    whole[5:, 5:] = mask[places][:, places]
    return whole


def compiled(model: Model, **options):
    inputs = {"latent": torch.randn(2, 4, T, 2 * H, 2 * W)}
    return inputs, compile_variants(model, inputs, {"sta": {**OPTIONS, **options}})["sta"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("embed", [by_conv3d, by_conv2d, by_patches])
@torch.no_grad()
def test_windows_follow_the_video(embed, order):
    model = Model(embed, order).eval()
    inputs, variant = compiled(model)
    (site,) = variant.report.replaced
    assert (site.grid, site.tile, site.tiles) == (GRID, (1, 2, 2), (4, 3, 4))
    assert site.window == (1, 3, 3)
    names = ", ".join(("frames", "rows", "cols")[axis] for axis in order)
    assert site.order == ("" if order == (0, 1, 2) else f"tokens in the order {names}")
    assert site.order in str(variant.report)
    model.mask = beside_text(window_mask(site.grid, site.tiles, site.window), order)
    assert relative_error(variant.run(**inputs), model(**inputs)) < 1e-5


@pytest.mark.parametrize("order", ORDERS)
@torch.no_grad()
def test_frames_that_every_query_sees(order):
    """Where frames come first they are kept; elsewhere their tokens do not stand together, and attention is exact."""
    model = Model(by_conv3d, order).eval()
    inputs, variant = compiled(model, always_keep={"frames": [0]})
    if order[0] == 0:
        (site,) = variant.report.replaced
        assert site.grid == (T - 1, H, W)
        mask = torch.ones(prod(GRID), prod(GRID), dtype=torch.bool)
        mask[H * W :, H * W :] = window_mask(site.grid, site.tiles, site.window)
        model.mask = beside_text(mask, order)
    else:
        (refused,) = variant.report.refused
        assert "the tokens of a frame do not stand together" in refused.reason
    assert relative_error(variant.run(**inputs), model(**inputs)) < 1e-5


@torch.no_grad()
def test_a_declared_grid_in_another_order_agrees():
    _, variant = compiled(Model(by_conv3d, (1, 2, 0)).eval(), grid=GRID)
    assert variant.report.replaced[0].evidence == "proved by conv3d patch embed"


class OfTime(nn.Module):
    """Attention over the mean of the rows: a grid of frames and columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.out = nn.Conv3d(4, C, 1), nn.Linear(C, 3 * C), nn.Linear(C, 4)
        self.mask = None

    def forward(self, latent: Tensor) -> Tensor:
        x = self.embed(latent).permute(0, 2, 3, 4, 1)
        y = x.mean(2).flatten(1, 2)
        q, k, v = (u.unflatten(-1, (HEADS, -1)).transpose(1, 2) for u in self.qkv(y).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, self.mask).transpose(1, 2).flatten(2)
        return self.out(x + y.unflatten(1, (T, W))[:, :, None]).permute(0, 4, 1, 2, 3)


@torch.no_grad()
def test_frames_and_columns():
    model, inputs = OfTime().eval(), {"latent": torch.randn(2, 4, *GRID)}
    variant = compile_variants(model, inputs, {"sta": {"window": (1, 1, 3), "tile": (1, 1, 2)}})[
        "sta"
    ]
    (site,) = variant.report.replaced
    assert (site.grid, site.tiles, site.window) == ((T, 1, W), (T, 1, 4), (1, 1, 3))
    model.mask = window_mask(site.grid, site.tiles, site.window)
    assert relative_error(variant.run(**inputs), model(**inputs)) < 1e-5


@torch.no_grad()
def test_a_report_says_where_nothing_names_the_axes():
    case = FAMILIES["ltx_coords"].case(1, (3, 4, 7), layers=1)
    report = compile_variants(case.model, case.inputs, {"sta": OPTIONS})["sta"].report
    text = " ".join(str(report).replace("│", " ").split())
    assert "frames, rows and cols are named by the order of the tokens" in text
