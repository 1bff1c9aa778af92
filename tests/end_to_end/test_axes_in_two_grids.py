"""A video's tokens and its frames' have rows and columns in common: tile order stays around the attentions of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.oracle import window_mask
from tests.end_to_end.tiny import SPARSE

GRID = T, H, W = 3, 4, 6
C = 16
Masks = tuple[Tensor | None, Tensor | None]  # of attention within frames, and over the video


def attend(x: Tensor, qkv: nn.Linear, mask: Tensor | None) -> Tensor:
    """[batch, tokens, channels]"""
    q, k, v = (u.unflatten(-1, (2, -1)).transpose(1, 2) for u in qkv(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def in_a_loop(y: Tensor, qkv: nn.Linear, mask: Tensor | None) -> Tensor:
    return torch.stack([frame + attend(frame, qkv, mask) for frame in y.unbind(1)], 1)


def written_back(y: Tensor, qkv: nn.Linear, mask: Tensor | None) -> Tensor:
    out = torch.empty_like(y)
    for i in range(T):
        out[:, i] = y[:, i] + attend(y[:, i], qkv, mask)
    return out


def frames_as_heads(y: Tensor, qkv: nn.Linear, mask: Tensor | None) -> Tensor:
    return y + F.scaled_dot_product_attention(*qkv(y).chunk(3, -1), mask)


class Both(nn.Module):
    def __init__(self, within: Callable[..., Tensor], first: bool) -> None:
        super().__init__()
        self.embed = nn.Conv3d(4, C, 1)
        self.frame, self.video = nn.Linear(C, 3 * C), nn.Linear(C, 3 * C)
        self.out = nn.Linear(C, 4)
        self.within, self.first = within, first
        self.masks: Masks = (None, None)

    def forward(self, latent: Tensor) -> Tensor:
        y = self.embed(latent).flatten(3).permute(0, 2, 3, 1)  # [batch, frames, rows * cols, C]
        if self.first:
            y = self.within(y, self.frame, self.masks[0])
        y = y.flatten(1, 2)
        y = y + attend(y, self.video, self.masks[1])
        y = y.unflatten(1, (T, -1))
        if not self.first:
            y = self.within(y, self.frame, self.masks[0])
        return self.out(y).unflatten(2, (H, W)).permute(0, 4, 1, 2, 3)


@pytest.mark.parametrize("first", [True, False], ids=["frames first", "video first"])
@pytest.mark.parametrize("within", [in_a_loop, written_back, frames_as_heads])
@torch.no_grad()
def test_frames_and_the_video(within: Callable[..., Tensor], first: bool) -> None:
    model = Both(within, first).eval()
    inputs = {"latent": torch.randn(2, 4, *GRID)}
    variant = compile_variants(model, inputs, {"sta": SPARSE})["sta"]
    sites = {site.grid: site for site in variant.report.replaced}
    assert GRID in sites
    masks = []
    for grid in ((1, H, W), GRID):
        site = sites.get(grid)
        masks.append(None if site is None else window_mask(grid, site.tiles, site.window))
    model.masks = masks[0], masks[1]
    assert relative_error(variant.run(**inputs), model(**inputs)) < 1e-5
