"""The emitter of the fp8 kernel, and the kernels that quantize for it, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sta_compile.codegen import cutlass_forward, cutlass_fp8
from sta_compile.codegen.cutlass_blocks import FP8_BLOCKS
from sta_compile.codegen.cutlass_fp8 import CutlassFp8Forward
from sta_compile.codegen.cutlass_programs import program_of
from sta_compile.codegen.emitter import Problem
from sta_compile.codegen.select import candidates, select, variants
from sta_compile.ir.target import SHARED_MEMORY, Target
from tests.codegen.test_triton_kernel import interpret
from tests.codegen.usage import cuobjdump

RUNS = (((1152,) * 9, 300),)
HOPPER = Problem(
    Target.cuda(90), "bf16", 128, 0, "", False, 0.1, ((384, 300),), RUNS, precision="fp8"
)


@pytest.fixture(autouse=True)
def toolchain(monkeypatch):
    """Whatever is installed."""
    monkeypatch.setattr(cutlass_forward, "missing", lambda: "")
    monkeypatch.setattr(cutlass_fp8, "find_spec", lambda name: True)
    select.cache_clear()
    yield
    select.cache_clear()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": Target.cuda(89)}, "for Hopper GPUs (sm_90) only"),
        ({"target": Target.cuda(120)}, "for Hopper GPUs (sm_90) only"),
        ({"dtype": "fp32"}, "fp32 is not one of bf16, fp16"),
        ({"head_dim": 72}, "head dim 72 has no fp8 kernel, but 64, 80, 96, 112, 128 have"),
        ({"scale": 0.0}, "not positive"),
        ({"contexts": 5}, "more than 4 segments beside the video"),
    ],
)
def test_refusals_have_a_reason_and_native_kernels_run(change, reason):
    problem = replace(HOPPER, **change)
    assert reason in CutlassFp8Forward().refuse(problem)
    specs, reasons = select(problem, "auto")
    assert all(spec.precision == "native" for spec in specs)
    assert any(reason in text for text in reasons)


def test_triton_quantizes(monkeypatch):
    monkeypatch.setattr(cutlass_fp8, "find_spec", lambda name: None)
    assert "triton" in CutlassFp8Forward().refuse(HOPPER)


def test_it_comes_first_where_it_is_asked_for():
    native = replace(HOPPER, precision="native")
    for runs in ((), RUNS, (((16,), 300),)):
        specs, _ = select(replace(HOPPER, key_runs=runs), "auto")
        assert [spec.precision for spec in specs] == ["fp8", *["native"] * (len(specs) - 1)]
        assert specs[1:] == select(replace(native, key_runs=runs), "auto")[0]
    assert specs[0].text().endswith(" fp8")
    assert [spec.precision for spec in select(HOPPER, "cutlass")[0]] == ["fp8", "native"]
    assert all(spec.precision == "native" for spec in select(HOPPER, "triton")[0])
    assert candidates(HOPPER, "auto")[0] == variants(HOPPER, "auto") == specs[:1]
    # TMA reads copies.
    assert not CutlassFp8Forward().refuse(replace(HOPPER, boxed=False))


def test_a_measured_choice_is_of_native_kernels():
    native = select(replace(HOPPER, precision="native"), "auto")[0]
    specs, _ = select(HOPPER, "auto", native[1].choice)
    assert [spec.precision for spec in specs[:2]] == ["fp8", "native"]
    assert specs[1] == native[1]


@pytest.mark.parametrize("head_dim", FP8_BLOCKS)
def test_shared_memory(head_dim):
    spec = CutlassFp8Forward().specify(replace(HOPPER, head_dim=head_dim))
    program = program_of(spec)
    assert program.shared <= SHARED_MEMORY[90]
    assert program.constants["kFirst"] % 8 == 0
    columns = {product.name: product.columns for product in program.products}
    assert columns["FirstMma"] + columns["LastMma"] == head_dim + 8


def test_quantized_bits_in_the_interpreter():
    interpret("tests.codegen.interpreted_quantize", "all bits are equal")


POINTERS = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16"),
    **dict.fromkeys(("partial_ptr", "mean_ptr", "k_scale_ptr", "v_scale_ptr"), "*fp32"),
    **dict.fromkeys(("q_scale_ptr", "shift_ptr"), "*fp32"),
    **dict.fromkeys(("q8_ptr", "k8_ptr", "v8_ptr", "shown_ptr"), "*u8"),
    **dict.fromkeys(("q4_ptr", "k4_ptr", "q_scales_ptr", "k_scales_ptr"), "*u8"),
    **dict.fromkeys(("count_ptr", "sources_ptr"), "*i32"),
    "scale": "fp32",
}
SIZES = {
    "D_PADDED": 128,
    "BLOCK": 32,
    "CHUNK": 1024,
    "KEYS": 64,
    "UNIT": 8,
    "ROUND": False,
    "CONVERT": "fp4",
    "K_LARGEST": 448.0,
}


@pytest.mark.parametrize("head_dim", [128, 80])
@pytest.mark.parametrize("kernel", ["key_statistics", "key_scales", "quantize"])
def test_kernels_that_quantize_compile(kernel, head_dim):
    """For a GPU: Triton's interpreter takes what its compiler does not."""
    pytest.importorskip("triton")
    from sta_compile.codegen.triton import quantize as kernels

    made = compiled(getattr(kernels, kernel), 90, head_dim)
    if kernel == "quantize":
        check_quantizer(made)
        absent = "sources_ptr", "shown_ptr"
        check_quantizer(compiled(kernels.quantize, 90, head_dim, absent))


def check_quantizer(made):
    assert "cvt.rn.satfinite.e4m3x2.f32" in made.asm["ptx"]
    sass = cuobjdump("-sass", made.asm["cubin"])
    assert "STG.E.128" in sass
    assert "LDL" not in sass


def compiled(function, arch, head_dim, absent=()):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    order = {name: index for index, name in enumerate(function.arg_names)}
    fixed = {name: value for name, value in (SIZES | {"D": head_dim}).items() if name in order}
    fixed |= dict.fromkeys(absent)
    signature = {name: POINTERS.get(name, "i32") for name in order} | dict.fromkeys(
        fixed, "constexpr"
    )
    source = ASTSource(
        function,
        signature=signature,
        constexprs={(order[name],): value for name, value in fixed.items()},
        attrs={
            (order[name],): [["tt.divisibility", 16]]
            for name, kind in signature.items()
            if kind.startswith("*")
        },
    )
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
    assert made.metadata.shared <= SHARED_MEMORY[arch]
    return made
