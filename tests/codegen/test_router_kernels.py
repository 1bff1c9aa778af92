"""Kernels of statistics and of the router: against their reference in Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sta_compile.ir.target import SHARED_MEMORY
from tests.codegen.usage import cuobjdump


def test_the_router_is_its_reference_in_the_interpreter():
    pytest.importorskip("triton")
    from tests.codegen.test_triton_kernel import INTERPRETS

    if not INTERPRETS:
        pytest.skip("triton 3.6's interpreter needs numpy below 2.4")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.codegen.interpreted_router"],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
        },
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the router is its reference" in done.stdout


FP32 = (
    "parts_ptr row_sizes_ptr size_ptr numbers_ptr cross_ptr center_ptr total_ptr own_ptr unit_ptr "
    "bias_ptr out_size_ptr price_ptr"
)
POINTERS = {
    **dict.fromkeys(FP32.split(), "*fp32"),
    **dict.fromkeys(("runs_ptr", "row_runs_ptr", "order_ptr", "counts_ptr"), "*i32"),
    **dict.fromkeys(("groups_ptr", "tiers_ptr", "inside_ptr", "shown_ptr"), "*u8"),
    **dict.fromkeys(("gain_ptr", "uneven_ptr"), "*fp16"),
    **dict.fromkeys(("scale", "refine_skip", "skim_skip", "refine_skim"), "fp32"),
}
SIZES = {"D": 128, "D_PADDED": 128, "Q_GROUPS": 4, "K_GROUPS": 8, "ROWS": 64, "M": 64, "UNIT": 8}
OF_STATISTICS = {"COMPACT": 6, "STAND_OUT": 2, "PADDED": 16, "LENGTH": 128, "CHUNK": 29}
ABSENT = ("skip_ptr", "skim_ptr")


@pytest.mark.parametrize("kernel", ["key_statistics", "gains", "attend", "choose"])
def test_kernels_of_the_router_compile(kernel):
    """For a GPU, with few spilled registers: Triton's interpreter takes what its compiler does not."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sta_compile.runtime.router import ATTENDING, WARPS, kernels

    function = {each.fn.__name__: each for each in kernels()}[kernel]
    order = {name: index for index, name in enumerate(function.arg_names)}
    fixed = SIZES | OF_STATISTICS | {"WIDTH": 128, "BLOCK": 64} | dict.fromkeys(ABSENT)
    fixed |= {"M": ATTENDING} if kernel == "attend" else {}
    fixed = {name: value for name, value in fixed.items() if name in order}

    def kind(name: str) -> str:
        if name in fixed:
            return "constexpr"
        return POINTERS.get(name, "*bf16" if name.endswith("_ptr") else "i32")

    signature = {name: kind(name) for name in order}
    source = ASTSource(
        function,
        signature=signature,
        constexprs={(order[name],): value for name, value in fixed.items()},
        attrs={
            (order[name],): [["tt.divisibility", 16]]
            for name, of_name in signature.items()
            if of_name.startswith("*")
        },
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS, "num_stages": 2}
    )
    assert made.metadata.shared <= SHARED_MEMORY[90]
    assert "wgmma.mma_async" in made.asm["ptx"]
    usage = cuobjdump("-res-usage", made.asm["cubin"])
    stack = int(usage.split("STACK:")[1].split()[0])
    assert stack <= 256  # bytes of a thread: triton 3.6 spills more than 3.9
