"""Grids in the values of ids, coordinates and rope tables, alone or beside other tokens, and what tells another grid."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from sta_compile.analysis.position_values import (
    Block,
    find_block,
    find_common_block,
    find_positions,
    matches_grid,
    may_hold_positions,
    rows_of,
)

Triple = tuple[int, int, int]
GRIDS: list[Triple] = [(3, 4, 6), (1, 9, 11), (5, 9, 11), (4, 4, 4), (3, 2, 2), (13, 2, 30)]


def ids(grid: Triple) -> Tensor:
    return torch.cartesian_prod(*map(torch.arange, grid)).float()


def as_they_are(positions: Tensor) -> Tensor:
    return positions


def angles(positions: Tensor) -> Tensor:
    """Rope's angles of [tokens, axes]: a few columns per axis, the slow ones nearly the same everywhere."""
    frequencies = 10000.0 ** -(torch.arange(8) / 8)
    return (positions[:, :, None] * frequencies).flatten(1)


def cosines(positions: Tensor) -> Tensor:
    return angles(positions).cos()


def cos_and_sin(positions: Tensor) -> Tensor:
    table = angles(positions).repeat_interleave(2, 1)
    return torch.cat([table.cos(), table.sin()], 1)


def interleaved(positions: Tensor) -> Tensor:
    """As LTX has them: the axes take turns along the columns, and some columns are constant."""
    table = angles(positions).unflatten(1, (-1, 8)).transpose(1, 2).flatten(1)
    return torch.cat([torch.ones(len(table), 2), table.cos()], 1)


def rotations(positions: Tensor) -> Tensor:
    """Complex, with an axis for samples and one for heads."""
    table = angles(positions)
    return torch.polar(torch.ones_like(table), table)[None, :, None]


def matrices(positions: Tensor) -> Tensor:
    """[1, tokens, 1, pairs, 2, 2]"""
    cos, sin = angles(positions).cos(), angles(positions).sin()
    return torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))[None, :, None]


def seconds_and_pixels(positions: Tensor) -> Tensor:
    """[samples, axes, tokens, start and end] of a causal video: its first frame is one pixel long, the others eight."""
    starts = positions * torch.tensor([8.0, 32.0, 32.0])
    both = torch.stack([starts, starts + torch.tensor([8.0, 32.0, 32.0])], -1)
    both[:, 0] = (both[:, 0] - 7).clamp(min=0) / 24
    return both.transpose(0, 1).expand(2, -1, -1, -1)


# what makes values of positions -> the dimension of the tokens
FORMS = {
    as_they_are: 0, cosines: 0, cos_and_sin: 0, interleaved: 0, rotations: 1, matrices: 1,
    seconds_and_pixels: 2,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_is_read_and_told_from_another(form, grid):
    dim = FORMS[form]
    values = form(ids(grid))
    assert may_hold_positions(values, dim)
    block = find_block(rows_of(values, dim))
    assert block == Block(0, grid)
    positions = find_positions(values, dim, block)
    assert positions.increasing or form in (cosines, interleaved)
    for other in {(grid[0], grid[2], grid[1]), (grid[2], grid[1], grid[0]), grid}:
        assert bool(matches_grid(form(ids(other)), positions)) == (other == grid)
    assert not matches_grid(values * float("nan"), positions)
    assert not matches_grid(torch.zeros_like(values), positions)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float16, torch.float64])
def test_kinds_of_numbers(dtype):
    values = ids((3, 9, 11)).to(dtype)
    block = find_block(rows_of(values, 0))
    assert block == Block(0, (3, 9, 11))
    assert find_positions(values, 0, block).increasing


def test_positions_that_move_and_stretch_are_those_of_the_grid():
    values = ids((3, 4, 6))
    positions = find_positions(values, 0, Block(0, (3, 4, 6)))
    for shift, step in ((5.0, 1.0), (-2.5, 0.25), (1000.0, 16.0)):
        assert matches_grid(shift + step * values, positions)
    assert not matches_grid(values.flip(0), positions)
    rows = values.clone()
    rows[:, 1] = torch.tensor([3.0, 1.0, 2.0, 0.0])[values[:, 1].long()]
    assert not matches_grid(rows, positions)


def text(count: int) -> Tensor:
    return torch.arange(count)[:, None].expand(-1, 3).float()


GRID: Triple = (3, 4, 6)
VIDEO = ids(GRID)
AFTER = torch.tensor([1.0, 0.0, 0.0])


@pytest.mark.parametrize("form", [as_they_are, cos_and_sin])
@pytest.mark.parametrize(
    ("pieces", "offset", "grid"),
    [
        ([text(7), pad(torch.arange(5.0)[:, None], (0, 2)) + 7, VIDEO + 7], 12, GRID),  # MiniMax-H3
        ([torch.zeros(7, 3), VIDEO], 7, GRID),  # FLUX, both parts as one table
        ([VIDEO, text(5) + 20], 0, GRID),
        ([VIDEO + 9, torch.zeros(5, 3)], 0, GRID),  # padded, as in Z-Image
        ([ids((1, 4, 6)), ids((1, 3, 6)) + AFTER], 0, (1, 4, 6)),  # Kontext: a reference after
        ([ids((1, 4, 6)), ids((1, 6, 6)) + AFTER], 0, (1, 4, 6)),
        ([ids((1, 4, 6)), ids((1, 4, 9)) + AFTER], 0, (1, 4, 6)),
        ([ids((1, 4, 6)), ids((1, 5, 3)) + AFTER], 0, (1, 4, 6)),
        ([ids((1, 4, 6)), ids((1, 4, 6)) + AFTER], 0, (1, 4, 6)),
        ([ids((1, 2, 3)), ids((3, 4, 6)) + 5 * AFTER], 6, (3, 4, 6)),  # history before
    ],
)
def test_a_grid_beside_other_tokens(form, pieces, offset, grid):
    values = form(torch.cat(pieces))
    assert find_block(rows_of(values, 0)) == Block(offset, grid)


