"""Runs a function in two gloo processes on this machine.

def work() -> dict: ...                                  a function of a module; returns what JSON holds
for found in in_two_processes(__name__, "work"): ...
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[3]


def in_two_processes(module: str, function: str) -> list[dict[str, Any]]:
    """What the function returns in each of them."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__, module, function, str(rank)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main(module: str, function: str, rank: str) -> None:
    """In one of the processes: everything but inductor, as in the tests of one."""
    from importlib import import_module

    from sta_compile import _torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(rank), world_size=2)
    _torch.compile_with_inductor = lambda gm, inputs, **_: gm.forward
    with torch.no_grad():
        print(json.dumps(getattr(import_module(module), function)()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
