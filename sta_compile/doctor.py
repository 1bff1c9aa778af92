"""What is installed, which devices there are, and what runs attention on each of them, or why nothing can."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .codegen.emitter import Emitter
    from .ir.target import Target

# distribution -> what is missing without it
PACKAGES = {
    "torch": "nothing works",
    "triton": "no GPU kernels: attention on a GPU stays as inductor compiles it",
    "nvidia-cutlass": "no headers for CUDA C++ kernels: Triton's run",
    "cuda-bindings": "no CUDA C++ kernels: Triton's run",
    "nvidia-cuda-nvrtc": "CUDA C++ kernels need nvcc, or another NVRTC",
    "jinja2": "no CUDA C++ kernels: Triton's run",
    "diffusers": "no `explain` from the command line; models of your own work",
    "networkx": "no layout over the whole graph",
    "sympy": "no symbolic shapes",
    "rich": "no tables",
    "matplotlib": "no pictures of windows (examples)",
}


@dataclass(frozen=True)
class Device:
    """A device, what it has, and for each kernel an empty text or the reason why it can't run there."""

    name: str
    target: str
    facts: str  # "sm_90, 132 SMs, 227 KiB shared memory, 50 MiB L2, wgmma, ..."
    kernels: dict[str, str]


@dataclass(frozen=True)
class Findings:
    """The answer of `python -m sta_compile doctor`."""

    versions: dict[str, str]  # distribution -> version, "" if it is missing
    entry_point: str  # how torch finds the backend, "" if it does not
    devices: tuple[Device, ...]
    compiler: str  # of CUDA C++ kernels: "nvrtc 13.0", or why there is none
    cache: str  # folder of compiled kernels

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __rich__(self) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.table import Table

        versions = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, title="installed", title_justify="left"
        )
        for column in ("package", "version", ""):
            versions.add_column(column)
        for name, version in self.versions.items():
            missing = "" if version else f"missing: {PACKAGES[name]}"
            versions.add_row(name, version or "-", missing)
        devices = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="devices", title_justify="left")
        for column in ("device", "target", "kernel", "runs"):
            devices.add_column(column)
        for device in self.devices:
            for number, (kernel, reason) in enumerate(device.kernels.items()):
                first = number == 0
                devices.add_row(
                    device.name if first else "",
                    f"{device.target}\n{device.facts}".strip() if first else "",
                    kernel,
                    f"no: {reason}" if reason else "yes",
                )
        found = self.entry_point or (
            "not registered: run `pip install -e .` (or install the wheel) in this environment"
        )
        lines = f'torch.compile(backend="sta"): {found}\n'
        lines += f"CUDA C++ kernels: {self.compiler}; kept in {self.cache}\n"
        return Group(versions, lines, devices)


def examine() -> Findings:
    """Looks at this process's environment; imports nothing that is missing."""
    versions = {"python": platform.python_version(), "sta_compile": __version__}
    versions |= {name: _version(name) for name in PACKAGES}
    from . import config
    from .codegen.toolchain import toolchain
    from .runtime.disk_cache import folder

    tools = toolchain(config.compiler)
    compiler = tools if isinstance(tools, str) else f"{tools.name} {tools.version.split()[0]}"
    return Findings(versions, _entry_point(), tuple(_devices()), compiler, str(folder()))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _entry_point() -> str:
    found = metadata.entry_points(group="torch_dynamo_backends", name="sta")
    return next((point.value for point in found), "")


def _devices() -> list[Device]:
    import torch

    from . import config
    from .runtime.target import detect, target

    names = ["cpu"]
    for kind in ("cuda", "xpu", "mps"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            names += [f"{kind}:{index}" for index in range(module.device_count())]
    found = [_examine_device(name, detect(torch.device(name))) for name in names]
    if config.target != "auto":
        found.append(_examine_device("not here (option target)", target()))
    return found


def _examine_device(name: str, target: Target) -> Device:
    from .codegen.emitter import Problem
    from .codegen.select import EMITTERS

    # A usual call: bf16, heads of 128, tiles of 384 queries that read runs of 1152 keys.
    runs = ((1152,) * 9, 1)
    problem = Problem(target, "bf16", 128, 0, "", False, 128**-0.5, ((384, 1),), (runs,))
    kernels = {_name(emitter): emitter.refuse(problem) for emitter in EMITTERS}
    slow = "" if target.kind == "cpu" else "only with options={'kernel': 'reference'}: it is slow"
    kernels["reference"] = slow
    return Device(name, target.name, ", ".join(_facts(target)), kernels)


def _name(emitter: Emitter) -> str:
    what = (emitter.loads, *([] if emitter.precision == "native" else [emitter.precision]))
    return f"{emitter.name} ({', '.join(what)})"


def _facts(target: Target) -> list[str]:
    if target.kind != "cuda":
        return []
    facts = [f"sm_{target.capability}"]
    facts += [f"{target.sm_count} SMs"] if target.sm_count else []
    facts.append(f"{target.shared_memory // 1024} KiB shared memory")
    facts += [f"{target.l2_cache // 2**20} MiB L2"] if target.l2_cache else []
    return [*facts, *target.features]
