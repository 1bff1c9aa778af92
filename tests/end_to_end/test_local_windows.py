"""Attention that a model restricts to windows of its own, of whatever shape and however it is written, stays exact.

The windows stand in the batch or beside the heads, so that each call has a part of the rows, columns or frames: three
factors of tokens, as a video of its own has. The attention over the whole video beside it is replaced all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.end_to_end import attention_stubs as stubs
from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.oracle import window_mask
from tests.end_to_end.tiny import SPARSE, OneProduct

GRID = T, H, W = 4, 4, 6
C, HEADS = 16, 2
Within = Callable[["Model", Tensor], Tensor]  # [batch, frames, rows, columns, C] -> the same


class Model(nn.Module):
    """A latent that a convolution embeds; tokens=True: its places as one axis, [batch, tokens, channels]."""

    def __init__(self, within: Within, *, tokens: bool = False, whole: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, C) if tokens else nn.Conv3d(4, C, 1)
        self.part, self.video = OneProduct(C, HEADS), OneProduct(C, HEADS)
        self.out = nn.Linear(C, 4)
        self.within, self.tokens, self.whole = within, tokens, whole

    def forward(self, latent: Tensor) -> Tensor:
        x = self.embed(latent)
        x = x.unflatten(1, GRID) if self.tokens else x.permute(0, 2, 3, 4, 1)
        x = x + self.within(self, x)
        if self.whole:
            y = x.flatten(1, 3)
            x = (y + self.video(y)).view(x.shape)
        return self.out(x).flatten(1, 3) if self.tokens else self.out(x).permute(0, 4, 1, 2, 3)


def windows(sizes: tuple[int, ...], order: tuple[int, ...], outer: int) -> Within:
    """Attention within windows. sizes: what frames, rows and columns are cut into; order: of these, the first `outer` of
    which go to the batch."""

    def within(model: Model, x: Tensor) -> Tensor:
        dims = (0, *(1 + axis for axis in order), len(sizes) + 1)
        cut = x.reshape(-1, *sizes, C).permute(dims)
        y = model.part(cut.flatten(0, outer).flatten(1, -2)).view(cut.shape)
        return y.permute(sorted(range(len(dims)), key=dims.__getitem__)).reshape(x.shape)

    return within


SWIN = windows((T, 2, 2, 3, 2), (1, 3, 0, 2, 4), 2)
SHAPES = {
    "all_frames": SWIN,
    "some_frames": windows((2, 2, 2, 2, 2, 3), (0, 2, 4, 1, 3, 5), 3),
    "frames_alone": windows((2, 2, H, W), (0, 1, 2, 3), 1),
    "every_other_frame": windows((2, 2, H, W), (1, 0, 2, 3), 1),
    "halves_of_rows": windows((T, 2, 2, W), (1, 0, 2, 3), 1),
    "dilated": windows((T, 2, 2, 3, 2), (2, 4, 0, 1, 3), 2),
    "frames_and_rows": windows(GRID, (2, 0, 1), 1),
}


def beside_heads(model: Model, x: Tensor) -> Tensor:
    """Halves of the rows: [batch, 2 * heads, tokens, ...]"""
    cut = (T, 2, H // 2, W)
    q, k, v = (
        u.unflatten(2, cut[1:3]).permute(0, 2, 5, 1, 3, 4, 6).flatten(1, 2).flatten(2, 4)
        for u in model.part.heads(x)
    )
    out = F.scaled_dot_product_attention(q, k, v).unflatten(1, (2, HEADS))
    return out.unflatten(3, (T, H // 2, W)).permute(0, 3, 1, 4, 5, 2, 6).reshape(x.shape)


def padded(model: Model, x: Tensor) -> Tensor:
    """Windows of 3x4 places, which the grid has to be padded for."""
    cut = F.pad(x, (0, 0, 0, 2, 0, 2)).view(-1, T, 2, 3, 2, 4, C).permute(0, 2, 4, 1, 3, 5, 6)
    y = model.part(cut.flatten(0, 2).flatten(1, 3)).view(cut.shape)
    return y.permute(0, 3, 1, 4, 2, 5, 6).reshape(-1, T, 6, 8, C)[:, :, :H, :W]


def unfolded(model: Model, x: Tensor) -> Tensor:
    cut = x.unfold(2, 2, 2).unfold(3, 3, 3).permute(0, 2, 3, 1, 5, 6, 4)
    y = model.part(cut.flatten(0, 2).flatten(1, 3)).view(cut.shape)
    return y.permute(0, 3, 1, 4, 2, 5, 6).reshape(x.shape)


def later_frames(model: Model, x: Tensor) -> Tensor:
    """Each frame but the first alone."""
    rest = x[:, 1:]
    y = model.part(rest.flatten(0, 1).flatten(1, 2)).view(rest.shape)
    return torch.cat([torch.zeros_like(x[:, :1]), y], 1)


def one_by_one(step: int | None) -> Within:
    """A loop over windows, of neighbours or of every second place."""

    def within(model: Model, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        pairs = [(i, j) for i in (0, 1) for j in (0, 1)]
        for i, j in pairs:
            rows = slice(2 * i, 2 * i + 2) if step is None else slice(i, None, step)
            cols = slice(3 * j, 3 * j + 3) if step is None else slice(j, None, step)
            cut = x[:, :, rows, cols]
            out[:, :, rows, cols] = model.part(cut.flatten(1, 3)).view(cut.shape)
        return out

    return within


def in_chunks(model: Model, x: Tensor) -> Tensor:
    return torch.cat([model.part(c.flatten(1, 3)).view(c.shape) for c in x.chunk(2, 2)], 2)


def packed(model: Model, x: Tensor) -> Tensor:
    """Each frame as a sample of FlashAttention's packed form."""
    q, k, v = (u.flatten(0, 3) for u in model.part.heads(x))
    ends = torch.arange(0, q.shape[0] + 1, H * W, dtype=torch.int32)
    return stubs.flash_attn_varlen_func(q, k, v, ends, ends, H * W, H * W).view(x.shape)


