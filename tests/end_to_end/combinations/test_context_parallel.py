"""Context parallelism: what is sharded stays exact, and is said to be sharded."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sta_compile.analysis.other_processes import SHARDED
from tests.end_to_end.middle import Middle, N, latent, names, variants_of

ROOT = Path(__file__).parents[3]
OPTIONS = {"window": (1, 3, 3), "tile": (1, 2, 2), "min_tokens": 0, "dense_above": None}


def attend_in_two_processes(rank: int) -> None:
    """One of two gloo processes: a Wan under diffusers' ContextParallelConfig, compiled; prints what it found."""
    from diffusers import ContextParallelConfig

    import sta_compile
    from sta_compile import _torch
    from tests.end_to_end.compiled import relative_error
    from tests.end_to_end.models import FAMILIES

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.accelerator.device_count = lambda: 1  # diffusers counts devices, of which a CPU has none
    _torch.compile_with_inductor = lambda gm, inputs, **_: gm.forward
    case = FAMILIES["wan"].case(1, (4, 6, 8), layers=2)
    with torch.no_grad():
        (exact,) = case.model(**case.inputs)
        case.model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
        sta_compile.compile(case.model, **OPTIONS)
        (found,) = case.model(**case.inputs)
    reports = sta_compile.reports()
    print(
        json.dumps(
            {
                "error": relative_error(found, exact),
                "replaced": [site.name for report in reports for site in report.replaced],
                "refused": [[s.name, s.reason] for report in reports for s in report.refused],
            }
        )
    )
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    module = "tests.end_to_end.combinations.test_context_parallel"
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", f"import {module} as m; m.{call}"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for call in ("attend_in_two_processes(0)", "attend_in_two_processes(1)")
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    for output in outputs:
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
        assert found["error"] < 1e-5
        assert not found["replaced"]
        assert len(found["refused"]) == 2
        assert {reason for _, reason in found["refused"]} == {SHARDED.reason}


@pytest.fixture
def group() -> Any:
    """Two processes of which there is one: what is captured is real, and nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


def gathered(x: Tensor, dim: int) -> Tensor:
    import torch.distributed._functional_collectives as functional

    return functional.all_gather_tensor(x.contiguous(), dim, group=dist.group.WORLD)


def ring(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """The first round of a ring sees the process's own keys, and the next those of the other one."""
    keys, values = gathered(k, 2), gathered(v, 2)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v) + attend(q, keys[:, :, N:], values[:, :, N:])


def summed(model: Any, x: Tensor) -> Tensor:
    """Tensor parallelism: sums over processes keep each token where it is."""
    import torch.distributed._functional_collectives as functional

    for block in model.blocks:
        x = functional.all_reduce(block(x), "sum", group=dist.group.WORLD)
    return x


def gathered_samples(model: Any, x: Tensor) -> Tensor:
    """One process has the prompt and the other has none: whole videos are gathered behind the blocks."""
    for block in model.blocks:
        x = block(x)
    return gathered(x, 0)[: x.shape[0]]


@torch.no_grad()
def test_a_ring_is_sharded(group: Any) -> None:
    report = variants_of(Middle(attend=ring), latent=latent()).report
    assert not report.replaced
    assert {site.reason for site in report.refused} == {SHARDED.reason}


@pytest.mark.parametrize("middle", [summed, gathered_samples])
@torch.no_grad()
def test_whole_videos_are_not_sharded(group: Any, middle: Any) -> None:
    model = Middle(middle)
    assert names(variants_of(model, latent=latent())) == model.sites
