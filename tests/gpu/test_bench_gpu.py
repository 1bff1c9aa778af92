"""The benchmark on a real GPU, in sizes that take no time."""

from __future__ import annotations

import json

import pytest
import torch

from sta_compile.__main__ import main
from sta_compile.bench.clock import clock_of
from sta_compile.bench.workloads import SMALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_small_sizes(tmp_path):
    found = tmp_path / "bench.json"
    arguments = ["--small", "--kernel", "triton", "--seconds", "0.2", "--kernels"]
    arguments += ["--json", str(found)]
    assert main(["bench", *arguments, "--chart", str(tmp_path / "bench.png")]) == 0
    head, *rows, host = json.loads(found.read_text())
    assert head["device"] == torch.cuda.get_device_name()
    assert host["host_us_per_call"] > 0
    by_name = {row["workload"]: row for row in rows}
    assert by_name.keys() == {workload.name for workload in SMALL}
    small = by_name["small 333"]
    assert small["kernel"].startswith("triton forward")
    assert small["ms"].keys() >= {"sta", "flash", "flex STA", "flex NATTEN", "flex Swin"}
    assert small["extra_bytes"] < 1 << 20
    assert len(small["kernels"]) > 3
    assert by_name["small 333 backward"]["ms"].keys() >= {"sta", "flash", "flex STA"}


def test_the_clock_is_read_where_the_driver_has_one():
    clock = clock_of(torch.device("cuda", 0))
    if clock is None:
        pytest.skip("no management library here")
    assert all(100 < value < 5000 for value in clock.megahertz())
