"""Tokens that are moved before a graph break, or by code that runs between graphs: no block windows them by their number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sta_compile
from sta_compile.analysis.moved_tokens import MOVED
from sta_compile.analysis.told_axes import REASONS, UNSEEN
from sta_compile.ir.known_tokens import Doubt
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import randomize
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.test_breaks_before_blocks import OPTIONS, Model
from tests.end_to_end.tiny import CHANNELS, Block, sdpa

GRID = (3, 4, 4)  # rows and columns swapped, or rows rolled, have the same sizes
TOKENS = 48
ORDER = REASONS[Doubt.ORDER].reason
pytestmark = pytest.mark.usefixtures("stages_only")


class Moves(Model):
    """move: from the latent, by code of the forward. later: before the second block. Both are undone after the blocks."""

    def move(self, latent: Tensor) -> Tensor:
        return latent

    back = move

    def later(self, x: Tensor) -> Tensor:
        return x

    def forward(self, latent: Tensor) -> Tensor:
        x = self.patchify(self.move(latent)).flatten(2).transpose(1, 2)
        for layer, block in enumerate(self.blocks):
            x = self.later(x) if layer else x
            self.before(x)
            x = block(x)
        return self.back(self.out(x).transpose(1, 2).unflatten(2, GRID))


class Rolls(Moves):
    def move(self, latent: Tensor) -> Tensor:
        return latent.roll((1, 1), (3, 4))

    def back(self, latent: Tensor) -> Tensor:
        return latent.roll((-1, -1), (3, 4))


class Flips(Moves):
    def move(self, latent: Tensor) -> Tensor:
        return latent.flip(2)

    back = move


class Hidden:
    """The same in a function that no graph holds: noted from the second call on, where a branch on data breaks the graph."""

    def before(self, x: Tensor) -> None:
        if x.abs().mean().item() > 1e9:
            raise ValueError


class RollsHidden(Hidden, Rolls):
    pass


def exact_reasons(model: Model, calls: int = 2) -> set[str]:
    """Why nothing is replaced; the output is eager's."""
    sta_compile.reset_reports()
    sta_compile.compile(model, **OPTIONS)
    latent = torch.randn(2, CHANNELS, *GRID)
    for _ in range(calls):
        found = model(latent)
    reports = sta_compile.reports()
    assert not any(report.replaced for report in reports)
    assert torch.equal(found, sta_compile.restore(model)(latent))
    return {site.reason for report in reports for site in report.refused}


@pytest.mark.parametrize("kind", [Rolls, Flips, RollsHidden])
def test_moved_before_the_break(kind):
    assert MOVED.reason in exact_reasons(kind())


class InAHelper(Moves):
    """`fw` is compiled as a graph of its own, which sees neither the latent nor a block."""

    def forward(self, latent: Tensor) -> Tensor:
        x = self.fw(self.patchify(latent).flatten(2).transpose(1, 2))
        for block in self.blocks:
            self.before(x)
            x = block(x)
        return self.out(self.bw(x)).transpose(1, 2).unflatten(2, GRID)


def rolled(x: Tensor) -> Tensor:
    return x.unflatten(1, GRID).roll(1, 2).flatten(1, 3)


def rolled_back(x: Tensor) -> Tensor:
    return x.unflatten(1, GRID).roll(-1, 2).flatten(1, 3)


def swapped(x: Tensor) -> Tensor:
    return x.unflatten(1, GRID).transpose(2, 3).flatten(1, 3)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(("fw", "bw"), [(rolled, rolled_back), (swapped, swapped)])
def test_moved_by_a_helper_function(fw, bw, hidden):
    bases = (Hidden, InAHelper) if hidden else (InAHelper,)
    kind = type("Helped", bases, {"fw": staticmethod(fw), "bw": staticmethod(bw)})
    reasons = exact_reasons(kind())
    assert MOVED.reason in reasons or ORDER in reasons or all("is not known" in r for r in reasons)


class RollsLater(Moves):
    @torch.compiler.disable
    def later(self, x: Tensor) -> Tensor:
        return rolled(x)


class SwapsLater(Moves):
    def later(self, x: Tensor) -> Tensor:
        return swapped(x)


class WritesLater(Moves):
    @torch.compiler.disable
    def later(self, x: Tensor) -> Tensor:
        x.copy_(rolled(x))
        return x


class GivesOtherData(Moves):
    @torch.compiler.disable
    def later(self, x: Tensor) -> Tensor:
        x.data = rolled(x)
        return x


