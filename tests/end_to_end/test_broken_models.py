"""Models that Dynamo does not get as one graph: because they break it themselves, or since a hook on each block does.

Each goes through `sta_compile.compile`, has its attention replaced over the right grid, equals the definition, compiles once
and is what it was after `restore`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import sta_compile
from sta_compile.coverage.row import Built, Size
from sta_compile.coverage.zoo import rows
from sta_compile.regions import repeated_blocks
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import SPARSE

OPTIONS = {**SPARSE, "min_tokens": 0, "dense_above": None}
VIDEO, IMAGE = (3, 6, 8), (1, 9, 13)
pytestmark = pytest.mark.usefixtures("stages_only")


def built(name: str, batch: int = 2) -> tuple[Built, tuple[int, int, int]]:
    row = rows(name)[0]
    grid = IMAGE if row.grids[0][0] == 1 else VIDEO
    return row.at(Size(batch, grid, row.layers)), grid


def tensor_of(out: Any) -> Tensor:
    while not isinstance(out, Tensor):
        out = out[0]
    return out


def state(model: nn.Module) -> list[Any]:
    """All that makes the model and its calls what they are: names of weights, forwards, hooks, flags."""
    parts = [
        (name, sorted(module.__dict__.keys() - {"_compiled_call_impl"}), module.training,
         module.__dict__.get("forward"), module._compiled_call_impl,
         dict(module._forward_hooks), dict(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]  # fmt: skip
    config = torch._dynamo.config
    flags = (
        config.capture_dynamic_output_shape_ops,
        config.capture_scalar_outputs,
        config.recompile_limit,
    )
    return [list(model.state_dict()), parts, flags]


@contextmanager
def compiled_and_restored(model: nn.Module) -> Iterator[None]:
    before = state(model)
    sta_compile.compile(model, **OPTIONS)
    yield
    sta_compile.restore(model)
    assert state(model) == before


def check(case: Built, grid: tuple[int, int, int]) -> None:
    exact = tensor_of(case.model(**case.inputs))
    with compiled_and_restored(case.model):
        case.model(**case.inputs)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = tensor_of(case.model(**case.inputs))
        replaced = [site for report in sta_compile.reports() for site in report.replaced]
        assert {site.grid for site in replaced} == {grid}
    site, places = replaced[0], {name: case.place_of(name) for name in case.sites}
    with Oracle(
        case.model, case.sites, window_mask(grid, site.tiles, site.window), places=places
    ) as oracle:
        expected = tensor_of(case.model(**case.inputs))
    assert oracle.calls == len(case.sites)  # of every layer, whatever the number of graphs
    assert relative_error(found, expected) < 1e-5
    assert relative_error(expected, exact) > 1e-3
    assert torch.equal(tensor_of(case.model(**case.inputs)), exact)


# Sizes that depend on data, loops over samples, lists as inputs, tables of sizes, and states of their own. Text that is
# trimmed by its mask is one of them for a single sample.
BREAK = [
    ("HunyuanVideo15Transformer3DModel (T2V)", 2),
    ("Framepack", 1),
    ("Framepack", 2),
    ("Lumina2", 2),
    ("ZImageTransformer2DModel", 2),
    ("WanAnimate2Transformer3DModel (reference pass)", 2),
]


@pytest.mark.parametrize(("name", "batch"), BREAK)
def test_models_that_break(name: str, batch: int) -> None:
    check(*built(name, batch))


# Masks made outside of the blocks, or inside; history, and text joined with the tokens, before the first block.
BLOCKS = [
    "HunyuanVideoTransformer3DModel (I2V, token_replace)", "Framepack", "Lumina2", "ZImageTransformer2DModel",
    "QwenImageTransformer2DModel (padded text)",
]  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_with_a_hook_on_each(name: str) -> None:
    case, grid = built(name)
    for block in repeated_blocks(case.model):
        block.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
    check(case, grid)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One process that shards among itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name", ["WanTransformer3DModel (2.1 T2V)", "CogVideoXTransformer3DModel (2b)"]
)
def test_fully_sharded(name: str, mesh: DeviceMesh) -> None:
    """FSDP2 gathers the weights of a block in a hook that Dynamo may not trace."""
    case, grid = built(name)
    for block in repeated_blocks(case.model):
        fully_shard(block, mesh=mesh)
    fully_shard(case.model, mesh=mesh)
    check(case, grid)
    assert len([report for report in sta_compile.reports() if report.replaced]) <= 2
