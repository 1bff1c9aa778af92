"""One compiled model, many resolutions: each right, none over a recompile limit, none falling to eager."""

from __future__ import annotations

import pytest
import torch

import sta_compile
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES, Triple
from tests.end_to_end.resolutions import OPTIONS, Rewriting, expected
from tests.end_to_end.tiny import CHANNELS, TinyVideo

GRIDS: list[Triple] = [
    *[(5, 9, 11), (5, 11, 9), (6, 9, 11), (7, 8, 10), (3, 5, 7), (9, 6, 5)],
    *[(8, 5, 6), (5, 7, 7), (6, 6, 6), (4, 9, 8), (7, 7, 9), (3, 9, 5)],
]


@pytest.mark.parametrize("name", ["wan"])
def test_twelve_resolutions_in_one_full_graph(name):
    backend = Rewriting()
    model = FAMILIES[name].case(1, GRIDS[0]).model
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for grid in GRIDS:
        case = FAMILIES[name].case(1, grid)
        with torch.no_grad():
            found = compiled(**case.inputs)[0]
        assert (
            relative_error(
                found, expected(model, case.sites, grid, text_first=case.text_first, **case.inputs)
            )
            < 1e-5
        )
        assert len(backend.reports[-1].replaced) == len(case.sites)
    limit = torch._dynamo.config.recompile_limit
    assert len(backend.reports) <= limit
    grids = [report.replaced[0].grid for report in backend.reports]
    assert grids[:-1] == GRIDS[: len(grids) - 1], "grids are specialised while compiles are left"
    assert grids[-1] is None, "the last compile serves every other grid"
    assert len({report.conversions for report in backend.reports}) == 1


@pytest.mark.parametrize("name", ["wan_ti2v", "hunyuan", "cogvideox_5b", "ltx", "allegro"])
def test_grids_known_only_at_run_time(name, monkeypatch):
    monkeypatch.setattr("sta_compile._torch.last_compile_of_frame", lambda: True)
    backend = Rewriting()
    model = FAMILIES[name].case(2, GRIDS[0]).model
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for grid in [(5, 9, 11), (5, 11, 9), (7, 8, 10)]:
        case = FAMILIES[name].case(2, grid)
        with torch.no_grad():
            found = compiled(**case.inputs)[0]
        assert (
            relative_error(
                found, expected(model, case.sites, grid, text_first=case.text_first, **case.inputs)
            )
            < 1e-5
        )
        assert all(report.replaced for report in backend.reports)
    assert len(backend.reports) <= 2


def test_min_tokens_holds_for_grids_known_only_at_run_time(monkeypatch):
    monkeypatch.setattr("sta_compile._torch.last_compile_of_frame", lambda: True)
    backend = Rewriting(min_tokens=400)
    model = TinyVideo()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for grid, exact in (((5, 9, 11), False), ((5, 7, 7), True)):
        latent = torch.randn(1, CHANNELS, *grid)
        with torch.no_grad():
            found, dense = compiled(latent), model(latent)
        if not exact:
            dense = expected(model, model.sites, grid, latent=latent)
        assert relative_error(found, dense) < 1e-5


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_portrait_after_landscape(dynamic):
    """5x9x11 and 5x11x9 have the same number of tokens; a full window would not see them swapped."""
    backend = Rewriting()
    model = TinyVideo(layers=2)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for grid in [(5, 9, 11), (5, 11, 9), (5, 9, 11)]:
        latent = torch.randn(1, CHANNELS, *grid)
        with torch.no_grad():
            found = compiled(latent)
        assert relative_error(found, expected(model, model.sites, grid, latent=latent)) < 1e-5


def test_a_declared_grid_of_another_resolution_does_not_beat_the_proved_one():
    backend = Rewriting(grid=(5, 9, 11))
    model = TinyVideo()
    latent = torch.randn(1, CHANNELS, 5, 11, 9)
    with torch.no_grad():
        found = torch.compile(model, backend=backend, fullgraph=True)(latent)
    assert backend.reports[0].replaced[0].grid == (5, 11, 9)
    assert relative_error(found, expected(model, model.sites, (5, 11, 9), latent=latent)) < 1e-5


def test_blocks_follow_the_grid_that_is_in_force():
    """A block compiled alone sees only 495 tokens; `token_grid` is guarded by its value."""
    model = TinyVideo(layers=2)
    for block in model.blocks:
        block.compile(
            backend="sta",
            fullgraph=True,
            options={k: v for k, v in OPTIONS.items() if k != "grid"},
        )
    for grid in [(5, 9, 11), (5, 11, 9), (5, 9, 11)]:
        latent = torch.randn(1, CHANNELS, *grid)
        with torch.no_grad(), sta_compile.token_grid(*grid):
            found = model(latent)
        plain = TinyVideo(layers=2)
        plain.load_state_dict(model.state_dict())
        assert relative_error(found, expected(plain, plain.sites, grid, latent=latent)) < 1e-5
