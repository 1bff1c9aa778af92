"""Which C++ kernels compute gradients, in which order, and the parameters that they are launched with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sta_compile.codegen import cutlass_backward, cutlass_forward
from sta_compile.codegen.cutlass_backward import Step, adds, kernels, plan
from sta_compile.codegen.cutlass_blocks import BLOCKS
from sta_compile.codegen.cutlass_programs import program_of
from sta_compile.ir.target import SHARED_MEMORY, Target
from sta_compile.runtime.prepare import Request, prepare
from tests.codegen.usage import problem_of


@pytest.fixture(autouse=True)
def toolchain(monkeypatch):
    """Whatever is installed."""
    monkeypatch.setattr(cutlass_forward, "missing", lambda: "")


def entries(steps: tuple[Step, ...]) -> list[str]:
    return [f"{step.spec.direction}:{step.entry.removeprefix('sta_')}" for step in steps]


def test_dq_is_summed_where_any_order_will_do():
    steps = plan(problem_of("bf16", 128), deterministic=False)
    assert adds(steps)
    assert entries(steps) == [
        "backward_rows:row_statistics",
        "backward:key_gradients",
        "backward_rows:convert_sum",
    ]


def test_blocks_that_own_queries_compute_dq_where_bits_count():
    steps = plan(problem_of("bf16", 128), deterministic=True)
    assert not adds(steps)
    assert entries(steps) == [
        "backward_rows:row_statistics",
        "backward_kv:key_gradients",
        "backward_q:query_gradients",
    ]


@pytest.mark.parametrize("deterministic", [False, True])
def test_large_heads_compute_one_gradient_at_a_time(deterministic):
    steps = plan(problem_of("fp16", 160), deterministic)
    assert [step.spec.direction for step in steps[1:]] == ["backward_k", "backward_v", "backward_q"]
    assert not adds(steps)


@pytest.mark.parametrize("head_dim", BLOCKS)
def test_what_is_launched_is_in_the_programs_and_fits(head_dim):
    for deterministic in (False, True):
        for spec, entry in plan(problem_of("bf16", head_dim), deterministic):
            program = program_of(spec)
            assert entry in program.entries
            assert program.shared <= SHARED_MEMORY[90]
            assert 32 * spec.blocks.warps <= 512


def test_other_targets_and_kernels_have_none():
    problem = problem_of("bf16", 128)
    assert len(kernels(problem, "auto", False)) == 2
    assert kernels(problem, "triton", False) == ()
    for change, reason in (
        ({"target": Target.cuda(100)}, "not for sm_100"),
        ({"dtype": "fp32"}, "fp32"),
        ({"contexts": 5}, "more than 4 segments"),
    ):
        other = replace(problem, **change)
        assert reason in cutlass_backward.refuse(other)
        assert kernels(other, "auto", False) == ()


def test_kernels_of_both_passes_are_built_with_the_model(monkeypatch):
    from sta_compile import config
    from sta_compile.runtime import prepare as preparing

    compiled = []

    class Runner:
        def compile(self, spec):
            compiled.append(spec.direction)

    monkeypatch.setattr(preparing, "runner_of", lambda emitter: Runner())
    request = Request(
        (1, 2, 768, 64), 2, 768, torch.bfloat16, torch.device("meta"), None, 0, backward=True
    )
    with config.patch(target="sm_90"):
        prepare(request)
        assert compiled == ["forward", "backward_rows", "backward"]
        compiled.clear()
        prepare(replace(request, backward=False))
        assert compiled == ["forward"]
