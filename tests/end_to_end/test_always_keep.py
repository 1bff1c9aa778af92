"""Frames that every query sees: the window of the definition is over the other frames, and these frames see everything."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor

from sta_compile.errors import StaError
from sta_compile.planning.choose_tiles import plan_attention
from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.models import FAMILIES
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.test_models import FIRST, GRIDS
from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo, valid

GRID = (5, 6, 8)
FRAME, N, TEXT = 48, 240, 7


def mask_of(site, grid, first: int, last: int) -> Tensor:
    """bool [query, key] over all frames."""
    frame = grid[1] * grid[2]
    between = slice(first * frame, prod(grid) - last * frame)
    mask = torch.ones(prod(grid), prod(grid), dtype=torch.bool)
    mask[between, between] = window_mask(site.grid, site.tiles, site.window)
    return mask


@pytest.mark.parametrize(
    ("frames", "first", "last"), [([0], 1, 0), ([-1], 0, 1), ([1, 0, -1], 2, 1), ([-2, -1], 0, 2)]
)
@pytest.mark.parametrize("text", [False, True])
@torch.no_grad()
def test_frames_at_the_ends(frames, first, last, text):
    model = TinyVideo(layers=2)
    inputs = {"latent": torch.randn(2, CHANNELS, *GRID)}
    if text:
        inputs |= {"text": torch.randn(2, TEXT, 16), "valid": valid(5, 7, of=TEXT)}
    options = {**SPARSE, "always_keep": {"frames": frames}}
    variants = compile_variants(
        model,
        inputs,
        {"sta": options, "plain": SPARSE, "full": {**options, "window": "full"}},
    )
    sta = variants["sta"]
    site = sta.report.replaced[0]
    assert site.grid == (GRID[0] - first - last, *GRID[1:])
    segments = [("context", first * FRAME)] * bool(first) + [("video", prod(site.grid))]
    segments += [("context", last * FRAME)] * bool(last) + [("context", TEXT)] * text
    assert site.segments == tuple(segments)
    assert "every query sees" in str(sta.report)
    mask = mask_of(site, GRID, first, last)
    assert site.kept == pytest.approx(mask.float().mean().item())
    with Oracle(model, model.sites, mask):
        expected = model(**inputs)
    assert relative_error(sta.run(**inputs), expected) < 1e-5
    assert relative_error(variants["plain"].run(**inputs), expected) > 1e-3
    exact = variants["full"]
    assert exact.report.replaced[0].grid == GRID
    assert relative_error(exact.run(**inputs), model(**inputs)) < 1e-5


@pytest.mark.parametrize("name", ["wan_ti2v", "hunyuan", "cogvideox_5b", "allegro"])
@torch.no_grad()
def test_models_of_an_image(name):
    case = FAMILIES[name].case(2, FIRST)
    tile, window, _, _ = GRIDS[FIRST]
    options = {"tile": tile, "window": window, "always_keep": {"frames": [0]}}
    sta = compile_variants(case.model, case.inputs, {"sta": options})["sta"]
    mask = mask_of(sta.report.replaced[0], FIRST, 1, 0)
    with Oracle(case.model, case.sites, mask, text_first=case.text_first):
        expected = case.model(**case.inputs)[0]
    assert relative_error(sta.run(**case.inputs)[0], expected) < 1e-4


@pytest.mark.parametrize(("frames", "first", "last"), [([0], 1, 0), ([0, -2, -1], 1, 2)])
@pytest.mark.parametrize("text", [False, True])
@torch.no_grad()
def test_grids_known_at_run_time_only(frames, first, last, text):
    model, options = TinyVideo(layers=2), {**SPARSE, "always_keep": {"frames": frames}}

    def inputs(grid):
        given = {"latent": torch.randn(2, CHANNELS, *grid)}
        return given | (
            {"text": torch.randn(2, TEXT, 16), "valid": valid(5, 7, of=TEXT)} if text else {}
        )

    given = inputs(GRID)
    for dim in (2, 3, 4):
        torch._dynamo.mark_dynamic(given["latent"], dim)
    sta = compile_variants(model, given, {"sta": options}, dynamic=True)["sta"]
    assert [site.grid for site in sta.report.replaced] == [None, None]
    for grid in (GRID, (6, 9, 4)):
        given, frame = inputs(grid), grid[1] * grid[2]
        windowed = (grid[0] - first - last, *grid[1:])
        plan = plan_attention(windowed, options["window"], options["tile"])
        mask = torch.ones(prod(grid), prod(grid), dtype=torch.bool)
        between = slice(first * frame, prod(grid) - last * frame)
        mask[between, between] = window_mask(windowed, plan.tiling.tiles, plan.window.tiles)
        with Oracle(model, model.sites, mask):
            expected = model(**given)
        assert relative_error(sta.run(**given), expected) < 1e-5
        assert relative_error(model(**given), expected) > 1e-3
    # A video of one frame is compiled anew, another of too few frames is not.
    with pytest.raises(StaError, match="keep fewer"):
        sta.run(**inputs((first + last, *GRID[1:])))


def test_there_must_be_frames_left():
    model = TinyVideo()
    options = {**SPARSE, "always_keep": {"frames": [0, 1, 2, 3, 4]}}
    with pytest.raises(StaError, match=r"leaves none of the 5 frames.*keep fewer"):
        compile_variants(model, {"latent": torch.randn(1, CHANNELS, *GRID)}, {"sta": options})
