"""Fields and frozen activations that routers are judged on, and the true errors of pairs.

A problem is the attention of one layer: q, k, v float32 [heads, tokens, head_dim] with values that bf16 has, tokens of the
video in tile order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sta_compile.ir.tiling import Tiling
from sta_compile.ir.token_blocks import SIZE
from sta_compile.tiers.measure import Row, rows_of
from sta_compile.tiers.predict import Predicted, predict
from sta_compile.tiers.statistics import (
    KEY_GROUPS,
    QUERY_GROUPS,
    Partition,
    key_statistics,
    query_statistics,
)

ROWS = 192  # queries of a row
GROUPS = QUERY_GROUPS, KEY_GROUPS


@dataclass(frozen=True)
class Problem:
    """tiling: of the video. scale: of the scores."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    tiling: Tiling
    scale: float

    def to(self, device: str) -> Problem:
        q, k, v = (x.to(device) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    def partitions(
        self, query_groups: int = GROUPS[0], key_groups: int = GROUPS[1], every: int = 1
    ) -> tuple[Partition, Partition]:
        """Rows of queries, every so-manieth of them, and blocks of keys."""
        device = self.q.device
        rows, keys = (tuple(cut(self.tiling, size)) for size in (ROWS, SIZE))
        return (
            Partition.of(self.tiling, rows[::every], query_groups, device),
            Partition.of(self.tiling, keys, key_groups, device),
        )

    def predict(self, rows: Partition, blocks: Partition) -> Predicted:
        """[1, heads, rows, blocks]"""
        q, k, v = self._batch()
        statistics = query_statistics(q, rows), key_statistics(k, v, blocks)
        return predict(*statistics, rows, blocks, self.scale)

    def rows(
        self, rows: Partition, blocks: Partition, log_skipped: Tensor
    ) -> Iterator[tuple[tuple[int, int, int], Row]]:
        q, k, v = self._batch()
        return rows_of(q, k, v, key_statistics(k, v, blocks), rows, blocks, self.scale, log_skipped)

    def _batch(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x[None].bfloat16() for x in (self.q, self.k, self.v))
        return q, k, v


def cut(tiling: Tiling, size: int) -> Iterator[tuple[int, int]]:
    start = 0
    for a in range(tiling.tiles[0]):
        for b in range(tiling.tiles[1]):
            for c in range(tiling.tiles[2]):
                length = tiling.count(a, b, c)
                yield from ((start + at, min(size, length - at)) for at in range(0, length, size))
                start += length


def true_pairs(
    problem: Problem, rows: Partition, blocks: Partition, log_skipped: Tensor
) -> Predicted:
    """As `predict`, measured, in units of the mean |output|^2. log_skipped: [1, heads, rows, blocks]"""
    skip, skim = torch.zeros_like(log_skipped), torch.zeros_like(log_skipped)
    total = torch.zeros((), device=skip.device)
    for place, row in problem.rows(rows, blocks, log_skipped):
        total += row.exact.square().sum()
        skip[place], skim[place] = row.pairs()
    unit = total / (len(problem.q) * rows.tokens) * rows.longest
    return Predicted(skip / unit, skim / unit, log_skipped)


def synthetic(kind: str, grid: tuple[int, int, int] = (12, 24, 32), d: int = 64) -> Problem:
    """smooth: q, k and v vary slowly over the video. needles: a few keys have large scores. static: a background that no
    frame changes. heavy: scores with a standard deviation of 4 and more."""
    generator = torch.Generator().manual_seed(0)

    def field(scale: tuple[float, float, float], frames: int = grid[0]) -> Tensor:
        """Standard deviation 1, neighbours alike within about `scale` tokens: [frames, rows, cols, d]"""
        size = (frames, *grid[1:])
        x = torch.fft.rfftn(torch.randn(d, *size, generator=generator), dim=(1, 2, 3))
        axes = [torch.fft.fftfreq(n) for n in size[:2]] + [torch.fft.rfftfreq(size[2])]
        parts = zip(torch.meshgrid(*axes, indexing="ij"), scale, strict=True)
        exponent = sum(((f * s) ** 2 for f, s in parts), torch.zeros(()))
        y = torch.fft.irfftn(x * (-2 * math.pi**2 * exponent).exp(), s=size, dim=(1, 2, 3))
        return (y / y.std()).permute(1, 2, 3, 0)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, d, generator=generator)

    base, fine, own = field((2, 3, 3)), field((0.7, 0.8, 0.8)), noise(*grid)
    common = noise()
    if kind == "smooth":
        q = base * 0.8 + fine * 0.5 + own * 0.3
        k, gain = q + 2 * common, 1.0
    elif kind == "needles":
        q = base * 0.6 + own * 0.5
        hot = torch.rand(*grid, 1, generator=generator) < 0.004
        k, gain = torch.where(hot, q + 2.5 * noise(*grid), q), 1.4
    elif kind == "static":
        still = field((1, 3, 3), frames=1).expand(*grid, d)
        q = still * 0.8 + fine * 0.3 + own * 0.3
        k, gain = q + common, 1.6
    else:
        q = base * 0.9 + own * 0.4
        k, gain = q, 2.0
    mixed = base @ (noise(d) / d**0.5)
    v = mixed * 0.7 + field((1, 1.5, 1.5)) * 0.6 + 0.3 * noise(*grid)
    tiling = Tiling(grid, (grid[0] // 6, grid[1] // 8, grid[2] // 8))
    order = torch.tensor(tiling.order())
    q, k, v = (x.reshape(1, -1, d)[:, order].bfloat16().float() for x in (q * gain, k * gain, v))
    return Problem(kind, q, k, v, tiling, d**-0.5)


def frozen(path: Path) -> list[Problem]:
    """Activations that were kept: a list of {name, q, k, v [heads, tokens, head_dim] in tile order, grid, tiles, scale}."""
    problems = []
    for kept in torch.load(path, weights_only=True):
        q, k, v = (kept[name].float() for name in "qkv")
        tiling = Tiling(tuple(kept["grid"]), tuple(kept["tiles"]))
        problems.append(Problem(kept["name"], q, k, v, tiling, kept["scale"]))
    return problems
