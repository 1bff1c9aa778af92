"""No set of conversions of a graph moves fewer bytes than the one that is chosen: all are tried, on small random graphs.

A program is a list of (operation, number of a value): each operation reads the value before it, and some another one. The
first value comes from the patch embed, the last one goes to the unpatchify.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sta_compile.analysis.axes import resolve
from sta_compile.analysis.find_attention import find_attention
from sta_compile.analysis.graph_view import GraphView
from sta_compile.analysis.infer_grid import GridInference, VideoAttention
from sta_compile.analysis.propagate_layout import LayoutBuilder
from sta_compile.analysis.trace_dims import trace_dims
from sta_compile.planning.cut_layout import LayoutProblem, solve
from tests.analysis.traced import capture

GRID = (2, 3, 4)
WIDTH = 16
LIMIT = 18  # free values, of which all 2 ** LIMIT orders are tried


class Program(nn.Module):
    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = steps
        self.embed = nn.Conv3d(3, WIDTH, 1)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(24, WIDTH))
        self.register_buffer("order", torch.randperm(24))

    def forward(self, latent: Tensor) -> Tensor:
        values = [self.embed(latent).flatten(2).transpose(1, 2)]
        for name, other in self.steps:
            values.append(STEPS[name](self, values[-1], values[other % len(values)]))
        return values[-1].unflatten(1, GRID).permute(0, 4, 1, 2, 3)


def attend(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*[x[:, None]] * 3)[:, 0]


STEPS: dict[str, Callable[[Program, Tensor, Tensor], Tensor]] = {
    "attention": attend,
    "sum": lambda m, x, y: x + y,
    "silu": lambda m, x, y: F.silu(x),
    "wide and narrow": lambda m, x, y: m.narrow(m.wide(x)),
    "roll": lambda m, x, y: x + x.roll(1, 1),
    "table": lambda m, x, y: x + m.table,
    "frames": lambda m, x, y: (x.unflatten(1, (2, 12)) * m.table[:2, None]).flatten(1, 2),
    "columns": lambda m, x, y: x + m.table[:4].repeat(6, 1),
    "picked": lambda m, x, y: x + y[:, m.order],
    "mean": lambda m, x, y: x - y.mean(1, keepdim=True),
    "narrow gate": lambda m, x, y: x * y[..., :1],
}

step = st.tuples(st.sampled_from(tuple(STEPS)), st.integers(0, 5))
programs = st.tuples(*(st.lists(step, max_size=n) for n in (1, 3, 1))).map(
    lambda parts: [*parts[0], ("attention", 0), *parts[1], ("attention", 0), *parts[2]]
)


def problems(program: Program) -> list[LayoutProblem]:
    trace = trace_dims(GraphView(capture(program, torch.randn(2, 3, *GRID))))
    inference = GridInference(trace)
    answers = [inference.classify(site) for site in find_attention(trace.view)]
    found = [a for a in answers if isinstance(a, VideoAttention)]
    axes = dict.fromkeys(resolve(a.grid.axis) for a in found)
    return [
        LayoutBuilder(trace, axis, [a for a in found if resolve(a.grid.axis) == axis]).problem()
        for axis in axes
    ]


def cheapest(problem: LayoutProblem) -> tuple[float, int]:
    """Bytes and number of conversions of the best of all orders."""
    leader = list(range(problem.variables))
    for a, b in problem.ties:
        leader = [leader[a] if of == leader[b] else of for of in leader]
    pinned: dict[int, bool] = {leader[i]: False for i in problem.raster}
    pinned |= {leader[i]: True for i in problem.tile}
    free = [of for of in dict.fromkeys(leader) if of not in pinned]
    assume(len(free) <= LIMIT)
    choices = (np.arange(2 ** len(free))[:, None] >> np.arange(len(free))) & 1 == 1
    order: dict[int, Any] = {of: choices[:, i] for i, of in enumerate(free)}
    order |= {of: np.full(len(choices), value) for of, value in pinned.items()}
    moved, number = np.zeros(len(choices)), np.zeros(len(choices), dtype=int)
    for value in {use.value for use in problem.uses}:
        uses = [use for use in problem.uses if use.value == value]
        mine = order[leader[value]]
        differs = np.any([order[leader[use.consumer]] != mine for use in uses], axis=0)
        moved += differs * max(use.bytes for use in uses)
        number += differs
    best = np.lexsort((number, moved.round(6)))[0]
    return float(moved[best]), int(number[best])


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs)
def test_no_other_set_of_conversions_is_cheaper(steps: list[tuple[str, int]]) -> None:
    for problem in problems(Program(steps)):
        solution = solve(problem)
        assert (solution.cost, len(solution.conversions)) == pytest.approx(cheapest(problem))
