"""`torch.export` and the stages: a program is edited, stays a valid ATen program, and equals the masked model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.export import ExportedProgram

from sta_compile import StaError, reports, reset_reports, rewrite
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES, Case
from tests.end_to_end.oracle import Oracle, window_mask

GRID = (3, 6, 8)
OPTIONS = {"window": (1, 3, 3), "tile": (1, 2, 2), "min_tokens": 0}


@pytest.fixture(autouse=True)
def no_reports_are_left() -> Iterator[None]:
    yield
    reset_reports()


def export(name: str) -> tuple[Case, ExportedProgram]:
    case = FAMILIES[name].case(1, GRID)
    return case, torch.export.export(case.model, (), case.inputs, strict=False)


@torch.no_grad()
@pytest.mark.parametrize("name", ["wan", "cogvideox_5b"])
def test_a_program_equals_the_masked_model(name: str) -> None:
    case, program = export(name)
    before = str(program.graph)
    edited = rewrite(program, OPTIONS, dense_above=None)
    assert str(program.graph) == before
    report = reports()[-1]
    assert tuple(site.name for site in report.replaced) == case.sites
    assert sum(node.target == torch.ops.sta.attention.default for node in edited.graph.nodes) == 2
    assert {node.op for node in edited.graph.nodes} <= {"placeholder", "call_function", "output"}
    site = report.replaced[0]
    mask = window_mask(site.grid, site.tiles, site.window)
    with Oracle(case.model, case.sites, mask, text_first=case.text_first):
        (expected,) = case.model(**case.inputs)
    assert relative_error(edited.module()(**case.inputs)[0], expected) < 1e-5


@torch.no_grad()
def test_noisy_steps_stay_dense() -> None:
    case, program = export("wan")
    edited = rewrite(program, OPTIONS, noise="0..1000")
    noisy, clean = case.at(990), case.at(500)
    assert relative_error(edited.module()(**noisy)[0], case.model(**noisy)[0]) < 1e-5
    assert relative_error(edited.module()(**clean)[0], case.model(**clean)[0]) > 1e-3


def test_what_belongs_to_inductor_is_refused() -> None:
    with torch.no_grad():
        _, program = export("wan")
    with pytest.raises(StaError, match="inductor_configs"):
        rewrite(program, {"triton.cudagraphs": True})
    with pytest.raises(StaError, match="window"):
        rewrite(program, windw="full")


class Nothing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_a_program_without_attention_is_given_back() -> None:
    program = torch.export.export(Nothing(), (torch.randn(3),))
    assert rewrite(program) is program
