"""The whole backend, inductor included: a training step of Wan and a denoising step of HunyuanVideo.

Inductor compiles each of these for tens of seconds, so all else is tested without it.
"""

from __future__ import annotations

import pytest
import torch

import sta_compile
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES, Case
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.test_gradients import check, gradients

GRID = (5, 9, 11)
OPTIONS = {
    "tile": (1, 2, 2),
    "window": (3, 5, 5),
    "min_tokens": 0,
    "noise": "0..1000",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:sta. .* self-attentions over 5x9x11"),
]


def oracle(case: Case, dense: tuple[bool, bool]) -> Oracle:
    (report,) = sta_compile.reports()
    assert [site.name for site in report.replaced] == list(case.sites)
    site = report.replaced[0]
    assert (site.tiles, site.window, site.kernel) == ((5, 5, 6), (3, 3, 3), "reference")
    mask = window_mask(site.grid, site.tiles, site.window)
    return Oracle(case.model, case.sites, mask, dense=dense)


def test_a_training_step_with_checkpoints():
    family = FAMILIES["wan"]
    case = family.case(2, GRID, layers=1)
    inputs = case.at(family.noisy, family.clean)
    case.model.train()
    case.model.enable_gradient_checkpointing()
    compiled = torch.compile(case.model, backend="sta", fullgraph=True, options=OPTIONS)
    found = gradients(case, compiled, inputs)
    case.model.disable_gradient_checkpointing()
    with oracle(case, (True, False)):
        expected = gradients(case, case.model, inputs)
    check(found, expected)


@torch.no_grad()
def test_a_denoising_step():
    """Text of two lengths; then other timesteps, which compile nothing again."""
    family = FAMILIES["hunyuan"]
    case = family.case(2, GRID, layers=1)
    compiled = torch.compile(case.model, backend="sta", fullgraph=True, options=OPTIONS)
    for levels, dense in (
        ((family.noisy, family.clean), (True, False)),
        ((family.clean, family.clean), (False, False)),
        ((family.noisy, family.noisy), (True, True)),
    ):
        inputs = case.at(*levels)
        found = compiled(**inputs)[0]
        with oracle(case, dense):
            expected = case.model(**inputs)[0]
        assert relative_error(found, expected) < 1e-4
