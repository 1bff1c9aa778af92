"""`dynamic=True`: sizes are symbols, the grid is a product of them, and every video gets its own tiling all the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.end_to_end.compiled import RewritingBackend, data_dependent_sizes, relative_error
from tests.end_to_end.models import FAMILIES
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo

OPTIONS = {"tile": (1, 2, 2), "window": (3, 5, 3), "dense_above": 0.95}
# Tables of learned positions in these two are made for one size.
ONE_SIZE = ("cosmos", "cogvideox_2b")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@torch.no_grad()
def test_symbolic_sizes(family):
    """Landscape, then portrait, which has as many tokens."""
    backend = RewritingBackend({"sta": {**OPTIONS, "noise": family.noise}})
    layers = 2 if family.name == "mochi" else 1  # Mochi's last layer drops its text
    model = family.case(2, (4, 7, 9), layers).model
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for grid in [(4, 7, 9)] if family.name in ONE_SIZE else [(4, 7, 9), (4, 9, 7)]:
        case = family.case(2, grid, layers)
        inputs = case.at(family.noisy, family.clean)
        with data_dependent_sizes():
            found = compiled(**inputs)[0]
        report = backend.reports["sta"][-1]
        assert {site.name for site in report.replaced} == set(case.sites)
        site = report.replaced[0]
        assert site.grid == grid
        dense = (True, True) if family.name == "mochi" else (True, False)
        mask = window_mask(grid, site.tiles, site.window)
        with Oracle(model, case.sites, mask, text_first=case.text_first, dense=dense):
            expected = model(**inputs)[0]
        assert relative_error(found, expected) < 1e-4


class PatchedByFrame(TinyVideo):
    """latent [batch, frames, channels, rows, cols], whose frames are samples until they are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patchify = nn.Linear(4 * CHANNELS, 16)
        self.out = nn.Linear(16, 4 * CHANNELS)

    def forward(self, latent: Tensor) -> Tensor:
        batch, frames = latent.shape[:2]
        x = F.pixel_unshuffle(latent.flatten(0, 1), 2)
        rows, cols = x.shape[-2:]
        x = self.patchify(x.flatten(2).transpose(1, 2)).view(batch, frames * rows * cols, 16)
        x = self.out(self.blocks[0](x)).view(batch * frames, rows, cols, -1)
        return F.pixel_shuffle(x.permute(0, 3, 1, 2), 2).unflatten(0, (batch, frames))


@torch.no_grad()
def test_frames_of_symbolic_sizes_in_the_batch():
    model, backend = PatchedByFrame().eval(), RewritingBackend({"sta": SPARSE})
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for batch, grid in ((2, (4, 6, 9)), (3, (5, 8, 6))):
        frames, rows, cols = grid
        latent = torch.randn(batch, frames, CHANNELS, 2 * rows, 2 * cols)
        found = compiled(latent)
        (site,) = backend.reports["sta"][-1].replaced
        assert site.grid == grid
        with Oracle(model, model.sites, window_mask(grid, site.tiles, site.window)):
            assert relative_error(found, model(latent)) < 1e-5


class Padded(TinyVideo):
    """The video and its text fill whole blocks of eight tokens; what pads them is no key."""

    def forward(self, latent: Tensor, text: Tensor) -> Tensor:
        x = self.patchify(latent)
        size = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        video = x.shape[1]
        x = torch.cat([x, text], 1)
        valid = x.shape[1]
        x = F.pad(x, (0, 0, 0, -valid % 8))
        x = self.blocks[0](x, (torch.arange(x.shape[1]) < valid).expand(len(x), 1, 1, -1))
        return self.out(x[:, :video]).transpose(1, 2).unflatten(2, size)


@pytest.mark.parametrize("tokens", [5, 7], ids=["three", "one"])
@torch.no_grad()
def test_a_symbolic_number_of_tokens_that_pad(tokens):
    """One: the operator that pads takes a symbol for it in Python alone."""
    model, backend = Padded().eval(), RewritingBackend({"sta": SPARSE})
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    latent, text = torch.randn(2, CHANNELS, 5, 6, 8), torch.randn(2, tokens, 16)
    found = compiled(latent, text)
    (site,) = backend.reports["sta"][-1].replaced
    with Oracle(model, model.sites, window_mask(site.grid, site.tiles, site.window)):
        assert relative_error(found, model(latent, text)) < 1e-5