def numbered(*frames: float, start: float = 0.0, step: float = 1.0) -> Tensor:
    """Images of one size, whose rows and columns go on from `start` by `step`."""
    places = start + step * ids((1, 4, 6))
    return torch.cat([places * torch.tensor([0, 1, 1]) + frame * AFTER for frame in frames])


PIXELS = {"step": 16.0}
MIDDLES = {"start": 0.5}


@pytest.mark.parametrize(
    ("values", "frames"),
    [
        (numbered(0, 1, 2), 3),
        (numbered(7, 8, 9, 10), 4),
        (numbered(0, 1), 1),  # FLUX Kontext
        (numbered(0, 10), 1),  # FLUX.2
        (numbered(0, 10, 20), 1),
        (numbered(0, 1, 1), 1),
        (cos_and_sin(numbered(0, 1)), 1),
        (cos_and_sin(numbered(0, 1, 2)), 3),
        (numbered(0, 1 / 3, step=32), 2),  # seconds and pixels
        (numbered(0, 0.04, 0.36, 0.68, 0, step=32), 4),  # the same, and its first frame again
        (numbered(0, 5 / 3, 25 / 3, step=0.5), 3),  # MiniMax-H3
        (numbered(0, 1, 2, **PIXELS), 3),
        (numbered(0, 1, 9, 17, **PIXELS), 4),  # a causal video
        (numbered(0, 1, **PIXELS), 1),
        (numbered(0, 10, **PIXELS), 1),
        (numbered(0, 10, 20, **MIDDLES), 1),
        (numbered(0, 1, 2, 3, 10), 4),  # references after a video
        (numbered(0, 1, 2, 0, 0), 3),
        (numbered(0, 1, 2, 3, 0, 1, 2, 3), 4),
        (numbered(-1, 0, 1), 3),
        (numbered(-2, -1, 0, 1), 4),
    ],
)
def test_a_video_is_told_from_images_of_one_size(values, frames):
    assert find_block(values) == Block(0, (frames, 4, 6))


@pytest.mark.parametrize("numbers", [(-1, 0, 1, 2, 3), (-1, 0, 1, 2, 3, 9)])
def test_a_reference_before_zero(numbers):
    assert find_block(numbered(*numbers)) == Block(24, (4, 4, 6))


@pytest.mark.parametrize("numbers", [(0, 10, 20), (0, 8, 16, 24), (0, 1, 10, 12)])
def test_numbers_of_frames_or_of_references(numbers):
    """Among rows and columns in pixels nothing tells which."""
    found = find_block(numbered(*numbers, **PIXELS))
    assert found == Block(0, (len(numbers), 4, 6), doubtful=True)


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(96, 5),
        torch.zeros(96, 3),
        torch.arange(96.0)[:, None],
        (torch.arange(96) < 50).float()[:, None],
        (torch.arange(96) // 24).float()[:, None],  # a timestep per frame
        (torch.arange(96) % 12).float()[:, None],
        text(96),
        ids((96, 1, 1)),
        torch.zeros(96, 0),
        torch.zeros(3, 2),
    ],
)  # fmt: skip
def test_no_grid(values):
    assert find_block(values) is None


def test_frames_without_a_number_are_no_grid_that_can_be_checked():
    values = ids((3, 4, 6))[:, 1:]
    block = find_block(values)
    assert block is None or find_positions(values, 0, block) is None


def test_activations_are_not_copied_to_be_read():
    assert not may_hold_positions(torch.randn(2, 96, 8), 1)
    assert not may_hold_positions(torch.zeros(2, 3, 8), 1)


@pytest.mark.parametrize(
    "grids", [((4, 6, 9), (4, 9, 6)), ((4, 6, 9), (2, 12, 9)), ((3, 4, 6), (2, 4, 6))]
)
@pytest.mark.parametrize("table", [as_they_are, cos_and_sin])
def test_samples_with_grids_of_their_own(grids: tuple[Triple, Triple], table) -> None:
    """What their positions have in common is no sample's grid."""
    longest = max(torch.Size(grid).numel() for grid in grids)
    rows = [pad(table(ids(grid)), (0, 0, 0, longest - torch.Size(grid).numel())) for grid in grids]
    assert find_common_block(torch.stack(rows), 1) is None
    assert find_common_block(torch.stack(rows, 1), 0) is None
    alike = torch.stack([rows[0], rows[0]])
    assert find_common_block(alike, 1) == Block(0, grids[0])


def test_samples_at_places_of_their_own() -> None:
    """Crops, or other frames per second."""
    values = torch.stack([ids((3, 4, 6)), ids((3, 4, 6)) * torch.tensor([0.5, 1, 1]) + 7])
    assert find_common_block(values, 1) == Block(0, (3, 4, 6))
    assert find_common_block(values.movedim(2, 0), 2) == Block(0, (3, 4, 6))


def test_tokens_in_cells_of_four_are_no_grid() -> None:
    """As Qwen2-VL merges them."""
    order = torch.arange(4 * 6 * 8).view(4, 3, 2, 4, 2).transpose(2, 3).flatten()
    assert find_block(ids((4, 6, 8))[order]) is None
