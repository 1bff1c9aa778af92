"""`torch.export` and the stages: a program is edited, stays a valid ATen program, and equals the masked model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from sta_compile import StaError, reports, reset_reports, rewrite
from sta_compile.rewriting.fake_values import VALUE
from sta_compile.rewriting.python_indexing import index_in_python
from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.models import FAMILIES, Case, Triple
from tests.end_to_end.oracle import Oracle, window_mask

GRID = (3, 6, 8)
OPTIONS = {"window": (1, 3, 3), "tile": (1, 2, 2), "min_tokens": 0}


@pytest.fixture(autouse=True)
def no_reports_are_left() -> Iterator[None]:
    yield
    reset_reports()


def export(name: str, layers: int = 2) -> tuple[Case, ExportedProgram]:
    case = FAMILIES[name].case(1, GRID, layers=layers)
    return case, torch.export.export(case.model, (), case.inputs, strict=False)


def check(case: Case, found: torch.Tensor, site: Any) -> None:
    mask = window_mask(site.grid, site.tiles, site.window)
    with Oracle(case.model, case.sites, mask, text_first=case.text_first):
        (expected,) = case.model(**case.inputs)
    assert relative_error(found, expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["wan", "cogvideox_5b", "hunyuan", "allegro"])
def test_a_program_equals_the_masked_model(name: str) -> None:
    """Its spellings cost nothing: as many attentions are replaced, with as many conversions, as by torch.compile."""
    case, program = export(name)
    before = str(program.graph)
    edited = rewrite(program, OPTIONS, dense_above=None)
    assert str(program.graph) == before
    report = reports()[-1]
    assert tuple(site.name for site in report.replaced) == case.sites
    found = [n for n in edited.graph.nodes if n.target == torch.ops.sta.attention.default]
    assert len(found) == len(case.sites)
    assert {node.op for node in edited.graph.nodes} <= {"placeholder", "call_function", "output"}
    check(case, edited.module()(**case.inputs)[0], report.replaced[0])
    captured = compile_variants(case.model, case.inputs, {"sta": OPTIONS})["sta"].report
    assert report.conversions == captured.conversions


class Slices(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.slice_scatter(x, x[:, 1:3], 1, 0, 4, 2)
        return torch.slice_scatter(y, y[2:].cos(), -2, start=2)[..., ::3] + x[:, -1:]


def test_slices_are_those_of_python() -> None:
    x = torch.randn(4, 7)
    program = torch.export.export(Slices(), (x,))
    gm = program.graph_module
    for node in gm.graph.nodes:
        node.meta[VALUE] = node.meta.get("val")
    index_in_python(gm)
    gm.recompile()
    assert not any("slice" in str(node.target) for node in gm.graph.nodes)
    assert torch.equal(gm(x)[0], Slices()(x))


@torch.no_grad()
def test_noisy_steps_stay_dense() -> None:
    case, program = export("wan")
    edited = rewrite(program, OPTIONS, noise="0..1000")
    noisy, clean = case.at(990), case.at(500)
    assert relative_error(edited.module()(**noisy)[0], case.model(**noisy)[0]) < 1e-5
    assert relative_error(edited.module()(**clean)[0], case.model(**clean)[0]) > 1e-3


def test_a_report_says_where_a_precision_is_not_used() -> None:
    rewrite(export("wan", 1)[1], OPTIONS, dense_above=None, precision="fp8")
    (site,) = reports()[-1].replaced
    assert site.precision == "native" or "where gradients are recorded" in site.why_native


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


PACKAGED = "hunyuan"  # its attention has masked text and flags of dense samples


def error_of_package(stored: Path, grid: Triple, tiles: Triple, window: Triple) -> None:
    """In a process of its own: runs the package and prints how far it is from the masked model."""
    case = FAMILIES[PACKAGED].case(1, GRID, layers=1)
    package = torch._inductor.aoti_load_package(str(stored))
    with torch.no_grad(), Oracle(case.model, case.sites, window_mask(grid, tiles, window)):
        (expected,) = case.model.forward(**case.inputs)
    print(json.dumps(relative_error(package(**case.inputs)[0], expected)))


@pytest.mark.slow
@torch.no_grad()
def test_a_package_of_aot_inductor_runs_in_another_process(tmp_path: Path) -> None:
    case, program = export(PACKAGED, layers=1)
    edited = rewrite(program, OPTIONS, noise="0..1000")
    assert tuple(site.name for site in reports()[-1].replaced) == case.sites
    site = reports()[-1].replaced[0]
    stored = tmp_path / "model.pt2"
    torch._inductor.aoti_compile_and_package(
        edited,
        package_path=str(stored),
        inductor_configs={"aot_inductor.debug_compile": True},  # half the time of -O3
    )
    arguments = f"Path({str(stored)!r}), {site.grid}, {site.tiles}, {site.window}"
    code = f"from tests.end_to_end.test_exported import *; error_of_package({arguments})"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=Path(__file__).parents[2],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout.splitlines()[-1]) < 1e-4
