"""Attention that takes the video in parts stays as it is, however it is written; the one over the video is replaced.

A loop over frames calls attention over rows and columns, as an image model does: what tells them apart is where the tokens
come from.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.oracle import window_mask
from tests.end_to_end.tiny import SPARSE

GRID = T, H, W = 4, 4, 6
C, HEADS = 16, 2
Within = Callable[["Model", Tensor], Tensor]  # [batch, frames, rows, cols, C] -> the same


def heads(x: Tensor) -> Tensor:
    """[batch, tokens, C] -> [batch, heads, tokens, head_dim]"""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(C, 3 * C), None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, self.mask).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, within: Within, patch: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv3d(4, C, (patch, 1, 1), stride=(patch, 1, 1))
        self.frame, self.video = Attention(), Attention()
        self.text = nn.Parameter(torch.randn(1, 5, C))
        self.positions = nn.Parameter(torch.randn(H, W, C))
        self.out = nn.Linear(C, 4)
        self.within = within

    def forward(self, latent: Tensor) -> Tensor:
        x = self.embed(latent).permute(0, 2, 3, 4, 1)
        x = self.within(self, x)
        y = x.flatten(1, 3)
        y = y + self.video(y)
        return self.out(y).unflatten(1, x.shape[1:4]).permute(0, 4, 1, 2, 3)


def unbound(model: Model, x: Tensor) -> Tensor:
    return torch.stack([f + model.frame(f) for f in x.flatten(2, 3).unbind(1)], 1).view(x.shape)


def selected(model: Model, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for i in range(x.shape[1]):
        frame = x[:, i].flatten(1, 2)
        out[:, i] = (frame + model.frame(frame)).unflatten(1, (H, W))
    return out


def sliced(model: Model, x: Tensor) -> Tensor:
    """A frame, as a slice of the frames' axis."""
    frames = [x[:, i : i + 1].flatten(1, 3) for i in range(x.shape[1])]
    return torch.cat([(f + model.frame(f)).view(-1, 1, H, W, C) for f in frames], 1)


def chunked(model: Model, x: Tensor) -> Tensor:
    """Pieces of the tokens' axis, whose rows and columns only a table of positions shows."""
    positions = model.positions.flatten(0, 1)
    frames = x.flatten(1, 3).chunk(T, 1)
    return torch.cat([f + model.frame(f + positions) for f in frames], 1).view(x.shape)


def two_frames(model: Model, x: Tensor) -> Tensor:
    first, last = x.split(2, 1)
    y = first.flatten(1, 3)
    return torch.cat([(y + model.frame(y)).view(first.shape), last], 1)


def every_other(model: Model, x: Tensor) -> Tensor:
    y = x[:, ::2].flatten(1, 3)
    return x + (y + model.frame(y)).view(-1, 2, H, W, C).mean(1, keepdim=True)


def first_frame(model: Model, x: Tensor) -> Tensor:
    first, *rest = x.flatten(2, 3).unbind(1)
    return torch.stack([first + model.frame(first), *rest], 1).view(x.shape)


def rows(model: Model, x: Tensor) -> Tensor:
    lines = [line.flatten(1, 2) for line in x.unbind(2)]
    return torch.stack([(y + model.frame(y)).view(-1, T, W, C) for y in lines], 2)


def places(model: Model, x: Tensor) -> Tensor:
    """Along time, at each place."""
    lines = x.flatten(2, 3).unbind(2)
    return torch.stack([y + model.frame(y) for y in lines], 2).view(x.shape)


def with_text(model: Model, x: Tensor) -> Tensor:
    text = model.text.expand(x.shape[0], -1, -1)
    frames = [torch.cat([text, f], 1) for f in x.flatten(2, 3).unbind(1)]
    return torch.stack([f + model.frame(f) for f in frames], 1)[:, :, 5:].view(x.shape)


def as_heads(model: Model, x: Tensor) -> Tensor:
    y = x.flatten(2, 3)
    q, k, v = model.frame.qkv(y).chunk(3, -1)
    return (y + F.scaled_dot_product_attention(q, k, v)).view(x.shape)


def among_heads(model: Model, x: Tensor) -> Tensor:
    b, t, h, w, _ = x.shape
    y = model.frame.qkv(x).view(b, t, h * w, 3, HEADS, -1)
    q, k, v = y.permute(3, 0, 4, 1, 2, 5).flatten(2, 3).unbind(0)
    out = F.scaled_dot_product_attention(q, k, v).unflatten(1, (HEADS, t))
    return x + out.permute(0, 2, 3, 1, 4).reshape(x.shape)


ALL = (
    unbound, selected, sliced, chunked, two_frames, every_other, first_frame, rows, places, with_text,
    as_heads, among_heads,
)  # fmt: skip


@pytest.mark.parametrize("within", ALL, ids=lambda within: within.__name__)
@torch.no_grad()
def test_parts_of_the_video_are_exact(within: Within) -> None:
    model = Model(within).eval()
    inputs = {"latent": torch.randn(2, 4, *GRID)}
    report, run = _compiled(model, inputs)
    if within in (chunked, sliced):  # nothing shows that the pieces are the video, once together
        assert all(site.grid == GRID for site in report.replaced)
    else:
        assert [site.grid for site in report.replaced] == [GRID]
    if report.replaced:
        (site,) = report.replaced
        model.video.mask = window_mask(site.grid, site.tiles, site.window)
    expected = model(**inputs)
    assert relative_error(run(**inputs), expected) < 1e-5
    assert any("factorised attention" in site.reason for site in report.refused)


