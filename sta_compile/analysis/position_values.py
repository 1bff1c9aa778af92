"""Is there a token grid in the values of a tensor, and are the values of a later call those of the same grid?

Coordinates, ids and rope tables hold one row per token, and each of their columns depends on one axis of the grid only:
over a 3x4x5 grid the ids of FLUX are (t, h, w), and of a rope table some columns turn with t, some with h, some with w.
Going along the rows, the columns of w come back to where they began after 5 rows, those of h after 4 times 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from .numbered_frames import frames_of_video

Triple = tuple[int, int, int]
# Angles of float32 that were computed in another order differ in their last bits.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6
# Ids and coordinates of tokens have up to four columns; features have more.
COLUMNS = 4
_MAX_STARTS = 64
_MAX_RETURNS = 4
_LEAST_SHARE = (
    16  # less than a sixteenth of all rows with positions is a cell of tokens in another order
)


@dataclass(frozen=True)
class Block:
    """Rows offset .. offset + T*H*W of a tensor hold a grid (frames, rows, columns), in raster order.

    doubtful: its frames may be an image and its references.
    """

    offset: int
    grid: Triple
    doubtful: bool = False

    @property
    def tokens(self) -> int:
        return prod(self.grid)


@dataclass(frozen=True)
class Positions:
    """Where a tensor has the positions of a grid: from row `offset` of its dimension `dim`.

    increasing: along each axis of the grid some column grows from one position to the next.
    """

    dim: int
    offset: int
    grid: Triple
    increasing: bool
    is_complex: bool


@dataclass(frozen=True)
class Rows:
    """Rows start .. stop along a dimension of a tensor."""

    dim: int
    start: int
    stop: int


def rows_of(values: Tensor, dim: int) -> Tensor:
    """[tokens, columns] in real numbers, of a tensor that has the tokens along `dim`."""
    values = values.detach()
    values = torch.view_as_real(values) if values.is_complex() else values.unsqueeze(-1)
    return values.movedim(dim, 0).flatten(1)


def may_be_ids(values: Tensor, dim: int) -> bool:
    """Has a tensor a few columns for each of the tokens along a dimension?"""
    return dim < values.dim() - 1 and values.shape[-1] <= COLUMNS


def may_hold_positions(values: Tensor, dim: int) -> bool:
    """A cheap look at three rows in the middle: of activations every column differs from row to row."""
    tokens = values.shape[dim]
    if tokens < 4 or values.numel() == 0:
        return False
    rows = rows_of(values.narrow(dim, tokens // 2 - 1, 3), dim)
    return bool((rows[1:] == rows[:-1]).any())


def block_in(values: Tensor, where: Rows) -> Block | None:
    """The grid in some rows of a tensor, counted from its first row."""
    part = values.narrow(where.dim, where.start, where.stop - where.start)
    block = find_common_block(part, where.dim) if may_hold_positions(part, where.dim) else None
    return None if block is None else replace(block, offset=where.start + block.offset)


def find_block(rows: Tensor) -> Block | None:
    """A grid of at least two rows and two columns among the rows of [tokens, columns]; None if there is none.

    Of several grids (the references of an edit after the image that is made) the first one that is not small.
    """
    given = rows.detach().to("cpu", torch.float64)
    rows = _scaled(given)
    if rows.shape[0] < 4 or rows.shape[1] == 0:
        return None
    changed = _differ(rows[1:], rows[:-1])
    found: list[Block] = []
    for start in _starts(changed):
        if found and start < found[-1].offset + found[-1].tokens:
            continue
        block = _block_at(rows, changed, start)
        if block is not None:
            found.append(_video_in(given, block))
    largest = max((block.tokens for block in found), default=0)
    if _LEAST_SHARE * largest < int(changed.any(1).sum()):
        return None
    return next((block for block in found if 2 * block.tokens >= largest), None)


def find_common_block(values: Tensor, dim: int) -> Block | None:
    """As `find_block`, of the tokens along `dim`. None where samples have grids of their own, which differ.

    Where each sample's positions are its own, [batch, tokens, 3] say, all of them together may look like a grid that none of
    them has: of 4x6x9 and of 4x9x6 tokens, one of 1x4x54.
    """
    block = find_block(rows_of(values, dim))
    if block is None:
        return None
    for other in range(values.dim()):
        if other == dim or values.shape[other] == 1:
            continue
        first, *rest = values.unbind(other)
        along = dim - (other < dim)
        if rows_of(first, along).shape[1] == 1:  # single columns say nothing by themselves
            continue
        unlike = [part for part in rest if not torch.equal(part, first)]
        for part in (first, *unlike) if unlike else ():
            own = find_block(rows_of(part, along))
            if own is not None and not _agrees(own, block):
                return None
    return block


def _agrees(own: Block, block: Block) -> bool:
    """Is a part's block the whole's, or what the frames of that have in common?"""
    if (own.offset, own.grid) == (block.offset, block.grid):
        return True
    return own.grid == (1, *block.grid[1:]) and own.tokens < block.tokens


def _video_in(rows: Tensor, block: Block) -> Block:
    """A block without the references of an image that have its size."""
    _, height, width = block.grid
    cells = rows[block.offset : block.offset + block.tokens].reshape(*block.grid, -1)
    frames = frames_of_video(cells)
    if frames is None:
        return replace(block, doubtful=True)
    return Block(block.offset + frames.start * height * width, (len(frames), height, width))


def _scaled(rows: Tensor) -> Tensor:
    """Columns as 0..1 of their range, without those that hardly change: their rounding errors look like steps."""
    low, high = rows.amin(0), rows.amax(0)
    kept = (high - low) > 1e-3 * torch.maximum(low.abs(), high.abs())
    scaled: Tensor = ((rows - low) / (high - low))[:, kept]
    different: Tensor = scaled.unique(dim=1)
    return different


def _differ(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() > 1e-4


def _starts(changed: Tensor) -> list[int]:
    """Rows at which a grid may begin: another set of columns changes from there on than before."""
    other = torch.ones(changed.shape[0], dtype=torch.bool)
    other[1:] = (changed[1:] != changed[:-1]).any(1)
    return [int(i) for i in (other & changed.any(1)).nonzero()[:_MAX_STARTS]]


def _block_at(rows: Tensor, changed: Tensor, start: int) -> Block | None:
    for width in _periods(rows[start:], changed[start]):
        inner = _differ(rows[start : start + width], rows[start]).any(0)
        count = (rows.shape[0] - start) // width
        lines = rows[start : start + count * width].unflatten(0, (count, width))
        lines = lines[: _repeats(lines, inner)]
        grid = _frames(lines[:, 0, ~inner])
        if grid is not None:
            return Block(start, (*grid, width))
    return None


def _frames(lines: Tensor) -> tuple[int, int] | None:
    """(frames, rows) of a grid's lines [count, columns that are the same along a line]; None if they are no grid."""
    alike = (~_differ(lines[1:], lines[:-1]).any(1)).nonzero()
    if len(alike):  # two lines of the same position: the grid ends before the second
        lines = lines[: int(alike[0]) + 1]
    if lines.shape[0] < 2:
        return None
    for height in _periods(lines, _differ(lines[1], lines[0])):
        inner = _differ(lines[:height], lines[0]).any(0)
        count = lines.shape[0] // height
        repeats = _repeats(lines[: count * height].unflatten(0, (count, height)), inner)
        rest, last = lines[repeats * height :], lines[repeats * height - 1]
        if repeats > 1 and len(rest) and not _differ(rest[0, ~inner], last[~inner]).any():
            repeats -= 1  # the last frame goes on: it is one of another grid
        if repeats:
            return repeats, height
    return 1, lines.shape[0]


