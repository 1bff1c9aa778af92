"""The C++ emitter: what it accepts, which blocks it chooses, and in which order "auto" tries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sta_compile.codegen import cutlass_forward, preference
from sta_compile.codegen.cutlass_blocks import BLOCKS, GROUP
from sta_compile.codegen.cutlass_forward import CutlassForward
from sta_compile.codegen.cutlass_programs import program_of
from sta_compile.codegen.emitter import Problem
from sta_compile.codegen.select import EMITTERS, candidates, select
from sta_compile.codegen.tensor_map import is_boxed
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.target import SHARED_MEMORY, Target
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime.problem import runs_of_tiles

RUNS = (((1152,) * 9, 300),)
HOPPER = Problem(Target.cuda(90), "bf16", 128, 0, "", False, 0.1, ((384, 300),), RUNS)


@pytest.fixture(autouse=True)
def toolchain(monkeypatch):
    """Whatever is installed."""
    monkeypatch.setattr(cutlass_forward, "missing", lambda: "")
    select.cache_clear()
    yield
    select.cache_clear()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": Target.cuda(89)}, "not for sm_89"),
        ({"target": Target.cuda(100)}, "not for sm_100"),
        ({"target": Target("hip")}, "hip devices"),
        ({"dtype": "fp32"}, "fp32 is not one of bf16, fp16"),
        ({"head_dim": 104}, "head dim 104"),
        ({"scale": 0.0}, "not positive"),
        ({"boxed": False}, "strides or addresses"),
        ({"direction": "backward"}, "no backward"),
        ({"contexts": 5}, "more than 4 segments beside the video"),
    ],
)
def test_refusals_have_a_reason_and_triton_runs(change, reason):
    problem = replace(HOPPER, **change)
    assert reason in CutlassForward().refuse(problem)
    specs, reasons = select(problem, "auto")
    assert all(spec.emitter == "triton" for spec in specs)
    assert any(reason in text for text in reasons)
    assert select(problem, "cutlass")[0] == ()


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(cutlass_forward, "missing", lambda: "the package cuda-bindings is missing")
    specs, reasons = select(HOPPER, "auto")
    assert [spec.loads for spec in specs] == ["tma", "pointer"]
    assert reasons == ("the package cuda-bindings is missing",)


def test_auto_tries_it_first_and_by_name_alone():
    first = "cutlass forward sm90 bf16 d128 192x128 warps=16 stages=2 tma"
    assert [spec.text() for spec in select(HOPPER, "cutlass")[0]] == [first]
    specs, _ = select(HOPPER, "auto")
    assert [spec.emitter for spec in specs] == ["cutlass", "triton", "triton"]


def test_short_runs_are_for_triton_first():
    short = replace(HOPPER, key_runs=(((48,) * 9, 1),))
    assert [spec.emitter for spec in select(short, "auto")[0]] == ["triton", "triton", "cutlass"]
    ampere = replace(HOPPER, target=Target.cuda(80))
    assert preference.order(EMITTERS, ampere) == EMITTERS


@pytest.mark.parametrize("head_dim", BLOCKS)
def test_one_binary_serves_all_segments(head_dim):
    """Lengths, flags and segments are run-time parameters."""
    plain = replace(HOPPER, head_dim=head_dim)
    extras = {"lengths": "i64", "dense": True, "masked": True, "video_masked": True}
    packed = replace(plain, contexts=3, **extras)
    (spec,) = select(plain, "cutlass")[0]
    assert select(packed, "cutlass")[0] == (spec,)
    assert candidates(packed, "cutlass") == ((spec,),)


def test_blocks_fit_the_machine():
    for head_dim, blocks in BLOCKS.items():
        (spec,) = select(replace(HOPPER, head_dim=head_dim), "cutlass")[0]
        assert program_of(spec).shared <= SHARED_MEMORY[90]
        assert blocks.n % GROUP == 0
        assert blocks.n <= 256
        boxes = blocks.n // GROUP * -(-head_dim // 64)
        assert boxes <= 32  # a lane of the producer loads one


def test_runs_of_tiles_are_those_of_the_definition():
    spec = AttentionSpec(("video",), tiles=(5, 6, 10), window=(3, 3, 3)).text()
    assert runs_of_tiles(geometry_of([115200], (30, 48, 80), spec)) == (((1152,) * 9, 300),)
    spec = AttentionSpec(("video",), tiles=(4, 3, 1), window=(1, 3, 1)).text()
    geometry = geometry_of(
        [7 * 9 * 5], (7, 9, 5), spec
    )  # frames in 2 2 2 1; runs that touch are one
    assert sorted(runs_of_tiles(geometry)) == [((45,), 3), ((90,), 9)]
    assert sum(count for _, count in runs_of_tiles(geometry)) == geometry.tiling.count_tiles


def test_boxed_strides():
    x = torch.empty(2, 3, 40, 128, dtype=torch.bfloat16)
    fused = torch.empty(2, 40, 3, 3, 72)[:, :, :, 1].transpose(1, 2)

    def ok(x, address=0):
        return is_boxed(tuple(x.shape), x.stride(), 2, address)

    assert ok(x)
    assert ok(x.transpose(1, 2))
    assert ok(fused)
    assert not ok(x, address=8)
    assert not ok(x.transpose(2, 3))
    assert not ok(torch.empty(2, 3, 40, 36))
    assert not ok(x[:, :1].expand(2, 3, 40, 128))
    assert ok(x[:1, :1].as_strided((1, 1, 40, 128), (7, 5, 128, 1)))
