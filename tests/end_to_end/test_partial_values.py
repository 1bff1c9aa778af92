"""Values that are the same along some axes of the grid, a scale per frame above all: layers stay in tile order.

The grid is odd, so that tiles are of two sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import nested_compile_region

from sta_compile.planning.choose_tiles import plan_attention
from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.models import randomize
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, Options, TinyVideo, check

T, H, W = GRID = (3, 5, 7)
OPTIONS: Options = {"window": (3, 3, 3), "tile": (2, 2, 2)}
WIDTH, SIGNAL = 16, 6
# (model, x [batch, tokens, width], scale [batch, frames, width], grid) -> like x
Modulate = Callable[["Modulated", Tensor, Tensor, tuple[int, int, int]], Tensor]


def in_frames(x: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """[batch, frames, rows * cols, width]"""
    return x.view(x.shape[0], grid[0], grid[1] * grid[2], -1)


def frames_in_the_batch(m: Modulated, x: Tensor, s: Tensor, g: tuple[int, int, int]) -> Tensor:
    y = x.reshape(-1, g[1] * g[2], x.shape[2]) * (1 + s.reshape(-1, 1, s.shape[-1]))
    return F.linear(y, m.mixing).view_as(x)


def written(m: Modulated, x: Tensor, s: Tensor, g: tuple[int, int, int]) -> Tensor:
    x = x.clone()
    in_frames(x, g).mul_(s[:, :, None])
    return x


def normalised(m: Modulated, x: Tensor, s: Tensor, g: tuple[int, int, int]) -> Tensor:
    y = F.layer_norm(in_frames(x, g), (x.shape[2],))
    return torch.addcmul(s[:, :, None], y, 1 + s[:, :, None]).flatten(1, 2)


def ends_apart(m: Modulated, x: Tensor, s: Tensor, g: tuple[int, int, int]) -> Tensor:
    """The first and the last frame are scaled in another way than those between them."""
    first, middle, last = x.split([g[1] * g[2], (g[0] - 2) * g[1] * g[2], g[1] * g[2]], 1)
    return torch.cat([first * s[:, :1], middle * 0.5, last * s[:, 1:2]], 1)


def picked(m: Modulated, x: Tensor, s: Tensor, g: tuple[int, int, int]) -> Tensor:
    return x * s[:, torch.arange(g[0]).repeat_interleave(g[1] * g[2])]


MODULATIONS: dict[str, Modulate] = {
    "broadcast": lambda m, x, s, g: (in_frames(x, g) * (1 + s[:, :, None]) + s[:, :, None]).flatten(1, 2),
    "repeat_interleave": lambda m, x, s, g: x * s.repeat_interleave(g[1] * g[2], 1),
    "expand": lambda m, x, s, g: x * s[:, :, None, None].expand(-1, -1, *g[1:], -1).flatten(1, 3),
    "repeat": lambda m, x, s, g: x * s[:, :, None, None].repeat(1, 1, *g[1:], 1).flatten(1, 3),
    "rows and columns": lambda m, x, s, g: (x.unflatten(1, g) * m.rows[:, None] + m.cols).flatten(1, 3),
    "all three added up": lambda m, x, s, g: (
        x + (m.rows[:, None] + m.cols + s[:, :, None, None]).flatten(1, 3)
    ),
    "columns copied": lambda m, x, s, g: x * m.cols.repeat(g[0] * g[1], 1),
    "frames in the batch": frames_in_the_batch,
    "written": written,
    "normalised": normalised,
    "picked": picked,
    "ends apart": ends_apart,
    "first frame apart": lambda m, x, s, g: torch.cat(
        [x[:, : g[1] * g[2]] * s[:, :1], x[:, g[1] * g[2] :] * s[:, 1:2]], 1
    ),
}  # fmt: skip


class Modulated(TinyVideo):
    def __init__(self, modulate: Modulate, layers: int) -> None:
        super().__init__(layers=layers)
        self.modulate = modulate
        self.signals = nn.ModuleList(nn.Linear(SIGNAL, WIDTH) for _ in range(layers))
        self.rows, self.cols = (
            nn.Parameter(torch.empty(H, WIDTH)),
            nn.Parameter(torch.empty(W, WIDTH)),
        )
        self.mixing = nn.Parameter(torch.empty(WIDTH, WIDTH))
        randomize(self)

    def forward(self, latent: Tensor, signal: Tensor) -> Tensor:
        x = self.patchify(latent)
        grid = tuple(x.shape[2:])
        x = x.flatten(2).transpose(1, 2)
        for block, project in zip(self.blocks, self.signals, strict=True):
            x = self.layer(block, x, project(signal), grid)
        return self.out(x).unflatten(1, grid).permute(0, 4, 1, 2, 3)

    def layer(self, block: nn.Module, x: Tensor, s: Tensor, grid: tuple[int, ...]) -> Tensor:
        return block(self.modulate(self, x, s, grid))


class Region(Modulated):
    layer = nested_compile_region(Modulated.layer)


def inputs(grid: tuple[int, int, int] = GRID) -> dict[str, Tensor]:
    return {"latent": torch.randn(2, CHANNELS, *grid), "signal": torch.randn(2, grid[0], SIGNAL)}


@torch.no_grad()
def conversions(model: nn.Module) -> int:
    report = compile_variants(model, inputs(), {"sta": OPTIONS})["sta"].report
    assert [site.name for site in report.replaced] == model.sites
    return report.conversions


@pytest.mark.parametrize("kind", MODULATIONS)
def test_no_conversion_is_left_in_the_layers(kind):
    few = Modulated(MODULATIONS[kind], 3)
    found = check(few, few.sites, OPTIONS, **inputs()).report.conversions
    assert found == conversions(Modulated(MODULATIONS[kind], 8)) <= 5


@pytest.mark.parametrize(
    "kind",
    ["broadcast", "repeat_interleave", "frames in the batch", "first frame apart", "ends apart"],
)
@torch.no_grad()
def test_sizes_known_at_run_time_only(kind):
    model, given = Modulated(MODULATIONS[kind], 3), inputs()
    for dim in (2, 3, 4):
        torch._dynamo.mark_dynamic(given["latent"], dim)
    torch._dynamo.mark_dynamic(given["signal"], 1)
    variant = compile_variants(model, given, {"sta": OPTIONS}, dynamic=True)["sta"]
    assert variant.report.conversions <= 4
    for grid in (GRID, (6, 9, 4)):
        given, plan = inputs(grid), plan_attention(grid, OPTIONS["window"], OPTIONS["tile"])
        with Oracle(model, model.sites, window_mask(grid, plan.tiling.tiles, plan.window.tiles)):
            expected = model(**given)
        assert relative_error(variant.run(**given), expected) < 1e-5
        assert relative_error(expected, model(**given)) > 1e-3


@torch.no_grad()
def test_in_a_body_that_layers_share():
    model, given = Region(MODULATIONS["broadcast"], 3), inputs()
    plain = Modulated(MODULATIONS["broadcast"], 3)
    plain.load_state_dict(model.state_dict())
    variant = compile_variants(model, given, {"sta": OPTIONS})["sta"]
    (site,) = {(s.grid, s.tiles, s.window) for s in variant.report.replaced}
    with Oracle(plain, plain.sites, window_mask(*site)):
        expected = plain(**given)
    assert relative_error(variant.run(**given), expected) < 1e-5
    assert variant.report.conversions == 3


@torch.no_grad()
def test_beside_a_frame_that_every_query_sees():
    model = Modulated(MODULATIONS["broadcast"], 2)
    options = {**OPTIONS, "window": (1, 3, 3), "always_keep": {"frames": [0]}}
    given = inputs()
    variant = compile_variants(model, given, {"sta": options})["sta"]
    site, frame = variant.report.replaced[0], H * W
    mask = torch.ones(T * frame, T * frame, dtype=torch.bool)
    mask[frame:, frame:] = window_mask(site.grid, site.tiles, site.window)
    with Oracle(model, model.sites, mask):
        expected = model(**given)
    assert relative_error(variant.run(**given), expected) < 1e-5
    assert relative_error(expected, model(**given)) > 1e-3
