"""The Triton kernel without a GPU: numerics in the interpreter, binaries by cross-compilation."""

from __future__ import annotations

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

triton = pytest.importorskip("triton")


INTERPRETS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7) or tuple(
    map(int, numpy.__version__.split(".")[:2])
) < (2, 4)


@pytest.mark.skipif(not INTERPRETS, reason="triton 3.6's interpreter needs numpy below 2.4")
def test_numerics_in_the_interpreter():
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.codegen.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all equal the definition" in done.stdout


# arch, dtype, head dim, loads: the whole table of blocks. 40, 96 and 160 are padded to 64, 128 and 256.
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
KERNELS = [
    *((arch, "bf16", d, "pointer") for arch in ARCHITECTURES for d in (32, 64, 128, 256)),
    *((arch, "bf16", d, "pointer") for arch in (80, 90) for d in (40, 96, 160)),
    *((arch, "fp16", d, "tma") for arch in (90, 100) for d in (32, 64, 128, 256)),
    *((arch, "fp32", d, "pointer") for arch in (80, 90, 120) for d in (32, 64, 128, 256)),
]


def compiled(spec, tmp_path):
    """(kernel, PTX, resource usage)"""
    from sta_compile.codegen.triton.build import cross_compile

    kernel = cross_compile(spec)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True)
    return kernel, kernel.asm["ptx"], usage.stdout + usage.stderr


def check_fits(spec, tmp_path):
    kernel, ptx, usage = compiled(spec, tmp_path)
    assert kernel.metadata.shared <= SHARED_MEMORY[spec.arch]
    assert re.findall(r"STACK:(\d+)", usage) == ["0"], usage
    assert re.findall(r"LOCAL:(\d+)", usage) == ["0"], usage
    return ptx


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype", "head_dim", "loads"), KERNELS)
def test_compiles_without_spills_within_shared_memory(arch, dtype, head_dim, loads, tmp_path):
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
        ptx = check_fits(spec, tmp_path)
        if loads == "tma":
            assert "cp.async.bulk.tensor.2d" in ptx
        elif choice.blocks.stages > 1:
            assert "cp.async.c" in ptx
        if dtype != "fp32":
            product = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync")
            assert product in ptx
        assert ".local " not in ptx


@pytest.mark.parametrize(
    "flags",  # contexts, lengths, dense, masked, video_masked
    [
        (0, "", False, False, False),
        (4, "i64", True, False, False),
        (0, "", True, False, False),
        (4, "i64", True, True, False),
        (1, "", False, True, False),
        (4, "i64", True, True, True),
        (0, "", False, False, True),
    ],
)
def test_flags(flags, tmp_path):
    for choice in choices(90, "bf16", 128, "tma"):
        check_fits(
            KernelSpec("triton", "forward", 90, "bf16", 128, choice.blocks, "tma", *flags), tmp_path
        )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_masks_fit_every_architecture(arch, tmp_path):
    choice = choices(arch, "bf16", 64, "pointer")[0]
    flags = 4, "i64", True, True, True
    check_fits(
        KernelSpec("triton", "forward", arch, "bf16", 64, choice.blocks, "pointer", *flags),
        tmp_path,
    )
