"""What compiles C++ kernels, where their headers are, and what is missing.

NVRTC is a library in a package of its own and needs no host compiler; nvcc needs one. Everything here is optional: what
is missing is named, and another emitter runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from .cutlass_source import templates

OLDEST = (12, 3)  # compilers that know wgmma, setmaxnreg and 128-byte parameters of alignment 64
COMPILERS = ("auto", "nvrtc", "nvcc")


@dataclass(frozen=True)
class Toolchain:
    """name: "nvrtc" or "nvcc". version: of that very compiler, a part of each binary's identity.

    include: folders of headers, in order. program: path of nvcc, "" for NVRTC.
    """

    name: str
    version: str
    include: tuple[Path, ...]
    program: str = ""


@lru_cache(maxsize=8)
def toolchain(compiler: str = "auto") -> Toolchain | str:
    """The compiler to use, or why there is none. "auto": NVRTC, and nvcc where that is missing."""
    cutlass = find_spec("cutlass_library")
    if cutlass is None or not cutlass.submodule_search_locations:
        return "the package nvidia-cutlass is not installed"
    headers = Path(next(iter(cutlass.submodule_search_locations))) / "source" / "include"
    if not headers.is_dir():
        return f"the package nvidia-cutlass has no headers in {headers}"
    found = _nvcc(headers) if compiler == "nvcc" else _nvrtc(headers)
    if isinstance(found, str) and compiler == "auto":
        other = _nvcc(headers)
        return found if isinstance(other, str) else other
    return found


@lru_cache(maxsize=1)
def missing() -> str:
    """What keeps C++ kernels from being built and launched here, or ""."""
    if not _is_there("cuda.bindings.driver"):
        return "the package cuda-bindings is not installed"
    if find_spec("jinja2") is None:
        return "the package jinja2 is not installed"
    found = toolchain()
    return found if isinstance(found, str) else ""


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _nvrtc(headers: Path) -> Toolchain | str:
    if not _is_there("cuda.bindings.nvrtc"):
        return "the package cuda-bindings is not installed"
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (
        Exception
    ) as error:  # the bindings are there and the library is not, or is another major version
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"the package nvidia-cuda-nvrtc is not installed or does not load: {reason}"
    if (major, minor) < OLDEST:
        return f"NVRTC {major}.{minor} is older than {OLDEST[0]}.{OLDEST[1]}"
    # The library says no more than 13.0 of itself.
    version = f"{major}.{minor} {_library_size()}".strip()
    return Toolchain("nvrtc", version, (templates(), templates() / "freestanding", headers))


def _library_size() -> str:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return str(Path(load_nvidia_dynamic_lib("nvrtc").abs_path).stat().st_size)
    except Exception:  # an older layout of the bindings: the version has to do
        return ""


def _nvcc(headers: Path) -> Toolchain | str:
    program = shutil.which("nvcc")
    for home in (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")):
        program = program or (shutil.which("nvcc", path=f"{home}/bin") if home else None)
    if program is None:
        return "nvcc is not on the PATH"
    try:
        command = [program, "--version"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvcc does not run: {error}"
    release = re.search(r"V((\d+)\.(\d+)[\d.]*)", text)
    if release is None or (int(release[2]), int(release[3])) < OLDEST:
        return f"nvcc {release[1] if release else '?'} is older than {OLDEST[0]}.{OLDEST[1]}"
    return Toolchain("nvcc", release[1], (templates(), headers), program)
