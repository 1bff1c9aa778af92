"""Which tiling and window does an attention spec mean on a given grid?

A spec written for a grid that was known carries both: `tiles=5,6,10 window=3,3,3` means just that
on 30x48x80. A spec for grids known only at run time carries the request, and the planner answers it
once per grid: `request=18,24,24 tile=auto` means the same on that grid.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from ..ir.attention_spec import AttentionSpec, Triple, is_per_head
from ..ir.tiling import Tiling
from ..ir.window import Window
from .choose_tiles import Plan, plan_attention


@lru_cache(maxsize=1024)
def resolve(spec: AttentionSpec, grid: Triple) -> Plan:
    """Tiling and window of `spec` on a grid (T, H, W)."""
    if spec.tiles is None or spec.window is None:
        assert spec.request is not None, "AttentionSpec holds tiles and window, or a request"
        request = "full" if prod(grid) < spec.min_tokens else spec.request
        return plan_attention(grid, request, spec.tile)
    tiling = Tiling(grid, spec.tiles)
    if is_per_head(spec.window):
        return Plan.of(tiling, spec.window)
    return Plan(tiling, Window(spec.tiles if spec.window == "full" else spec.window))
