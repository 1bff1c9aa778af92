"""From a C++ kernel's spec to its binary: from the disk cache, or compiled. Needs no GPU.

What ptxas says of a kernel (registers, spills, shared memory) is kept beside the binary.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .. import config
from ..codegen.cutlass_source import Source, render
from ..codegen.toolchain import Toolchain, toolchain
from ..errors import StaError
from ..ir.kernel_spec import KernelSpec
from . import disk_cache

FLAGS = ("-std=c++17", "--use_fast_math", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED")


@dataclass(frozen=True)
class Usage:
    """registers: of a thread at launch. In bytes, spills: stored and loaded; stack: of a frame; shared: static."""

    registers: int
    spills: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Cubin:
    """log: what the compiler said."""

    code: bytes
    usage: Usage
    log: str


def build(spec: KernelSpec) -> Cubin:
    """Raises StaError with the compiler's first error, or with what is missing."""
    tools = toolchain(config.compiler)
    if isinstance(tools, str):
        raise StaError(f"{tools}; install it or pass kernel='triton'")
    source = render(spec, tools.include)
    architecture = f"sm_{spec.arch}a"
    key = disk_cache.key_of(
        source.text, source.headers, *FLAGS, tools.name, tools.version, architecture
    )
    entry = disk_cache.load(key)
    if entry is None:
        code, log = _compile(source, tools, architecture)
        entry = disk_cache.Entry(code, log)
        disk_cache.store(key, entry)
    return Cubin(entry.code, read_usage(entry.log), entry.log)


def read_usage(log: str) -> Usage:
    """From the words of `ptxas -v`: the most registers of a kernel, and the sum of the rest."""

    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    return Usage(
        max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0),
        number(r"(\d+) bytes spill (?:stores|loads)"),
        number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes smem"),
    )


def _compile(source: Source, tools: Toolchain, architecture: str) -> tuple[bytes, str]:
    include = [f"-I{folder}" for folder in tools.include]
    if tools.name == "nvcc":
        return _nvcc(source.text, [*FLAGS, *include], tools.program, architecture)
    return _nvrtc(source.text, [*FLAGS, *include, "-default-device"], architecture)


def _nvrtc(text: str, flags: list[str], architecture: str) -> tuple[bytes, str]:
    from cuda.bindings import nvrtc

    options = [*flags, f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
    error, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    if int(error):
        raise StaError(f"NVRTC says {error.name}; pass kernel='triton'")
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        said = log.decode(errors="replace").rstrip("\0")
        if int(error):
            raise StaError(f"{first_error(said) or error.name}; pass kernel='triton'")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        code = bytearray(size)
        (error,) = nvrtc.nvrtcGetCUBIN(program, code)
        if int(error):
            raise StaError(f"NVRTC says {error.name}; pass kernel='triton'")
        return bytes(code), said
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvcc(text: str, flags: list[str], program: str, architecture: str) -> tuple[bytes, str]:
    generation = f"arch=compute_{architecture[3:]},code={architecture}"
    with tempfile.TemporaryDirectory(prefix="sta_") as name:
        folder = Path(name)
        (folder / "kernel.cu").write_text(text)
        command = [program, "-cubin", f"-gencode={generation}", "-Xptxas", "-v", *flags]
        command += ["-o", "kernel.cubin", "kernel.cu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        if done.returncode:
            said = first_error(done.stderr) or f"nvcc ends with {done.returncode}"
            raise StaError(f"{said}; pass kernel='triton'")
        return (folder / "kernel.cubin").read_bytes(), done.stderr


def first_error(log: str) -> str:
    lines = log.splitlines()
    return next((line.strip() for line in lines if "error" in line.lower()), "")