@torch.no_grad()
def test_frames_of_a_temporal_patch() -> None:
    """The frames of the tokens are no axis of the latent."""
    model = Model(unbound, patch=2).eval()
    inputs = {"latent": torch.randn(1, 4, 2 * T, H, W)}
    report, run = _compiled(model, inputs)
    (site,) = report.replaced
    assert site.grid == GRID
    model.video.mask = window_mask(site.grid, site.tiles, site.window)
    assert relative_error(run(**inputs), model(**inputs)) < 1e-5


def in_the_batch(model: Model, x: Tensor) -> Tensor:
    y = x.flatten(0, 1).flatten(1, 2)
    return (y + model.frame(y)).view(x.shape)


class Judge(nn.Module):
    """Returns a number per sample: of the frames nothing is left, and they are no axis of the latent either."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(in_the_batch, patch=2)

    def forward(self, latent: Tensor) -> Tensor:
        return self.model(latent).mean((1, 2, 3, 4))


@torch.no_grad()
def test_frames_in_the_batch_that_only_a_convolution_shows() -> None:
    judge, inputs = Judge().eval(), {"latent": torch.randn(2, 4, 2 * T, H, W)}
    report, run = _compiled(judge, inputs)
    (site,) = report.replaced
    assert site.grid == GRID
    judge.model.video.mask = window_mask(site.grid, site.tiles, site.window)
    assert relative_error(run(**inputs), judge(**inputs)) < 1e-5
    assert ["frames or positions are in the batch axis" in r.reason for r in report.refused] == [
        True
    ]


def samples(model: Model, x: Tensor) -> Tensor:
    y = x.flatten(1, 3)
    return torch.cat([s + model.frame(s) for s in y.split(1)]).view(x.shape)


def chunks_of_queries(model: Model, x: Tensor) -> Tensor:
    y = x.flatten(1, 3)
    q, k, v = map(heads, model.frame.qkv(y).chunk(3, -1))
    masks = (None,) * T if model.frame.mask is None else model.frame.mask.chunk(T)
    out = [
        F.scaled_dot_product_attention(p, k, v, mask)
        for p, mask in zip(q.chunk(T, 2), masks, strict=True)
    ]
    return x + torch.cat(out, 2).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("frames", [1, T])
@pytest.mark.parametrize("within", [samples, chunks_of_queries])
@torch.no_grad()
def test_the_whole_video_in_a_loop(within: Within, frames: int) -> None:
    """Sample by sample, or in chunks of queries: each sees the whole grid, of one frame or of several."""
    model = Model(within).eval()
    inputs = {"latent": torch.randn(2, 4, frames, H, W)}
    report, run = _compiled(model, inputs)
    assert not report.refused
    assert {site.grid for site in report.replaced} == {(frames, H, W)}
    site = report.replaced[0]
    model.frame.mask = model.video.mask = window_mask(site.grid, site.tiles, site.window)
    assert relative_error(run(**inputs), model(**inputs)) < 1e-5


def _compiled(model: nn.Module, inputs: dict[str, Tensor]):
    variant = compile_variants(model, inputs, {"sta": SPARSE})["sta"]
    return variant.report, variant.run


def with_registers(model: Model, x: Tensor) -> Tensor:
    first, last = x.flatten(1, 3).split([T * H * W // 2] * 2, 1)
    y = torch.cat([first, model.text.expand(x.shape[0], -1, -1), last], 1)
    y = y + model.frame(y)
    return torch.cat([y[:, : first.shape[1]], y[:, first.shape[1] + 5 :]], 1).view(x.shape)


def frame_by_frame(model: Model, x: Tensor) -> Tensor:
    y = torch.cat([frame * 2 for frame in x.flatten(2, 3).unbind(1)], 1)
    return (y + model.frame(y)).view(x.shape)


@pytest.mark.parametrize("within", [with_registers, frame_by_frame])
@torch.no_grad()
def test_a_video_in_pieces_is_no_factorised_attention(within: Within) -> None:
    """Frames that are put together again in their order are the video."""
    model, inputs = Model(within).eval(), {"latent": torch.randn(2, 4, *GRID)}
    report, run = _compiled(model, inputs)
    refused = [site.reason for site in report.refused if site.name == "frame"]
    if within is frame_by_frame:
        assert not refused
    else:
        assert "put together of pieces of the video" in refused[0]
    for other in report.replaced:
        model.get_submodule(other.name).mask = window_mask(other.grid, other.tiles, other.window)
    assert relative_error(run(**inputs), model(**inputs)) < 1e-5


class OverLatent(nn.Module):
    """Without a patch embed: the channels of the latent are heads, and channels of each."""

    def __init__(self) -> None:
        super().__init__()
        self.video = Attention()

    def forward(self, latent: Tensor) -> Tensor:
        x = latent.flatten(2).transpose(1, 2)
        return (x + self.video(x)).transpose(1, 2).unflatten(2, GRID)


@torch.no_grad()
def test_channels_of_a_latent_are_no_frames() -> None:
    model, inputs = OverLatent().eval(), {"latent": torch.randn(2, C, *GRID)}
    report, run = _compiled(model, inputs)
    (site,) = report.replaced
    assert site.grid == GRID
    model.video.mask = window_mask(site.grid, site.tiles, site.window)
    assert relative_error(run(**inputs), model(**inputs)) < 1e-5
