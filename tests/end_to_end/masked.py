"""Rows of the coverage table as the definition has them: the eager model in which its sites see the window's mask."""

from __future__ import annotations

from torch import Tensor

from sta_compile.coverage.row import Built, Size
from sta_compile.report import ReplacedSite
from tests.end_to_end.oracle import Oracle, window_mask


def tensors(out: object) -> list[Tensor]:
    """All tensors of a nested output, in order."""
    if isinstance(out, Tensor):
        return [out]
    parts = out if isinstance(out, (list, tuple)) else []
    return [tensor for part in parts for tensor in tensors(part)]


def masked(built: Built, size: Size, replaced: list[ReplacedSite]) -> list[Tensor]:
    """The eager model, in which the sites that have to be replaced see the window of the report at their places."""
    by_grid = {site.grid: window_mask(site.grid, site.tiles, site.window) for site in replaced}
    names = {site.name for site in replaced}
    sites = [s for s in built.sites if any(s == n or s.endswith(f".{n}") for n in names)]
    places = {site: built.place_of(site) for site in sites}
    masks = {site: by_grid[built.grid_of(site, size)] for site in sites}
    with Oracle(built.model, sites, by_grid[size.grid], places=places, masks=masks) as oracle:
        out = tensors(built.model(**built.inputs))
    assert oracle.calls >= len(sites)
    return out
