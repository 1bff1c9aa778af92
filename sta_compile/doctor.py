"""What is installed, which devices there are, and what runs attention on each of them, or why nothing can."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .ir.target import Target

# distribution -> what is missing without it
PACKAGES = {
    "torch": "nothing works",
    "triton": "no GPU kernels: attention on a GPU stays as inductor compiles it",
    "nvidia-cutlass": "no headers for CUDA C++ kernels",
    "diffusers": "no `explain` from the command line; models of your own work",
    "networkx": "no layout over the whole graph",
    "sympy": "no symbolic shapes",
    "rich": "no tables",
    "matplotlib": "no pictures of windows (examples)",
}


@dataclass(frozen=True)
class Device:
    """A device, and for each kernel an empty text or the reason why it can't run there."""

    name: str
    target: str
    kernels: dict[str, str]


@dataclass(frozen=True)
class Findings:
    """The answer of `python -m sta_compile doctor`."""

    versions: dict[str, str]  # distribution -> version, "" if it is missing
    entry_point: str  # how torch finds the backend, "" if it does not
    devices: tuple[Device, ...]

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
                    device.target if first else "",
                    kernel,
                    f"no: {reason}" if reason else "yes",
                )
        found = self.entry_point or (
            "not registered: run `pip install -e .` (or install the wheel) in this environment"
        )
        return Group(versions, f'torch.compile(backend="sta"): {found}\n', devices)


def examine() -> Findings:
    """Looks at this process's environment; imports nothing that is missing."""
    versions = {"python": platform.python_version(), "sta_compile": __version__}
    versions |= {name: _version(name) for name in PACKAGES}
    return Findings(versions, _entry_point(), tuple(_devices()))


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

    from .runtime.target import detect

    names = ["cpu"]
    for kind in ("cuda", "xpu", "mps"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            names += [f"{kind}:{index}" for index in range(module.device_count())]
    return [_examine_device(name, detect(torch.device(name))) for name in names]


def _examine_device(name: str, target: Target) -> Device:
    from .codegen.emitter import Problem
    from .codegen.select import EMITTERS

    # A usual call: bf16, heads of 128, tiles of 384 queries.
    problem = Problem(target, "bf16", 128, 0, "", False, 128**-0.5, ((384, 1),))
    kernels = {}
    for emitter in EMITTERS:
        loads = getattr(emitter, "loads", "")
        kernels[f"{emitter.name} ({loads})" if loads else emitter.name] = emitter.refuse(problem)
    slow = "" if target.kind == "cpu" else "only with options={'kernel': 'reference'}: it is slow"
    kernels["reference"] = slow
    memory = f", {target.shared_memory // 1024} KiB shared memory" if target.shared_memory else ""
    return Device(name, f"{target.name}{memory}", kernels)
