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
