"""Offloading leaf by leaf beside compilation: weights move block by block, and `restore` gives the layers their hooks back.

A stream needs a GPU. Its place is taken by an object with the same methods that notes what is asked of it, under the real
groups and hooks of diffusers; nothing is copied, since both places are the CPU.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers.hooks import group_offloading
from torch import nn

import sta_compile
from tests.end_to_end.combinations.offloads import CPU, groups_of_leaves
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES, Case
from tests.end_to_end.oracle import Oracle, window_mask

GRID = (3, 6, 8)
OPTIONS = {"window": (1, 3, 3), "tile": (1, 2, 2), "min_tokens": 0, "dense_above": None}
pytestmark = pytest.mark.usefixtures("stages_only")


def hooks(model: nn.Module) -> list[Any]:
    """All that makes a call of a module do what it does."""
    found: list[Any] = []
    for module in model.modules():
        found += [list(module._forward_pre_hooks.values()), list(module._forward_hooks.values())]
        found += [module.__dict__.get("forward"), module._compiled_call_impl]
        for reference in getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", ()):
            found += [reference.pre_forward, reference.forward, reference.post_forward]
    return found


def check(case: Case) -> None:
    site = next(r for r in sta_compile.reports() if r.replaced).replaced[0]
    found = case.model(**case.inputs)[0]
    compiled, case.model._compiled_call_impl = case.model._compiled_call_impl, None
    mask = window_mask(site.grid, site.tiles, site.window)
    with Oracle(case.model, case.sites, mask, text_first=case.text_first):
        assert relative_error(found, case.model(**case.inputs)[0]) < 1e-5
    case.model._compiled_call_impl = compiled


@pytest.mark.parametrize("name", ["cogvideox_2b", "hunyuan"])
def test_other_models(name: str) -> None:
    """Blocks without weights of their own, blocks that pass two streams on; compiling twice changes nothing."""
    case = FAMILIES[name].case(1, GRID)
    groups_of_leaves(case.model)
    names, before = list(case.model.state_dict()), hooks(case.model)
    exact = case.model(**case.inputs)[0]
    sta_compile.compile(case.model, **OPTIONS)
    sta_compile.compile(case.model, **OPTIONS)
    case.model(**case.inputs)
    replaced = [site for report in sta_compile.reports() for site in report.replaced]
    assert {site.grid for site in replaced} == {GRID}
    with torch._dynamo.config.patch(error_on_recompile=True):
        check(case)
    sta_compile.restore(case.model)
    assert hooks(case.model) == before
    assert list(case.model.state_dict()) == names
    assert torch.equal(case.model(**case.inputs)[0], exact)


class Stream:
    """In place of a CUDA stream, and of the module `torch.cuda`, for diffusers' groups."""

    def __init__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def current_stream(self) -> Stream:
        return self

    @contextmanager
    def stream(self, _: Any) -> Any:
        yield


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """(what, block) of each move of a block's layers together; (what, group) of others."""
    found: list[tuple[str, Any]] = []

    def noted(name: str) -> Any:
        plain = getattr(group_offloading.ModuleGroup, name)

        def move(group: Any) -> None:
            joined = len(group.modules) > 1
            found.append((name, group.offload_leader if joined else group))
            plain(group)

        return torch.compiler.disable(move)

    monkeypatch.setattr(group_offloading, "TorchDeviceBackend", Stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name in ("onload_", "offload_"):
        monkeypatch.setattr(group_offloading.ModuleGroup, name, noted(name))
    return found


def with_stream(model: nn.Module) -> None:
    config = group_offloading.GroupOffloadingConfig(
        CPU, CPU, group_offloading.GroupOffloadingType.LEAF_LEVEL, non_blocking=False, record_stream=False,
        low_cpu_mem_usage=False, stream=Stream(),
    )  # fmt: skip
    group_offloading._apply_group_offloading(model, config)


def test_the_next_block_is_on_its_way(moves: list[tuple[str, Any]]) -> None:
    """From the call on that comes after the first, in which diffusers learns the order of the layers outside of blocks."""
    case = FAMILIES["wan"].case(1, GRID, layers=3)
    blocks = list(case.model.blocks)
    with_stream(case.model)
    sta_compile.compile(case.model, **OPTIONS)
    for _ in range(3):
        case.model(**case.inputs)
    assert any(report.replaced for report in sta_compile.reports())
    moves.clear()
    check(case)
    of_blocks = [(what, blocks.index(leader)) for what, leader in moves if leader in blocks]
    once = [
        ("onload_", 0), ("onload_", 1), ("offload_", 0), ("onload_", 2), ("offload_", 1), ("offload_", 2)
    ]  # fmt: skip
    assert of_blocks == once * 2  # compiled, and by the oracle
    assert not to_q(blocks[0], moves)
    sta_compile.restore(case.model)
    moves.clear()
    case.model(**case.inputs)
    assert set(to_q(blocks[0], moves)) == {"onload_", "offload_"}
    assert not any(leader in blocks for _, leader in moves)


def to_q(block: nn.Module, moves: list[tuple[str, Any]]) -> list[str]:
    """What was done with the weights of one layer alone."""
    group = block.attn1.to_q._diffusers_hook.get_hook("group_offloading").group  # type: ignore[union-attr]
    return [what for what, moved in moves if moved is group]
