"""Which inputs give a grid, what becomes of their token axes, and what is said where they give none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sta_compile.analysis.find_attention import find_attention
from sta_compile.analysis.graph_view import GraphView, canonical_name
from sta_compile.analysis.hint_grid import infer_grids
from sta_compile.analysis.infer_grid import Refusal, VideoAttention
from sta_compile.analysis.trace_dims import trace_dims
from sta_compile.pipeline import rewrite
from sta_compile.settings import Settings
from tests.analysis.small_dits import DIM, GRID, OPTIONS, VIDEO, H, SmallDiT, T, W, heads, joined
from tests.analysis.small_dits import attend as sdpa
from tests.analysis.traced import capture_with_inputs

TEXT = 5
TURNED = (T, W, H)


def ids(grid: tuple[int, int, int] = GRID, start: float = 0) -> Tensor:
    return torch.cartesian_prod(*map(torch.arange, grid)) + start


def table(positions: Tensor) -> Tensor:
    """cos of [tokens, axes] for a head dim of 16."""
    angles = positions[:, :, None] * torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01])
    return torch.nn.functional.pad(angles.flatten(1), (0, 1)).cos()


class Packed(nn.Module):
    """One attention over [batch, tokens, dim], turned by a table for all of its tokens or made from ids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.proj = nn.Linear(3, 16)

    def forward(self, tokens: Tensor, table: Tensor, second: Tensor | None = None) -> Tensor:
        if table.shape[-1] == 3:
            table = self.proj(table.float())
        q, k = heads(self.q(tokens)) * table, heads(self.k(tokens)) * table
        if second is not None:
            q = q * second
        return joined(sdpa(q, k, heads(self.v(tokens))))


def answers(
    args: Sequence[Any],
    model: nn.Module | None = None,
    *,
    declared: tuple[int, int, int] | None = None,
    values: Any = lambda inputs: inputs,
    dynamic: bool = False,
) -> list[VideoAttention | Refusal | None]:
    gm, inputs = capture_with_inputs(model or Packed(), *args, dynamic=dynamic)
    view = GraphView(gm)
    sites = find_attention(view)
    _, inference = infer_grids(trace_dims(view), sites, declared, values(inputs))
    return [inference.classify(site) for site in sites]


def tokens(count: int = VIDEO, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, DIM)


@pytest.mark.parametrize(
    ("table", "before", "after"),
    [
        (ids(), 0, 0),
        (table(ids()), 0, 0),
        (table(torch.cat([torch.zeros(TEXT, 3), ids()])), TEXT, 0),
        (torch.cat([ids(start=7), torch.zeros(TEXT, 3)]), 0, TEXT),
        (
            torch.cat([torch.arange(2)[:, None].expand(-1, 3), ids(start=2), torch.zeros(3, 3)]),
            2,
            3,
        ),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_segments_of_a_token_axis(table, before, after, dynamic):
    (found,) = answers((tokens(len(table)), table), dynamic=dynamic)
    assert isinstance(found, VideoAttention)
    assert found.grid.shape == GRID
    assert found.grid.basis == "hinted by values of input table"
    sizes = [("context", before)] * bool(before) + [("video", VIDEO)]
    assert found.tokens.segments == (*sizes, *[("context", after)] * bool(after))


def test_a_slice_of_the_positions():
    """Cosmos 3: the video's queries are rows 5.. of a packed sequence, and ask all of its rows."""

    class Sliced(Packed):
        def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
            turn = self.proj(positions.float())
            q = heads(self.q(tokens[:, TEXT:])) * turn[TEXT:]
            return joined(sdpa(q, heads(self.k(tokens)) * turn, heads(self.v(tokens))))

    positions = torch.cat([torch.arange(TEXT)[:, None].expand(-1, 3), ids(start=TEXT)])
    (found,) = answers((tokens(len(positions)), positions), Sliced())
    assert isinstance(found, VideoAttention)
    assert found.grid.basis == "hinted by values of input positions"
    assert found.tokens.segments == (("keys", TEXT), ("video", VIDEO))


def test_inputs_that_agree_are_read_and_the_narrowest_is_checked():
    (found,) = answers((tokens(), ids(), table(ids())))
    assert found.grid.hint.name == "table"
    assert found.grid.hint.positions.increasing


def test_inputs_that_disagree_are_both_named():
    (answer,) = answers((tokens(), ids(), table(ids(TURNED))))
    assert isinstance(answer, Refusal)
    assert "values of inputs table and second say different grids, 3x4x6 and 3x6x4" in answer.reason
    assert "options={'grid': (frames, rows, cols)}" in answer.hint
    (found,) = answers((tokens(), ids(), table(ids(TURNED))), declared=GRID)
    assert found.grid.basis == "declared by option grid"


def test_positions_of_a_video_or_of_references():
    positions = ids() * torch.tensor([10, 16, 16])
    (answer,) = answers((tokens(), positions))
    assert isinstance(answer, Refusal)
    assert "3x4x6 tokens, which by their numbers may be frames of a video" in answer.reason
    assert answer.hint == "if they are a video, pass options={'grid': (frames, rows, cols)}"
    (found,) = answers((tokens(), positions), declared=GRID)
    assert found.grid.basis == "declared by option grid"


def on_meta(inputs: list[Any]) -> list[Any]:
    return [x.to("meta") if isinstance(x, Tensor) else x for x in inputs]


def fake(inputs: list[Any]) -> list[Any]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs]


@pytest.mark.parametrize("values", [on_meta, fake])
def test_tensors_without_values(values):
    (answer,) = answers((tokens(), ids()), values=values)
    assert isinstance(answer, Refusal)
    assert "the inputs, whose values might (table, for example), have none here" in answer.reason
    assert "use tensors that are neither fake nor on meta" in answer.hint


def test_values_of_no_grid():
    for other in (torch.randn(VIDEO, 16), torch.zeros(VIDEO, 3), ids((1, 1, VIDEO))):
        (answer,) = answers((tokens(), other))
        assert isinstance(answer, Refusal)
        assert "nothing in this graph gives its frames" in answer.reason


def test_a_number_of_tokens_that_must_stay_dynamic():
    """A guard on it would raise: there is one graph for all numbers, and so no hint that holds for all."""
    video, positions = tokens(), ids()
    torch._dynamo.mark_dynamic(video, 1)
    torch._dynamo.mark_dynamic(positions, 0)
    (answer,) = answers((video, positions), dynamic=None)
    assert isinstance(answer, Refusal)
    assert "has the values of 3x4x6, but the number of tokens stays symbolic" in answer.reason


def test_a_proved_grid_beats_a_hint():
    class Proved(SmallDiT):
        def forward(self, latent: Tensor, places: Tensor) -> Tensor:
            x = self.embed3(latent).flatten(2).transpose(1, 2)
            q, k, v = heads(self.qkv(x)).chunk(3, -1)
            turn = (places.float() @ torch.ones(3, 1)).cos()
            return joined(sdpa(q * turn, k * turn, v))

    latent = torch.randn(2, 4, T, 2 * H, 2 * W)
    gm, inputs = capture_with_inputs(Proved(), latent, ids(TURNED))
    edited, report = rewrite(gm, inputs, Settings.resolve(OPTIONS)[0])
    (site,) = report.replaced
    assert (site.grid, site.evidence) == (GRID, "proved by conv3d patch embed")
    assert not any(canonical_name(node) == "isclose" for node in edited.graph.nodes)
