"""One compiled model under calls of several shapes: what its graphs are edited to, and what each call has to compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import sta_compile
from sta_compile.ir.window import effective
from sta_compile.pipeline import rewrite
from sta_compile.planning.choose_tiles import plan_attention
from sta_compile.settings import Settings
from tests.end_to_end.compiled import DEFAULTS
from tests.end_to_end.models import Triple
from tests.end_to_end.oracle import Oracle, window_mask

WINDOW, TILE = (2, 3, 4), (2, 3, 4)
OPTIONS = {**DEFAULTS, "window": WINDOW, "tile": TILE}


class Rewriting:
    """A backend that runs the edited graph eagerly and counts its compiles."""

    def __init__(self, **options: Any) -> None:
        self.settings = Settings.resolve({**OPTIONS, **options})[0]
        self.reports: list[sta_compile.Report] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.reports.append(rewrite(gm, example_inputs, self.settings)[1])
        return gm.forward


def expected(
    model: nn.Module, sites: Any, grid: Triple, *, text_first: bool = False, **inputs: Any
) -> Any:
    """The eager model under the definition's mask for a grid; only the tile counts come from the planner."""
    tiles = plan_attention(grid, WINDOW, TILE).tiling.tiles
    window = [
        effective(n, -(-w // -(-length // n)))
        for w, n, length in zip(WINDOW, tiles, grid, strict=True)
    ]
    mask = window_mask(grid, tiles, tuple(window))
    with torch.no_grad(), Oracle(model, sites, mask, text_first=text_first):
        out = model(**inputs)
    return out[0] if isinstance(out, tuple) else out
