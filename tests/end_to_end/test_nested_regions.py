"""Repeated blocks as nested regions: one body serves all layers, and it is edited once for all of its calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.compiler import nested_compile_region

import sta_compile
from sta_compile import _torch
from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.models import randomize
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, SPARSE, Attention, Block, TinyVideo, sdpa, valid


class Region(Block):
    forward = nested_compile_region(Block.forward)


def test_blocks_that_share_a_body():
    model, plain = TinyVideo(layers=4), TinyVideo(layers=4)
    plain.load_state_dict(model.state_dict())
    for block in model.blocks:
        block.__class__ = Region
    inputs = {
        "latent": torch.randn(2, CHANNELS, 3, 5, 7),
        "text": torch.randn(2, 6, 16),
        "valid": valid(6, 3, of=6),  # its lengths have to reach the body
    }
    wanted = {"sparse": SPARSE, "full": {**SPARSE, "window": "full"}}
    with torch.no_grad():
        variants = compile_variants(model, inputs, wanted)
        report = variants["sparse"].report
        (site,) = report.replaced
        assert report.conversions == 2
        with Oracle(plain, plain.sites, window_mask(site.grid, site.tiles, site.window)):
            expected = plain(**inputs)
        assert relative_error(variants["sparse"].run(**inputs), expected) < 1e-5
        assert relative_error(variants["full"].run(**inputs), plain(**inputs)) < 1e-5


class DoubleBlock(Block):
    """Takes the text and the video as two tensors, and attends to both."""

    def forward(self, text: Tensor, video: Tensor) -> tuple[Tensor, Tensor]:
        both = super().forward(torch.cat([text, video], 1))
        return both[:, : text.shape[1]], both[:, text.shape[1] :]


class Joined(TinyVideo):
    """Single blocks take one tensor: tokens before the video, the video, tokens after it. Double ones come before them."""

    def __init__(self, doubles: int = 0) -> None:
        super().__init__(layers=2)
        size = {"heads": 2, "head_dim": 8, "kv_heads": 2}
        self.doubles = nn.ModuleList(DoubleBlock(16, attend=sdpa, **size) for _ in range(doubles))
        randomize(self)

    @property
    def sites(self) -> list[str]:
        return [*(f"doubles.{i}.attn" for i in range(len(self.doubles))), *super().sites]

    def forward(self, latent: Tensor, before: Tensor | None, after: Tensor | None) -> Tensor:
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        tokens = x.shape[1]
        for block in self.doubles:
            before, x = block(before, x)
        start = 0 if before is None else before.shape[1]
        x = torch.cat([part for part in (before, x, after) if part is not None], 1)
        for block in self.blocks:
            x = block(x)
        x = self.out(x[:, start : start + tokens]).unflatten(1, latent.shape[2:])
        return x.permute(0, 4, 1, 2, 3)


@pytest.mark.parametrize(
    ("doubles", "lengths", "cols"),
    [
        (0, [(5, 0), (8, 0), (6, 0)], [7, 7, 7]),
        (0, [(0, 5), (0, 8), (0, 6)], [7, 7, 7]),
        (2, [(5, 0), (8, 0), (6, 0)], [7, 7, 7]),
        (0, [(5, 4), (8, 3), (6, 7)], [7, 7, 7]),  # the sum does not say how many stand where
        (0, [(5, 4), (8, 3), (6, 7)], [7, 9, 11]),
    ],
    ids=["before", "after", "double blocks", "on both sides", "grids that change too"],
)
def test_tokens_beside_the_video_whose_number_changes(doubles, lengths, cols, stages_only):
    """A body sees how many tokens there are in all, and no tensor of the text alone."""
    sta_compile.reset_reports()
    model, plain = Joined(doubles), Joined(doubles)
    options = {**SPARSE, "min_tokens": 0, "dense_above": None}
    sta_compile.compile(model, **options)
    for width, (before, after) in zip(cols, lengths, strict=True):
        grid = (3, 5, width)
        inputs = {
            "latent": torch.randn(2, CHANNELS, *grid),
            "before": torch.randn(2, before, 16) if before else None,
            "after": torch.randn(2, after, 16) if after else None,
        }
        found = model(**inputs)
        (window,) = {site.window for report in sta_compile.reports() for site in report.replaced}
        tiles = tuple(-(-n // tile) for n, tile in zip(grid, SPARSE["tile"], strict=True))
        places = dict.fromkeys(plain.sites, (before, before))
        with Oracle(plain, plain.sites, window_mask(grid, tiles, window), places=places):
            assert relative_error(found, plain(**inputs)) < 1e-5
    reports = sta_compile.reports()
    assert len(reports) == max(2, len(set(cols)))  # one for any number of tokens beside each grid
    assert all(report.replacements == len(plain.sites) for report in reports)
    assert all(len(report.replaced) < len(plain.sites) for report in reports)


def rotated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Positions as rotations of complex numbers."""
    angles = torch.outer(torch.arange(q.shape[2]).float(), torch.tensor([1.0, 0.3, 0.1, 0.03]))
    turns = torch.polar(torch.ones_like(angles), angles)

    def turn(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(
            3
        )

    return sdpa(turn(q), turn(k), v, mask)


def test_complex_values_in_training(monkeypatch, caplog):
    """Regions that hold them have no backward pass; without gradients they stay."""
    caplog.set_level("INFO", "sta_compile")
    monkeypatch.setattr(
        _torch, "compile_with_inductor", lambda gm, inputs, **_: aot_eager(gm, inputs)
    )
    model, plain = (TinyVideo(layers=2, attend=rotated) for _ in range(2))
    latent = torch.randn(2, CHANNELS, 3, 5, 7)
    sta_compile.reset_reports()
    sta_compile.compile(model, **SPARSE, min_tokens=0, dense_above=None)
    with torch.no_grad():
        without = model(latent)
    (report,) = sta_compile.reports()
    assert [site.calls for site in report.replaced] == [2]
    assert not caplog.records
    found = model(latent)
    assert "torch has no gradients of complex values" in caplog.text
    site = sta_compile.reports()[-1].replaced[0]
    with Oracle(plain, plain.sites, window_mask(site.grid, site.tiles, site.window)):
        expected = plain(latent)
    assert relative_error(without, expected) < 1e-5
    assert relative_error(found, expected) < 1e-5
    for out in (found, expected):
        (out * latent).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


class Scaled(Block):
    scale = 0.0  # each has its own

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.scale * (super().forward(x, mask) - x)


def test_numbers_that_blocks_read(stages_only, caplog):
    """With dynamic=True Dynamo makes inputs of them, of `eps` too: constants, where they are the same in all blocks."""
    caplog.set_level("INFO", "sta_compile")
    model, plain = TinyVideo(layers=3), TinyVideo(layers=3)
    for block in (*model.blocks, *plain.blocks):
        block.__class__ = Scaled
    sta_compile.reset_reports()
    sta_compile.compile(model, **SPARSE, min_tokens=0, dense_above=None, dynamic=True)
    for scales, shared in (
        *(([0.5] * 3, True), ([0.5] * 3, True)),
        *(([0.5, 0.7, 0.9], False), ([0.6] * 3, False)),
    ):
        for i, block in enumerate(zip(model.blocks, plain.blocks, strict=True)):
            for one in block:
                one.scale = scales[i]
        latent = torch.randn(2, CHANNELS, 3, 5, 7)
        found = model(latent)
        report = sta_compile.reports()[-1]
        assert report.replacements == 3
        assert (len(report.replaced) < 3) == shared
        site = report.replaced[0]
        with Oracle(plain, plain.sites, window_mask(site.grid, site.tiles, site.window)):
            assert relative_error(found, plain(latent)) < 1e-5
    assert "a number in a block differs" in caplog.text


class Skipped(Block):
    skip = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * 2 if self.skip else super().forward(x, mask)


class Doubled(Attention):
    """The same layers as those of another class."""

    def forward(self, *args, **kwargs) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


def doubled(block: Block) -> None:
    """As a hook that replaces a forward does."""
    given = block.attn.forward
    block.attn.forward = lambda x, mask: 2 * given(x, mask=mask)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Scaled, lambda block: setattr(block, "scale", 0.5)),
        (Skipped, lambda block: setattr(block, "skip", True)),
        (
            Block,
            lambda block: setattr(
                block.attn, "to_out", nn.Sequential(block.attn.to_out, nn.Tanh())
            ),
        ),
        (Block, lambda block: setattr(block.attn, "__class__", Doubled)),
        (Block, doubled),
    ],
    ids=["a number", "a branch", "a layer", "a class", "a forward"],
)
def test_a_later_block_that_changes(stages_only, kind, change):
    """Its trace is that of the first block, of which alone torch guards what was read."""
    model, plain = TinyVideo(layers=3), TinyVideo(layers=3)
    for block in (*model.blocks, *plain.blocks):
        block.__class__ = kind
    latent = torch.randn(2, CHANNELS, 3, 5, 7)
    sta_compile.compile(model, window="full", min_tokens=0, dense_above=None)
    for _ in range(2):
        assert relative_error(model(latent), plain(latent)) < 1e-5
        change(model.blocks[1])
        change(plain.blocks[1])
