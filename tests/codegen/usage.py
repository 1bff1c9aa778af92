"""What ptxas says of each C++ kernel, as a table that tests compare: `python -m tests.codegen.usage` writes it."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

from sta_compile.codegen import cutlass_backward
from sta_compile.codegen.cutlass_blocks import BLOCKS
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
    return [*forward_specs(), *backward_specs()]


def problem_of(dtype: str, head_dim: int) -> Problem:
    return Problem(Target.cuda(90), dtype, head_dim, 0, "", False, 0.1, ((384, 300),))


def version() -> str:
    tools = toolchain("nvrtc")
    return tools if isinstance(tools, str) else tools.version.split()[0]


def main() -> None:
    rows = {spec.text(): list(astuple(build(spec).usage)) for spec in specs()}
    columns = ["registers", "spills", "stack", "shared"]
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    head = f'{{\n  "nvrtc": "{version()}",\n  "columns": {json.dumps(columns)},\n  "kernels": {{\n'
    TABLE.write_text(f"{head}{lines}\n  }}\n}}\n")


if __name__ == "__main__":
    main()
