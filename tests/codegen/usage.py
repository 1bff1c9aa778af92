"""What ptxas says of each C++ kernel, as a table that tests compare: `python -m tests.codegen.usage` writes it."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

from sta_compile.codegen.cutlass_blocks import BLOCKS
from sta_compile.codegen.toolchain import toolchain
from sta_compile.ir.kernel_spec import KernelSpec
from sta_compile.runtime.build import build

TABLE = Path(__file__).with_name("usage.json")


def specs() -> list[KernelSpec]:
    return [
        KernelSpec("cutlass", "forward", 90, dtype, head_dim, blocks, "tma", 0, "", False)
        for dtype in ("bf16", "fp16")
        for head_dim, blocks in BLOCKS.items()
    ]


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
