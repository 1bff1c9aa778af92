"""The definitions that the benchmark checks with, against those of the tests."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from sta_compile.bench.patterns import Everything, Neighbourhood, Tiles
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.window import Window
from tests import oracle


def mask_of(pattern, queries, keys):
    sees = pattern.sees(torch.device("cpu"))
    mask = sees(None, None, torch.arange(queries)[:, None], torch.arange(keys)[None])
    assert mask.sum() == pattern.pairs
    return mask


@pytest.mark.parametrize(
    ("grid", "tiles", "window"),
    [
        ((5, 6, 8), (3, 3, 4), (1, 3, 3)),
        ((4, 7, 5), (2, 3, 5), (3, 2, 4)),
        ((1, 1, 3), (1, 1, 3), (1, 1, 1)),
    ],
)
@pytest.mark.parametrize(("text", "valid"), [(0, 0), (9, 9), (9, 4), (9, 0)])
def test_windows_of_tiles(grid, tiles, window, text, valid):
    video = grid[0] * grid[1] * grid[2]
    roles, segments = (("video", "context"), [video, text]) if text else (("video",), [video])
    lengths = torch.tensor([[valid]]) if text else None
    expected = oracle.full_mask(grid, tiles, window, roles, segments, 1, lengths, None)[0]
    pattern = Tiles(Tiling(grid, tiles), Window(window), text, valid)
    assert torch.equal(mask_of(pattern, video + text, video + text), expected)


def test_neighbourhoods_move_inward_at_borders():
    grid, window = (2, 5, 7), (3, 2, 4)
    mask = mask_of(Neighbourhood(grid, window), 70, 70).view(*grid, *grid)
    for token in product(*map(range, grid)):
        seen = mask[token]
        for axis, (length, wide) in enumerate(zip(grid, window, strict=True)):
            wide = min(length, wide)
            low = min(max(token[axis] - wide // 2, 0), length - wide)
            others = [other for other in range(3) if other != axis]
            assert seen.any(others[1]).any(others[0]).nonzero()[:, 0].tolist() == [
                *range(low, low + wide)
            ]


def test_everything_but_what_pads_the_text():
    mask = mask_of(Everything(10, 7), 10, 10)
    assert mask[:, :7].all()
    assert not mask[:, 7:].any()