def _periods(rows: Tensor, columns: Tensor) -> Iterator[int]:
    """Distances, at least 2, after which the given columns of the first row come back."""
    if rows.shape[0] > 2:
        back = ~_differ(rows[2:, columns], rows[:1, columns]).any(1)
        yield from (int(i) + 2 for i in back.nonzero()[:_MAX_RETURNS])


def _repeats(lines: Tensor, inner: Tensor) -> int:
    """How many leading lines of [count, length, columns] have the first one's inner columns, and no others that change."""
    other = _differ(lines[..., inner], lines[:1, :, inner]).flatten(1).any(1)
    other |= _differ(lines[..., ~inner], lines[:, :1, ~inner]).flatten(1).any(1)
    ends = other.nonzero()
    return int(ends[0]) if len(ends) else lines.shape[0]


def find_positions(values: Tensor, dim: int, block: Block) -> Positions | None:
    """How a block of a tensor's rows is told from others by `matches_grid`; None if it does not tell them."""
    for increasing in (True, False):
        found = Positions(dim, block.offset, block.grid, increasing, values.is_complex())
        if bool(matches_grid(values.detach(), found)):
            return found
    return None


def matches_grid(values: Any, positions: Positions) -> Any:
    """Have values the positions of a grid? A bool scalar on their device; nothing is read on the host.

    Each column must be the same along all axes but one, and along each axis some column must differ from one position to the
    next, or grow. values: a tensor, or a proxy that records the operations.
    """
    grid = positions.grid
    if positions.is_complex:
        values = torch.view_as_real(values)
    part = values.narrow(positions.dim, positions.offset, prod(grid)).movedim(positions.dim, 0)
    cells = part.to(torch.float32).reshape(*grid, -1)
    fits: Any = None
    moves: Any = None
    for axis, length in enumerate(grid):
        if length == 1:
            continue
        line = cells
        for other in range(3):
            if other != axis:
                line = line.narrow(other, 0, 1)
        own = _alike(cells, line).flatten(0, 2).all(0)
        moved = torch.logical_and(_steps(line.flatten(0, 2), length, positions.increasing), own)
        moved = moved.any(1).all()
        fits = own if fits is None else torch.logical_or(fits, own)
        moves = moved if moves is None else torch.logical_and(moves, moved)
    return torch.logical_and(fits.all(), moves)


def _steps(line: Any, length: int, increasing: bool) -> Any:
    """[length - 1, columns]: does a column step (all the way, if it has to grow) along a line of positions?"""
    after, before = line.narrow(0, 1, length - 1), line.narrow(0, 0, length - 1)
    if increasing:
        return torch.gt(after, before).all(0, keepdim=True)
    return torch.logical_not(_alike(after, before))


def _alike(a: Any, b: Any) -> Any:
    return torch.isclose(a, b, rtol=_RELATIVE, atol=_ABSOLUTE)
