"""What compilers say of kernels, as a table that tests compare: `python -m tests.codegen.usage` writes it.

The C++ kernels for Hopper, and Triton's for Blackwell, where no GPU of ours has run them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from sta_compile.codegen import cutlass_backward
from sta_compile.codegen.blocks import Choice, choices, nvfp4_choices
from sta_compile.codegen.cutlass_blocks import BLOCKS, FP8_BLOCKS, TIER_BLOCKS
from sta_compile.codegen.cutlass_fp8 import CutlassFp8Forward, CutlassTieredForward
from sta_compile.codegen.emitter import Problem
from sta_compile.codegen.toolchain import toolchain
from sta_compile.ir.kernel_spec import KernelSpec
from sta_compile.ir.target import Target
from sta_compile.runtime.build import build

TABLE = Path(__file__).with_name("usage.json")


def forward_specs() -> list[KernelSpec]:
    return [
        KernelSpec("cutlass", "forward", 90, dtype, head_dim, blocks, "tma", 0, "", False)
        for dtype in ("bf16", "fp16")
        for head_dim, blocks in BLOCKS.items()
    ]


def fp8_specs() -> list[KernelSpec]:
    emitter = CutlassFp8Forward()
    return [
        emitter.specify(replace(problem_of(dtype, head_dim), precision="fp8"))
        for dtype in ("bf16", "fp16")
        for head_dim in FP8_BLOCKS
    ]


def tiered_specs() -> list[KernelSpec]:
    emitter = CutlassTieredForward()
    return [
        emitter.specify(replace(problem_of("bf16", head_dim), precision="tiered"))
        for head_dim in TIER_BLOCKS
    ]


def head_window_specs() -> list[KernelSpec]:
    """Kernels for heads with windows of their own: at one head dim, since the others differ in nothing else."""
    problem = replace(problem_of("bf16", 128), head_windows=True)
    steps = (step for order in (False, True) for step in cutlass_backward.plan(problem, order))
    forward = replace(forward_specs()[0], head_dim=128, blocks=BLOCKS[128], head_windows=True)
    return [
        forward,
        *dict.fromkeys(step.spec for step in steps if step.spec.direction != "backward_rows"),
    ]


def backward_specs() -> list[KernelSpec]:
    """In the order of their launches, for each dtype and head dim."""
    found: dict[KernelSpec, None] = {}
    for forward in forward_specs():
        problem = problem_of(forward.dtype, forward.head_dim)
        for deterministic in (False, True):
            steps = cutlass_backward.plan(problem, deterministic)
            found.update(dict.fromkeys(step.spec for step in steps))
    return list(found)


def specs() -> list[KernelSpec]:
    return [
        *forward_specs(),
        *fp8_specs(),
        *tiered_specs(),
        *backward_specs(),
        *head_window_specs(),
    ]


def problem_of(dtype: str, head_dim: int) -> Problem:
    return Problem(Target.cuda(90), dtype, head_dim, 0, "", False, 0.1, ((384, 300),))


def blackwell_specs() -> list[KernelSpec]:
    """Of data center and of workstation GPUs, with as many segments beside the video as each takes, all with lengths."""
    native = [
        _blackwell_spec(arch, head_dim, choice)
        for arch in (100, 120)
        for head_dim in (32, 64, 128, 256)
        for choice in choices(arch, "bf16", head_dim, "tma")
    ]
    return [*native, *nvfp4_specs()]


def nvfp4_specs() -> list[KernelSpec]:
    return [
        replace(_blackwell_spec(arch, head_dim, choice), precision="nvfp4")
        for arch in (100, 120)
        for head_dim in (64, 128)
        for choice in nvfp4_choices(arch, head_dim)
    ]


def _blackwell_spec(arch: int, head_dim: int, choice: Choice) -> KernelSpec:
    shape = arch, "bf16", head_dim, choice.blocks, "tma", choice.contexts
    return KernelSpec("triton", "forward", *shape, "i64", dense=True)


def version() -> str:
    tools = toolchain("nvrtc")
    return tools if isinstance(tools, str) else tools.version.split()[0]


@dataclass(frozen=True)
class TritonUsage:
    """registers: of a thread. stack, shared: bytes. loads: of spilled registers. ptx, sass: the kernel as text."""

    registers: int
    stack: int
    shared: int
    loads: int
    ptx: str
    sass: str

    @property
    def row(self) -> list[int]:
        return [self.registers, self.stack, self.shared]


def triton_usage(spec: KernelSpec) -> TritonUsage:
    from sta_compile.codegen.triton.build import cross_compile

    kernel: Any = cross_compile(spec)
    said, sass = (cuobjdump(how, kernel.asm["cubin"]) for how in ("-res-usage", "-sass"))
    registers, stack, local = (
        int(re.findall(rf"{name}:(\d+)", said)[0]) for name in ("REG", "STACK", "LOCAL")
    )
    loads = len(re.findall(r"\bLDL\b", sass))
    return TritonUsage(
        registers, stack + local, kernel.metadata.shared, loads, kernel.asm["ptx"], sass
    )


def cuobjdump(how: str, code: bytes) -> str:
    """What the tool in Triton's package says of a binary. how: "-sass" or "-res-usage"."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(code)
        command = [str(tools / "cuobjdump"), how, str(binary)]
        done = subprocess.run(
            command, env={"PATH": path}, capture_output=True, text=True, check=True
        )
    return done.stdout + done.stderr


def main() -> None:
    import triton

    rows = {spec.text(): list(astuple(build(spec).usage)) for spec in specs()}
    columns = ["registers", "spills", "stack", "shared"]
    head = f'{{\n  "nvrtc": "{version()}",\n  "columns": {json.dumps(columns)},\n  "kernels": {{\n'
    found = {spec.text(): triton_usage(spec).row for spec in blackwell_specs()}
    columns = ["registers", "stack", "shared"]
    middle = f'  "triton": "{triton.__version__}",\n  "triton_columns": {json.dumps(columns)},\n'
    text = (
        f'{head}{_lines(rows)}\n  }},\n{middle}  "triton_kernels": {{\n{_lines(found)}\n  }}\n}}\n'
    )
    TABLE.write_text(text)


def _lines(rows: dict[str, list[int]]) -> str:
    return ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())


if __name__ == "__main__":
    main()
