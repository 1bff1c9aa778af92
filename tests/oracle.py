"""Attention by the definition (design, section 4), token by token: nothing of sta_compile is used.

Everything is brute force over coordinates, so it is only for small grids.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

Triple = tuple[int, int, int]


def tile_index(length: int, tiles: int) -> list[int]:
    """Tile of each position of an axis: sizes differ by at most one, the larger ones first."""
    sizes = [length // tiles + (i < length % tiles) for i in range(tiles)]
    return [tile for tile, size in enumerate(sizes) for _ in range(size)]


def tile_order(grid: Triple, tiles: Triple) -> list[int]:
    """Raster index of each token in tile order."""
    axes = [tile_index(length, n) for length, n in zip(grid, tiles, strict=True)]
    coordinates = list(product(*map(range, grid)))

    def key(index: int) -> tuple[int, ...]:
        token = coordinates[index]
        return (*(axis[i] for axis, i in zip(axes, token, strict=True)), *token)

    return sorted(range(len(coordinates)), key=key)


def video_mask(grid: Triple, tiles: Triple, window: Triple) -> Tensor:
    """bool [query, key] over video tokens in raster order."""
    mask = torch.ones((), dtype=torch.bool)
    for axis in range(3):
        n, tile = tiles[axis], torch.tensor(tile_index(grid[axis], tiles[axis]))
        width = min(n, 2 * (window[axis] // 2) + 1)
        low = (tile - window[axis] // 2).clamp(0, n - width)
        key = tile[None, :]
        shape = [1] * 6
        shape[axis] = shape[axis + 3] = grid[axis]
        mask = mask & ((low[:, None] <= key) & (key < low[:, None] + width)).view(shape)
    tokens = grid[0] * grid[1] * grid[2]
    return mask.expand(*grid, *grid).reshape(tokens, tokens)


def full_mask(
    grid: Triple,
    tiles: Triple,
    window: Triple,
    roles: tuple[str, ...],
    segments: list[int],
    batch: int,
    key_lengths: Tensor | None,
    dense: Tensor | None,
    key_mask: Tensor | None = None,
    video_shown: Tensor | None = None,
) -> Tensor:
    """bool [batch, query, key] over the whole sequence, video tokens in tile order."""
    total, video = sum(segments), roles.index("video")
    starts = [sum(segments[:i]) for i in range(len(segments))]
    mask = torch.ones(batch, total, total, dtype=torch.bool)
    order = torch.tensor(tile_order(grid, tiles))
    rows = slice(starts[video], starts[video] + segments[video])
    sparse = video_mask(grid, tiles, window)[order][:, order]
    for sample in range(batch):
        hides = video_shown is not None and not video_shown[sample].all()
        if not hides and (dense is None or not dense[sample]):
            mask[sample, rows, rows] = sparse
    contexts = [i for i in range(len(roles)) if i != video]
    if key_lengths is not None:
        for column, i in enumerate(contexts):
            for sample in range(batch):
                valid = int(key_lengths[sample, column])
                mask[sample, :, starts[i] + valid : starts[i] + segments[i]] = False
    if key_mask is not None:
        columns = [j for i in contexts for j in range(starts[i], starts[i] + segments[i])]
        mask[:, :, columns] &= key_mask[:, None]
    if video_shown is not None:
        mask[:, :, rows] &= video_shown[:, None]
    asking = [roles[i] != "keys" for i in range(len(roles)) for _ in range(segments[i])]
    return mask[:, torch.tensor(asking)]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Dense masked attention in the inputs' dtype. q, k, v [batch, heads, tokens, head_dim].

    mask: bool [batch, query, key], or [batch, heads, query, key].
    """
    mask = mask if mask.dim() == 4 else mask[:, None]
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    visible = mask.any(-2)[..., None]  # a key that no query sees may hold NaN
    k, v = k.where(visible, 0), v.where(visible, 0)
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ v, scores.logsumexp(-1)
