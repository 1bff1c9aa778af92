"""Caches over denoising steps before and after the compile: our operator runs, and what is left out is left out rightly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import sta_compile
from tests.end_to_end.combinations.step_caches import CACHES, STEPS, run
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES
from tests.end_to_end.oracle import Oracle, window_mask

GRID = (3, 6, 8)
OPTIONS = {"window": (1, 3, 3), "tile": (1, 2, 2), "min_tokens": 0, "noise": "0..1000"}
LAYERS = 3

pytestmark = pytest.mark.usefixtures("stages_only")


def hooked(model: nn.Module) -> list[Any]:
    """The forwards that hooks of diffusers call."""
    registries = [module.__dict__.get("_diffusers_hook") for module in model.modules()]
    references = [ref for registry in registries if registry for ref in registry._fn_refs]
    return [(ref.forward, ref.original_forward) for ref in references]


@pytest.mark.parametrize(
    ("cache", "order", "family"),
    [(cache, order, "wan") for cache in CACHES for order in ("before the compile", "after it")]
    + [("FirstBlockCache", "after a call", "wan")]
    + [("FirstBlockCache", "before the compile", "hunyuan")],
)
def test_a_cache(cache: str, order: str, family: str) -> None:
    """The same steps are left out as by the masked eager model. A second video compiles nothing."""
    case = FAMILIES[family].case(2, GRID, layers=LAYERS)
    model, twin = case.model, copy.deepcopy(case.model)
    now, of_twin = [0.0], [0.0]
    CACHES[cache](twin, lambda: of_twin[0])
    names = sorted(model.state_dict())
    if order == "before the compile":
        CACHES[cache](model, lambda: now[0])
    sta_compile.compile(model, **OPTIONS)
    if order == "after a call":
        model(**case.inputs)
        sta_compile.reset_reports()
    if order != "before the compile":
        CACHES[cache](model, lambda: now[0])

    before = hooked(model)
    found = [run(model, case.at(level), level, now) for level in STEPS]
    sites = [site for report in sta_compile.reports() for site in report.replaced]
    assert sites
    assert {site.grid for site in sites} == {GRID}
    mask = window_mask(GRID, sites[0].tiles, sites[0].window)
    calls = 0
    for level, out in zip(STEPS, found, strict=True):
        with Oracle(twin, case.sites, mask, dense=[level > 950]) as oracle:
            expected = run(twin, case.at(level), level, of_twin)
        calls += oracle.calls
        # TaylorSeer takes differences of what is nearly equal.
        assert relative_error(out, expected) < 1e-4
    assert 0 < calls < len(case.sites) * len(STEPS)

    model._reset_stateful_cache()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for level in STEPS:
            run(model, case.at(level), level, now)
    # cache-dit swaps the blocks for the time of a call, which moves them to the end of the names.
    assert list(model.state_dict()) == list(twin.state_dict())
    assert sorted(model.state_dict()) == names
    assert hooked(model) == before


class Replayed:
    """A graph whose every run writes its outputs where the one before did, as a replay of a CUDA graph does."""

    def __init__(self, gm: Any, example_inputs: Any, **_: Any) -> None:
        self.run = gm.forward
        self.outputs: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        new = self.run(*args)
        if not self.outputs:
            self.outputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in new]
        for old, x in zip(self.outputs, new, strict=True):
            if isinstance(x, torch.Tensor):
                old.copy_(x)
        return tuple(self.outputs)


@pytest.mark.parametrize("cache", ["FirstBlockCache", "TeaCache"])
def test_what_a_cache_keeps_is_not_overwritten(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under CUDA graphs, which a CPU has not: what is computed is as without them."""
    case = FAMILIES["wan"].case(1, GRID, layers=LAYERS)
    found: list[list[Any]] = []
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        model, now = copy.deepcopy(case.model), [0.0]
        CACHES[cache](model, lambda now=now: now[0])
        sta_compile.compile(model, mode=mode, **OPTIONS)
        found.append([run(model, case.at(s), s, now).clone() for s in (*STEPS, *STEPS)])
        monkeypatch.setattr("sta_compile._torch.compile_with_inductor", Replayed)
    for plain, replayed in zip(*found, strict=True):
        assert torch.equal(plain, replayed)
