"""Graph breaks at the start of the loop over the blocks: Dynamo gives up the forward, and blocks are compiled alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import sta_compile
from sta_compile.analysis.hints import TELL
from sta_compile.analysis.moved_tokens import MOVED
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo

GRID = (3, 4, 5)
SHUFFLED = torch.arange(60) // 2 + torch.arange(60) % 2 * 30
OPTIONS = {**SPARSE, "min_tokens": 0, "dense_above": None}
pytestmark = pytest.mark.usefixtures("stages_only")


class Model(TinyVideo):
    """start, end: ahead of the patch embed and in the loop before the first block. before: ahead of each block."""

    def __init__(self) -> None:
        super().__init__(layers=2)

    def before(self, x: Tensor) -> None:
        torch._dynamo.graph_break()

    def start(self, latent: Tensor) -> Tensor:
        return latent

    def end(self, x: Tensor) -> Tensor:
        return x

    def forward(self, latent: Tensor) -> Tensor:
        x = self.patchify(self.start(latent)).flatten(2).transpose(1, 2)
        for layer, block in enumerate(self.blocks):
            x = self.end(x) if layer == 0 else x
            self.before(x)
            x = block(x)
        frames, rows, cols = latent.shape[2:]
        return self.out(x).reshape(-1, frames, rows, cols, CHANNELS).permute(0, 4, 1, 2, 3)


class Says(Model):
    def start(self, latent: Tensor) -> Tensor:
        print("latent", latent.shape)
        return super().start(latent)

    def before(self, x: Tensor) -> None:
        print("block")


class Branches(Model):
    def before(self, x: Tensor) -> None:
        if x.abs().mean().item() > 1e9:
            raise ValueError


class Hides(Model):
    @torch.compiler.disable
    def end(self, x: Tensor) -> Tensor:
        x += 1
        return x


class Permutes(Model):
    """Tokens in an order that is no raster."""

    @torch.compiler.disable
    def end(self, x: Tensor) -> Tensor:
        return x[:, SHUFFLED]


class Writes(Model):
    """The same, written into a view of the tokens."""

    @torch.compiler.disable
    def end(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        x[:, :].copy_(x[:, SHUFFLED])
        return x


def reports_of(model: Model, calls: int, **options: object) -> list[sta_compile.Report]:
    sta_compile.reset_reports()
    sta_compile.compile(model, **{**OPTIONS, **options})
    latent = torch.randn(2, CHANNELS, *GRID)
    for _ in range(calls):
        model(latent)
    return sta_compile.reports()


def error_of(model: Model) -> float:
    plain = copy.copy(model)
    site = next(r for r in reversed(sta_compile.reports()) if r.replaced).replaced[0]
    latent = torch.randn(2, CHANNELS, *GRID)
    found = model(latent)
    with Oracle(plain, plain.sites, window_mask(site.grid, site.tiles, site.window)):
        return relative_error(found, plain(latent))


@pytest.mark.parametrize("kind", [Model, Says])
def test_what_changes_nothing_hides_nothing(kind):
    model = kind()
    replaced = [site for report in reports_of(model, calls=1) for site in report.replaced]
    assert {site.grid for site in replaced} == {GRID}
    assert error_of(model) < 1e-5


@pytest.mark.parametrize("kind", [Branches, Hides])
def test_what_data_decides_is_noted_while_it_runs(kind):
    """The first call is exact, and says where the graph breaks; from the second on blocks have the grid."""
    model = kind()
    first = reports_of(model, calls=1)
    refused = [site for report in first for site in report.refused]
    assert not any(report.replaced for report in first)
    assert all(f"{__file__}:" in site.reason for site in refused)
    assert all("from the next call on" in site.hint for site in refused)
    latent = torch.randn(2, CHANNELS, *GRID)
    model(latent)
    replaced = [site for report in sta_compile.reports() for site in report.replaced]
    assert {site.grid for site in replaced} == {GRID}
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert error_of(model) < 1e-5
    assert relative_error(model(latent), sta_compile.restore(model)(latent)) > 1e-3


@pytest.mark.parametrize("kind", [Permutes, Writes])
def test_tokens_in_another_order_stay_exact(kind):
    model = kind()
    reports = reports_of(model, calls=3)
    assert not any(report.replaced for report in reports)
    assert any("what ran before the blocks" in s.reason for r in reports for s in r.refused) or (
        kind is Permutes and any(MOVED.reason == s.reason for r in reports for s in r.refused)
    )
    latent = torch.randn(2, CHANNELS, *GRID)
    found = model(latent)
    assert torch.equal(found, sta_compile.restore(model)(latent))


def test_shapes_may_change_while_watched():
    model = Hides()
    reports_of(model, calls=2)
    for grid in ((3, 5, 4), (2, 6, 6), GRID):
        model(torch.randn(1, CHANNELS, *grid))
    grids = [report.replaced[0].grid for report in sta_compile.reports() if report.replaced]
    assert {(3, 5, 4), GRID} <= set(grids)
    assert error_of(model) < 1e-5


class ByForward(Branches):
    """Its blocks are not called as modules."""

    def forward(self, latent: Tensor) -> Tensor:
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        for block in self.blocks:
            self.before(x)
            x = type(block).forward(block, x)
        return self.out(x).transpose(1, 2).unflatten(2, latent.shape[2:])


def test_what_stands_in_for_a_block_is_no_place_in_the_model():
    refused = [site for report in reports_of(ByForward(), calls=3) for site in report.refused]
    assert refused
    assert not any("prefix.py" in site.reason for site in refused)
    assert all("where blocks are called as modules" in site.hint for site in refused)


class Packed(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            self.before(tokens)
            tokens = block(tokens)
        return self.out(tokens)


def test_advice_that_was_followed_is_not_given_again():
    sta_compile.reset_reports()
    model = sta_compile.compile(Packed(), **OPTIONS)
    model(torch.randn(2, 60, 16))
    hints = {site.hint for report in sta_compile.reports() for site in report.refused}
    assert hints == {TELL}
