"""What people use beside compilation: sites are replaced, outputs right, weights keep their names, nothing compiles twice.

A cell prepares an eager model first. No GPU: offloading "onloads" to the CPU, which runs the same hooks.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sta_compile
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES
from tests.end_to_end.tiny import SPARSE

GRID = (3, 6, 8)
OPTIONS = {**SPARSE, "min_tokens": 0, "noise": "0..1000"}
pytestmark = pytest.mark.usefixtures("stages_only")


def _plain(model: nn.Module) -> None:
    pass


def _group_offload(model: nn.Module) -> None:
    cpu = torch.device("cpu")
    model.enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=1)


CELLS = {"plain": _plain, "group offload by block": _group_offload}


def run(model: nn.Module, inputs: dict) -> torch.Tensor:
    return model(**inputs)[0]


@pytest.mark.parametrize("name", CELLS)
def test_beside(name):
    case = FAMILIES["wan"].case(1, GRID)
    model = case.model
    CELLS[name](model)
    names = list(model.state_dict())
    exact = run(model, case.inputs)
    sta_compile.compile(model, **{**OPTIONS, "window": "full"})
    assert relative_error(run(model, case.inputs), exact) < 1e-5
    sta_compile.compile(model, **OPTIONS)
    sparse = run(model, case.inputs)
    assert relative_error(sparse, exact) > 1e-3
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert relative_error(run(model, case.at(980.0)), run(model, case.at(980.0))) == 0
        assert relative_error(run(model, case.inputs), sparse) < 1e-6
    assert any(report.replaced for report in sta_compile.reports())
    assert list(model.state_dict()) == names
