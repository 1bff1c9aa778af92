"""The Triton kernel without a GPU: numerics in the interpreter, binaries by cross-compilation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from sta_compile.codegen.blocks import choices
from sta_compile.ir.kernel_spec import KernelSpec
from sta_compile.ir.target import SHARED_MEMORY
from tests.codegen.usage import TABLE, blackwell_specs, triton_usage

triton = pytest.importorskip("triton")


INTERPRETS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7) or tuple(
    map(int, numpy.__version__.split(".")[:2])
) < (2, 4)


def interpret(module, says):
    """Runs a module in a process of its own with Triton's interpreter."""
    if not INTERPRETS:
        pytest.skip("triton 3.6's interpreter needs numpy below 2.4")
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert says in done.stdout


def test_numerics_in_the_interpreter():
    interpret("tests.codegen.interpreted", "all equal the definition")


# arch, dtype, head dim, loads: the whole table of blocks, but for TMA loads of Blackwell, which `blackwell_specs` has.
# 40, 96 and 160 are padded to 64, 128 and 256.
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
KERNELS = [
    *((arch, "bf16", d, "pointer") for arch in ARCHITECTURES for d in (32, 64, 128, 256)),
    *((arch, "bf16", d, "pointer") for arch in (80, 90) for d in (40, 96, 160)),
    *((90, "fp16", d, "tma") for d in (32, 64, 128, 256)),
    *((arch, "fp32", d, "pointer") for arch in (80, 90, 120) for d in (32, 64, 128, 256)),
]


def check_fits(spec):
    """No spilled register. Triton 3.6 has a word of stack for TMA loads on sm_120, which nothing reads."""
    usage = triton_usage(spec)
    assert usage.shared <= SHARED_MEMORY[spec.arch]
    assert usage.loads == 0
    assert usage.stack <= (8 if spec.arch >= 120 and spec.loads == "tma" else 0)
    return usage


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype", "head_dim", "loads"), KERNELS)
def test_compiles_without_spills_within_shared_memory(arch, dtype, head_dim, loads):
    contexts = 1 if dtype == "fp32" else 4
    for choice in choices(arch, dtype, head_dim, loads):
        spec = KernelSpec(
            "triton",
            "forward",
            arch,
            dtype,
            head_dim,
            choice.blocks,
            loads,
            contexts,
            "i64",
            dense=True,
        )
        ptx = check_fits(spec).ptx
        if loads == "tma":
            assert "cp.async.bulk.tensor.2d" in ptx
        elif choice.blocks.stages > 1:
            assert "cp.async.c" in ptx
        if dtype != "fp32":
            product = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync")
            assert product in ptx
        assert ".local " not in ptx


@pytest.mark.slow
@pytest.mark.parametrize("spec", blackwell_specs(), ids=lambda spec: spec.text())
def test_blackwell(spec):
    """In machine code: products of the fifth generation's tensor cores (sm_100) or of warps (sm_120), loads by TMA.

    In NVFP4 scores are block-scaled products of e2m1, and weights times values those of e4m3.
    """
    recorded = json.loads(TABLE.read_text())
    assert set(recorded["triton_kernels"]) == {spec.text() for spec in blackwell_specs()}
    usage = check_fits(spec)
    assert "UTMALDG" in usage.sass
    products = {
        ("native", 100): ("UTCHMMA",),
        ("native", 120): ("HMMA.16816.F32.BF16",),
        ("nvfp4", 100): ("UTCOMMA.4X", "UTCQMMA"),
        ("nvfp4", 120): ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", "QMMA.16832.F32.E4M3.E4M3"),
    }
    for product in products[spec.precision, spec.arch]:
        assert product in usage.sass
    if spec.precision == "nvfp4":
        assert not re.search(r"\b(UTC)?HMMA", usage.sass)
    if triton.__version__ == recorded["triton"]:
        assert usage.row == recorded["triton_kernels"][spec.text()]


@pytest.mark.parametrize(
    "flags",  # contexts, lengths, dense, masked, video_masked, head_windows
    [
        (0, "", False, False, False),
        (4, "i64", True, False, False),
        (0, "", True, False, False),
        (4, "i64", True, True, False),
        (1, "", False, True, False),
        (4, "i64", True, True, True),
        (0, "", False, False, True),
        (0, "", False, False, False, True),
        (4, "i64", True, True, True, True),
    ],
)
def test_flags(flags):
    for choice in choices(90, "bf16", 128, "tma"):
        check_fits(KernelSpec("triton", "forward", 90, "bf16", 128, choice.blocks, "tma", *flags))


@pytest.mark.parametrize(
    ("arch", "head_dim", "loads"),
    [*((arch, 64, "pointer") for arch in ARCHITECTURES), (100, 128, "tma"), (120, 128, "tma")],
)
def test_masks_fit_every_architecture(arch, head_dim, loads):
    choice = choices(arch, "bf16", head_dim, loads, contexts=4)[0]
    flags = 4, "i64", True, True, True
    check_fits(
        KernelSpec("triton", "forward", arch, "bf16", head_dim, choice.blocks, loads, *flags)
    )