class AddsLater(Moves):
    @torch.compiler.disable
    def later(self, x: Tensor) -> Tensor:
        return x * 2 + 1


@pytest.mark.parametrize("kind", [RollsLater, SwapsLater, WritesLater, GivesOtherData, AddsLater])
@torch.no_grad()
def test_between_blocks(kind):
    """The first block has its window in each call; the second one from the next call on, if what it gets was not moved."""
    model = kind()
    sta_compile.reset_reports()
    sta_compile.compile(model, **OPTIONS)
    latent = torch.randn(2, CHANNELS, *GRID)
    first = model(latent)
    reports = sta_compile.reports()
    (site,) = [site for report in reports for site in report.replaced]
    assert {s.reason for r in reports for s in r.refused} == {UNSEEN.reason}
    assert all("from the next call on" in s.hint for r in reports for s in r.refused)
    found = model(latent)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(model(latent), found)
    plain = sta_compile.restore(model)
    mask = window_mask(GRID, site.tiles, site.window)
    outputs = []
    for sites in (["blocks.0.attn"], plain.sites if kind is AddsLater else ["blocks.0.attn"]):
        with Oracle(plain, sites, mask):
            outputs.append(plain(latent))
    assert relative_error(first, outputs[0]) < 1e-5
    assert relative_error(found, outputs[1]) < 1e-5


class WithTable(Block):
    """Tokens are given their positions by a table that another graph makes."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + self.attn(self.norm(x) * table)


class InTwoGraphs(WithTable):
    """As where a cache's hook runs around the attention: a graph without any makes what it gets."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = self.norm(x)
        torch._dynamo.graph_break()
        return x + self.attn(y * table)


class WithRope(Block):
    """Tokens are turned by tables whose values show a grid by themselves."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        return x + self.attn(self.norm(x), mask=(cos, sin))


def turned(q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = tables

    def turn(x: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    return F.scaled_dot_product_attention(turn(q), turn(k), v)


def angles(grid: tuple[int, int, int], width: int) -> Tensor:
    """[tokens, width]"""
    axes = torch.meshgrid(*(torch.arange(n).float() for n in grid), indexing="ij")
    places = torch.stack(axes, -1).flatten(0, 2)
    each = [places[:, i : i + 1] * torch.linspace(0.1, 1, width // 4) for i in (0, 1, 2, 2)]
    return torch.cat(each, -1)


class Tables(Moves):
    """later: before the second of three blocks."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.rope = block is WithRope
        attend = turned if self.rope else sdpa
        kwargs = {"attend": attend, "heads": 2, "head_dim": 8, "kv_heads": 2}
        self.blocks = nn.ModuleList(block(16, **kwargs) for _ in range(3))
        randomize(self)

    def forward(self, latent: Tensor) -> Tensor:
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        table = [angles(GRID, x.shape[-1]).cos()]
        if self.rope:
            turns = angles(GRID, 4)
            table = [turns.cos(), turns.sin()]
        for layer, block in enumerate(self.blocks):
            x = self.later(x) if layer == 1 else x
            self.before(x)
            x = block(x, *table)
        return self.out(x).transpose(1, 2).unflatten(2, GRID)


class PutTogetherLater(Moves):
    """By a graph that gets pieces of which nobody knows where they stood."""

    def later(self, x: Tensor) -> Tensor:
        first, last = x.chunk(2, 1)
        torch._dynamo.graph_break()
        return torch.cat([last, first], 1)


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        *((kind, block) for kind in (RollsLater, AddsLater) for block in (WithTable, InTwoGraphs)),
        *((kind, WithRope) for kind in (RollsLater, AddsLater, SwapsLater, PutTogetherLater)),
    ],
)
@torch.no_grad()
def test_tables_of_positions_do_not_stand_for_the_tokens(kind, block):
    """Nor do the tokens that leave a block which was in doubt."""
    model = type("Kind", (kind, Tables), {})(block)
    sta_compile.reset_reports()
    sta_compile.compile(model, **OPTIONS)
    latent = torch.randn(2, CHANNELS, *GRID)
    outputs = [model(latent) for _ in range(3)]
    site = next(site for report in sta_compile.reports() for site in report.replaced)
    plain = sta_compile.restore(model)
    later = plain.sites if kind is AddsLater else ["blocks.0.attn"]
    for found, sites in zip(outputs, (["blocks.0.attn"], later, later), strict=True):
        with Oracle(plain, sites, window_mask(GRID, site.tiles, site.window)):
            assert relative_error(found, plain(latent)) < 1e-5
