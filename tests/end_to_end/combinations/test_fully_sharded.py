"""FSDP2 in two processes: each holds half of every weight, and blocks are gathered and compiled one by one."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.end_to_end.combinations.two_processes import in_two_processes

GRID = (3, 6, 8)
OPTIONS = {"window": (1, 3, 3), "tile": (1, 2, 2), "min_tokens": 0, "noise": "0..1000"}


def run_sharded() -> dict[str, Any]:
    """Two samples, a noisy one, which is dense, and one that is not, of another video in each process."""
    import sta_compile
    from tests.end_to_end.compiled import relative_error
    from tests.end_to_end.models import FAMILIES
    from tests.end_to_end.oracle import Oracle, window_mask

    case = FAMILIES["wan"].case(2, GRID)
    twin = copy.deepcopy(case.model)
    torch.manual_seed(dist.get_rank())
    inputs = case.at(980.0, 400.0)
    inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for block in case.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(case.model, mesh=mesh)
    names = list(case.model.state_dict())

    errors = {}
    for window in ("full", OPTIONS["window"]):
        sta_compile.reset_reports()
        sta_compile.compile(case.model, **{**OPTIONS, "window": window})
        for _ in range(2):
            (found,) = case.model(**inputs)
        replaced = [site for report in sta_compile.reports() for site in report.replaced]
        mask = window_mask(GRID, replaced[0].tiles, replaced[0].window)
        with Oracle(twin, case.sites, mask, dense=[True, False]):
            (expected,) = twin(**inputs)
        errors[str(window)] = relative_error(found, expected)
        if window == "full":
            errors["eager"] = relative_error(found, twin(**inputs)[0])
    weights = [p for block in case.model.blocks for p in block.parameters()]
    return {
        "errors": errors,
        "grids": [list(site.grid) for site in replaced],
        "names": list(case.model.state_dict()) == names,
        "sharded": all(isinstance(p, DTensor) for p in weights),
    }


def test_two_processes() -> None:
    for found in in_two_processes(__name__, "run_sharded"):
        assert max(found["errors"].values()) < 1e-5
        assert found["grids"]
        assert all(tuple(grid) == GRID for grid in found["grids"])
        assert found["names"]
        assert found["sharded"]