WRITTEN = {
    "beside_heads": beside_heads, "padded": padded, "unfolded": unfolded, "in_chunks": in_chunks,
    "later_frames": later_frames, "slices": one_by_one(None), "strided": one_by_one(2),
}  # fmt: skip


def replaced(model: Model, latent: Tensor) -> list[str]:
    """The sites that are replaced; what is computed is what the definition says of these."""
    variant = compile_variants(model.eval(), {"latent": latent}, {"sta": SPARSE})["sta"]
    for site in variant.report.replaced:
        mask = window_mask(site.grid, site.tiles, site.window)
        model.get_submodule(site.name).mask = mask
    assert relative_error(variant.run(latent=latent), model(latent)) < 1e-5
    return sorted(site.name for site in variant.report.replaced)


@pytest.mark.parametrize("within", [*SHAPES.values(), *WRITTEN.values()], ids=[*SHAPES, *WRITTEN])
@torch.no_grad()
def test_windows_of_an_embedded_latent(within: Within) -> None:
    assert replaced(Model(within), torch.randn(2, 4, *GRID)) == ["video"]


@pytest.mark.parametrize(
    "within", [SWIN, SHAPES["dilated"], WRITTEN["slices"], WRITTEN["strided"], padded, in_chunks]
)
@torch.no_grad()
def test_windows_of_packed_tokens(within: Within) -> None:
    model = Model(within, tokens=True, whole=False)
    assert replaced(model, torch.randn(2, prod(GRID), 4)) == []


def guidance(model: Model, x: Tensor) -> Tensor:
    return sum(model.part(torch.cat([x, 2 * x]).flatten(1, 3)).view(2, *x.shape).unbind(0))


def repeated(model: Model, x: Tensor) -> Tensor:
    return model.part(x.repeat(2, 1, 1, 1, 1).flatten(1, 3)).view(2, *x.shape).mean(0)


@pytest.mark.parametrize(("within", "tokens"), [(guidance, False), (repeated, True)])
@torch.no_grad()
def test_samples_are_no_windows(within: Within, tokens: bool) -> None:
    latent = torch.randn(2, prod(GRID), 4) if tokens else torch.randn(2, 4, *GRID)
    assert replaced(Model(within, tokens=tokens), latent) == ["part", "video"]


class Placed(Model):
    """Positions of [axes, batch, tokens], as mRoPE has them: samples stand inside of that."""

    def forward(self, latent: Tensor, positions: Tensor) -> Tensor:
        y = self.embed(latent).flatten(2).mT
        y = y + self.video(y + positions.sum(0)[..., None])
        return self.out(y).mT.unflatten(2, GRID)


@torch.no_grad()
def test_samples_inside_of_positions() -> None:
    inputs = {"latent": torch.randn(2, 4, *GRID), "positions": torch.randn(3, 2, prod(GRID))}
    variant = compile_variants(Placed(SWIN).eval(), inputs, {"sta": SPARSE})["sta"]
    assert [site.grid for site in variant.report.replaced] == [GRID]


@torch.no_grad()
def test_frames_as_samples_of_a_packed_sequence() -> None:
    stubs.register()
    assert replaced(Model(packed), torch.randn(2, 4, *GRID)) == ["video"]
