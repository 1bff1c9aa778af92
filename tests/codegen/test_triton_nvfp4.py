"""The emitter of precision="nvfp4" and its kernels, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sta_compile.codegen import triton_forward
from sta_compile.codegen.blocks import nvfp4_choices
from sta_compile.codegen.emitter import Problem
from sta_compile.codegen.select import candidates, select, variants
from sta_compile.codegen.triton_nvfp4 import TritonNvfp4
from sta_compile.ir.kernel_spec import Blocks, KernelSpec
from sta_compile.ir.target import Target
from sta_compile.runtime.launch import why_native
from tests.codegen.test_cutlass_fp8 import check_quantizer, compiled
from tests.codegen.test_triton_kernel import check_fits, interpret
from tests.codegen.usage import cuobjdump

RUNS = (((1152,) * 9, 300),)
BLACKWELL = Problem(
    Target.cuda(120), "bf16", 128, 0, "", False, 0.1, ((384, 300),), RUNS, precision="nvfp4"
)


@pytest.fixture(autouse=True)
def whatever_is_installed(monkeypatch):
    monkeypatch.setattr(triton_forward, "find_spec", lambda name: True)
    select.cache_clear()
    yield
    select.cache_clear()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": Target.cuda(90)}, "sm_90 has no FP4 products; pass precision='fp8'"),
        ({"target": Target.cuda(89)}, "sm_89 has no FP4 products; it needs a Blackwell GPU"),
        ({"dtype": "fp32"}, "fp32 is not one of fp16, bf16"),
        ({"head_dim": 160}, "head dim 160 is over 128"),
        ({"head_dim": 36}, "multiple of 8"),
        ({"scale": 0.0}, "not positive"),
        ({"contexts": 5}, "more than 4"),
    ],
)
def test_refusals_have_a_reason_and_native_kernels_run(change, reason):
    problem = replace(BLACKWELL, **change)
    assert reason in why_native(problem, "auto")
    specs, reasons = select(problem, "auto")
    assert all(spec.precision == "native" for spec in specs)
    assert any(reason in text for text in reasons)


@pytest.mark.parametrize("arch", [100, 103, 120, 121])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_it_comes_first_where_it_is_asked_for(arch, head_dim):
    problem = replace(BLACKWELL, target=Target.cuda(arch), head_dim=head_dim)
    native = select(replace(problem, precision="native"), "auto")[0]
    for kernel in ("auto", "triton"):
        specs, _ = select(problem, kernel)
        assert specs[0].precision == "nvfp4"
        assert specs[1:] == native
    assert specs[0].text().endswith(" nvfp4")
    assert candidates(problem, "auto")[0] == variants(problem, "auto") == specs[:1]
    # What it reads are copies.
    assert not TritonNvfp4().refuse(replace(problem, mapped=False, boxed=False))
    assert "kernel='auto'" in why_native(problem, "cutlass")


def test_numerics_in_the_interpreter():
    interpret("tests.codegen.interpreted_nvfp4", "all equal the reference")


@pytest.mark.parametrize(("arch", "head_dim"), [(100, 128), (120, 80)])
def test_the_kernel_that_quantizes_compiles(arch, head_dim):
    pytest.importorskip("triton")
    from sta_compile.codegen.triton.quantize_nvfp4 import quantize_nvfp4

    made = compiled(quantize_nvfp4, arch, head_dim)
    check_quantizer(made)
    assert "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C" in cuobjdump("-sass", made.asm["cubin"])


@pytest.mark.parametrize("arch", [100, 120])
def test_everything_at_once_fits(arch):
    """The usual flags are those of `blackwell_specs`."""
    triton = pytest.importorskip("triton")
    if arch == 120 and triton.__version__ < "3.8":
        pytest.skip("triton 3.6 spills one register")
    masks = dict.fromkeys(("dense", "masked", "video_masked", "head_windows"), True)
    blocks = nvfp4_choices(arch, 128)[0].blocks
    usual = "triton", "forward", arch, "fp16", 128, blocks, "tma", 4
    check_fits(KernelSpec(*usual, lengths="i64", **masks, precision="nvfp4"))


def test_emulation_on_hopper_multiplies_bf16():
    pytest.importorskip("triton")
    from sta_compile.codegen.triton.build import cross_compile

    spec = KernelSpec(
        "triton", "forward", 90, "bf16", 64, Blocks(64, 64, 4, 2), "tma", 0, "", False
    )
    ptx = cross_compile(replace(spec, precision="nvfp4")).asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16" in ptx
    assert "e4m3.e4m3" not in ptx
