"""`dynamic=True`: sizes are symbols, the grid is a product of them, and every video gets its own tiling all the same."""

from __future__ import annotations

import pytest
import torch

from tests.end_to_end.compiled import RewritingBackend, data_dependent_sizes, relative_error
from tests.end_to_end.models import FAMILIES
from tests.end_to_end.oracle import Oracle, window_mask

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
