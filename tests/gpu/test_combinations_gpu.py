"""What only a GPU shows of tests/end_to_end/combinations: weights that come on streams, and CUDA graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig

import sta_compile
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES, Case
from tests.end_to_end.oracle import Oracle, window_mask

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:sta. ")]
GRID, TILES, WINDOW = (5, 9, 11), (3, 3, 3), (1, 1, 1)
OPTIONS = {"window": (2, 3, 4), "tile": (2, 3, 4), "min_tokens": 0, "noise": "0..1000"}
STEPS = (990.0, 900.0, 500.0)


def wan() -> tuple[Case, list[dict[str, Any]], list[torch.Tensor]]:
    """A model on the CPU, the inputs of each step on the GPU, and what the definition says of them."""
    torch._dynamo.reset()
    case = FAMILIES["wan"].case(batch=1, grid=GRID, layers=3)
    steps = [
        {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.at(level).items()}
        for level in STEPS
    ]
    mask, expected = window_mask(GRID, TILES, WINDOW).cuda(), []
    case.model.cuda()
    for level, step in zip(STEPS, steps, strict=True):
        with Oracle(case.model, case.sites, mask, dense=[level > 950]):
            expected.append(case.model(**step)[0])
    case.model.cpu()
    return case, steps, expected


def check(case: Case, steps: list[dict[str, Any]], expected: list[torch.Tensor]) -> None:
    names = list(case.model.state_dict())
    for step, wanted in zip(steps, expected, strict=True):
        torch.compiler.cudagraph_mark_step_begin()
        assert relative_error(case.model(**step)[0], wanted) < 1e-4
    sites = [site for report in sta_compile.reports() for site in report.replaced]
    assert sites
    assert {site.grid for site in sites} == {GRID}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, wanted in zip(steps, expected, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            assert relative_error(case.model(**step)[0], wanted) < 1e-4
    assert list(case.model.state_dict()) == names


@torch.no_grad()
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.parametrize("record", [False, True])
def test_groups_that_come_on_a_stream(kind: str, record: bool) -> None:
    case, steps, expected = wan()
    groups = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    case.model.enable_group_offload(
        torch.device("cuda"), torch.device("cpu"), offload_type=kind, use_stream=True,
        record_stream=record, **groups,
    )  # fmt: skip
    sta_compile.compile(case.model, **OPTIONS)
    check(case, steps, expected)


@torch.no_grad()
def test_reduce_overhead() -> None:
    case, steps, expected = wan()
    case.model.cuda()
    sta_compile.compile(case.model, mode="reduce-overhead", **OPTIONS)
    check(case, steps, expected)


@torch.no_grad()
def test_a_cache_keeps_what_no_replay_overwrites() -> None:
    """FirstBlockCache keeps what a block returned in an earlier step, while CUDA graphs of the same block run again."""
    case, steps, _ = wan()
    found = []
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        model = copy.deepcopy(case.model).cuda()
        model.enable_cache(FirstBlockCacheConfig(threshold=1.0))
        sta_compile.compile(model, mode=mode, **OPTIONS)
        with model.cache_context("cond"):
            found.append([model(**step)[0].clone() for step in steps * 4])
    for plain, replayed in zip(*found, strict=True):
        assert relative_error(replayed, plain) < 1e-6
