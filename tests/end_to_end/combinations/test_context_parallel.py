"""Context parallelism: what is sharded stays exact, and is said to be sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sta_compile.analysis.other_processes import SHARDED
from tests.end_to_end.combinations.two_processes import in_two_processes
from tests.end_to_end.middle import Middle, N, latent, names, variants_of

OPTIONS = {"window": (1, 3, 3), "tile": (1, 2, 2), "min_tokens": 0, "dense_above": None}


def attend() -> dict[str, Any]:
    """A Wan under diffusers' ContextParallelConfig, compiled."""
    from diffusers import ContextParallelConfig

    import sta_compile
    from tests.end_to_end.compiled import relative_error
    from tests.end_to_end.models import FAMILIES

    torch.accelerator.device_count = lambda: 1  # diffusers counts devices, of which a CPU has none
    case = FAMILIES["wan"].case(1, (4, 6, 8), layers=2)
    (exact,) = case.model(**case.inputs)
    case.model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    sta_compile.compile(case.model, **OPTIONS)
    (found,) = case.model(**case.inputs)
    reports = sta_compile.reports()
    return {
        "error": relative_error(found, exact),
        "replaced": [site.name for report in reports for site in report.replaced],
        "refused": [[s.name, s.reason] for report in reports for s in report.refused],
    }


def test_two_processes() -> None:
    for found in in_two_processes(__name__, "attend"):
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


@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="Dynamo of torch 2.11 can't trace this collective"
)
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
