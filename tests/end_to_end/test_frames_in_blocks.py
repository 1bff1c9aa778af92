"""Blocks that get one frame of a video per sample, where other graphs hold what shows that: they stay exact.

Each block is a graph of its own, which sees [samples * frames, tokens, channels] and knows no more than their number.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sta_compile
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.oracle import window_mask
from tests.end_to_end.tiny import SPARSE

FRAMES, H, W = GRID = 3, 4, 6
C = 16
OPTIONS = {**SPARSE, "window": (1, 1, 1), "min_tokens": 0, "dense_above": None}
pytestmark = pytest.mark.usefixtures("stages_only")


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (u.unflatten(-1, (2, -1)).transpose(1, 2) for u in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, self.mask)
        return x + self.out(out.transpose(1, 2).flatten(2))


class AcrossFrames(Block):
    """Attention along time at each place, of frames that are samples."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(0, (-1, FRAMES)).transpose(1, 2)
        return super().forward(y.flatten(0, 1)).view(y.shape).transpose(1, 2).flatten(0, 1)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.video, self.image = nn.Conv3d(4, C, 1), nn.Conv2d(4, C, 1)
        self.blocks, self.out = nn.ModuleList(blocks or (Block(), Block())), nn.Linear(C, 4)
        for block in self.blocks:  # as hooks of offloading do
            block.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))


class Frames(Model):
    """A convolution over frames that are samples already."""

    def forward(self, latent: Tensor) -> Tensor:
        x = self.image(latent.transpose(1, 2).flatten(0, 1)).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class BesideReference(Model):
    """A reference image goes through the blocks of the frames, before each of them."""

    def forward(self, latent: Tensor, reference: Tensor) -> Tensor:
        x = self.video(latent).permute(0, 2, 3, 4, 1).flatten(2, 3).flatten(0, 1)
        r = self.image(reference).flatten(2).mT
        for block in self.blocks:
            r = block(r)
            x = block(x) + r.mean(1, keepdim=True).repeat_interleave(FRAMES, 0)
        return self.out(x)


class AfterReference(Model):
    """Each frame is joined with the tokens of the reference."""

    def forward(self, latent: Tensor, reference: Tensor) -> Tensor:
        x = self.video(latent).permute(0, 2, 3, 4, 1).flatten(2, 3).flatten(0, 1)
        r = self.image(reference).flatten(2).mT.repeat_interleave(FRAMES, 0)
        for block in self.blocks:
            r, x = block(torch.cat([r, x], 1)).chunk(2, 1)
        return self.out(x)


class GivenFrames(Model):
    """Called with frames as samples: only a block along time shows that they are some."""

    def __init__(self) -> None:
        super().__init__(Block(), AcrossFrames(), Block())

    def forward(self, latent: Tensor) -> Tensor:
        x = self.image(latent).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def compiled(model: nn.Module) -> nn.Module:
    sta_compile.compile(model.eval(), **OPTIONS)
    return model


@pytest.mark.parametrize("kind", [Frames, BesideReference, AfterReference])
def test_frames_in_the_batch_of_a_block(kind: type[Model]) -> None:
    model = kind()
    inputs = {"latent": torch.randn(2, 4, *GRID)}
    if kind is not Frames:
        inputs["reference"] = torch.randn(2, 4, H, W)
    expected = model(**inputs)
    compiled(model)
    for _ in range(2):
        assert relative_error(model(**inputs), expected) < 1e-5
    refused = [site for report in sta_compile.reports() for site in report.refused]
    assert any("frames or positions may be in its batch axis" in site.reason for site in refused)


def test_what_a_block_shows_is_known_from_the_next_call_on() -> None:
    model, latent = GivenFrames(), torch.randn(2 * FRAMES, 4, H, W)
    expected = model(latent)
    compiled(model)
    model(latent)
    for _ in range(2):
        assert relative_error(model(latent), expected) < 1e-5


class Images(Model):
    """Images, each a sample, with guidance that doubles them."""

    def forward(self, latent: Tensor) -> Tensor:
        x = self.image(torch.cat([latent, latent])).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def test_images_are_samples() -> None:
    model, latent = Images(), torch.randn(3, 4, H, W)
    found = compiled(model)(latent)
    sites = [site for report in sta_compile.reports() for site in report.replaced]
    assert {site.grid for site in sites} == {(1, H, W)}
    sta_compile.restore(model)
    for block in model.blocks:
        block.mask = window_mask(sites[0].grid, sites[0].tiles, sites[0].window)
    assert relative_error(found, model(latent)) < 1e-5
