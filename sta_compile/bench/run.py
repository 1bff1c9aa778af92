"""The command `python -m sta_compile bench`."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..errors import StaError
from ..runtime.target import detect
from ..runtime.timing import warm_up
from .inputs import Inputs
from .measure import Options, Row, matrix_product, measure_all
from .workloads import HOST, Workload

PACKAGES = ("triton", "nvidia-cuda-nvrtc", "flash-attn-4", "natten", "fastvideo-kernel")


def device_of(small: bool) -> torch.device:
    """The GPU; a CPU for small sizes only. Raises StaError that says what is needed."""
    if not torch.cuda.is_available():
        if small:
            return torch.device("cpu")
        raise StaError(
            "the benchmark needs an NVIDIA GPU of compute capability 8.0 or later with 24 GB of memory, and there is none; "
            "pass --small for sizes that a CPU can do"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    target = detect(device)
    if target.unsupported:
        raise StaError(f"{target.unsupported}; the benchmark needs compute capability 8.0 or later")
    return device


def run(
    workloads: tuple[Workload, ...], options: Options, command: str, seconds_of_warm_up: float = 2.0
) -> tuple[dict[str, Any], list[Row], float | None]:
    """(where and with what, rows, microseconds of the host in a call). Prints a table after each row."""
    from rich.console import Console

    from .table import as_table

    # A pipe has no width of its own; 80 columns would break rows.
    console = Console(width=None if sys.stdout.isatty() else 120)
    head = describe(options.device, command)
    warm_up(matrix_product(options.device)[0], options.device, seconds_of_warm_up)
    rows = []
    for row in measure_all(workloads, options):
        rows.append(row)
        console.print(as_table(row))
    host = host_microseconds(options) if options.device.type == "cuda" else None
    if host is not None:
        console.print(f"a call takes {host:.0f} us of the host")
    return head, rows, host


def describe(device: torch.device, command: str) -> dict[str, Any]:
    """What a stored run is read with later."""
    gpu = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "sta_compile": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def commit() -> str:
    """Of the sources, if they are a checkout; STA_COMMIT where they were copied from one."""
    given = os.environ.get("STA_COMMIT")
    if given:
        return given
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        folder = Path(__file__).parent
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def write(
    head: dict[str, Any],
    rows: Sequence[Row],
    host: float | None,
    json_path: str | None,
    chart_path: str | None,
) -> None:
    if json_path is not None:
        record: list[dict[str, Any]] = [head, *(row.to_dict() for row in rows)]
        record += [] if host is None else [{"host_us_per_call": host}]
        Path(json_path).write_text(json.dumps(record, indent=1) + "\n")
    if chart_path is not None:
        from .chart import draw

        draw(rows, str(head["device"])).savefig(chart_path, dpi=150)


def host_microseconds(options: Options, rounds: int = 20, calls: int = 100) -> float:
    """Python and launch of a call that the GPU finishes at once: the quietest of some rounds of calls."""
    inputs = Inputs.make(HOST, options.device)
    arguments = inputs.call(options.kernel)[:9]
    torch.ops.sta.attention(*arguments)
    spent = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            torch.ops.sta.attention(*arguments)
        spent.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return min(spent) / calls * 1e6
