from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from sta_compile.errors import StaError
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.target import Target
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import launch
from sta_compile.runtime.target import detect


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors are taken for those of a Hopper GPU whose kernels can be built or not."""
    monkeypatch.setattr(launch, "detect", lambda device: Target.cuda(90))
    monkeypatch.setattr(launch, "_failed", {})
    monkeypatch.setattr(launch, "_said", set())
    monkeypatch.setattr(launch, "_built", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def call(kernel="triton", grid=(3, 8, 8), dtype=torch.bfloat16, head_dim=64):
    tokens = grid[0] * grid[1] * grid[2]
    spec = AttentionSpec(("video",), tiles=(3, 4, 4), window=(1, 3, 3)).text()
    q, k, v = (torch.randn(1, 2, tokens, head_dim).to(dtype) for _ in range(3))
    geometry = geometry_of([tokens], grid, spec)
    return launch.attention_forward(q, k, v, None, None, geometry, 0.1, kernel)


def test_cpu_runs_the_reference_unless_triton_is_demanded():
    assert call("auto") is None
    assert call("reference") is None
    with pytest.raises(StaError, match=r"kernel='triton' can't run: cpu devices.*pass kernel"):
        call("triton")


def test_kernels_are_tried_in_order_and_each_failure_is_said_once(hopper, monkeypatch):
    tried = []

    def broken(spec):
        tried.append(spec.loads)
        raise RuntimeError("line one\nno registers left")

    monkeypatch.setattr(launch, "_kernel", broken)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            with pytest.raises(StaError, match="no registers left"):
                call()
    assert tried == ["tma", "pointer"]
    assert len(seen) == 2
    assert all("RuntimeError: no registers left" in str(w.message) for w in seen)


def test_nothing_is_built_during_capture(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(launch, "_kernel", lambda spec: pytest.fail("built during capture"))
    with pytest.raises(StaError, match="CUDA graph is being captured"):
        call()


@pytest.mark.parametrize(
    ("hip", "capability"), [("6.4", (9, 5)), ("6.4", (9, 4)), ("7.0", (12, 0))]
)
def test_amd_is_never_taken_for_nvidia(hip, capability, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    detect.cache_clear()
    target = detect(torch.device("cuda", 0))
    detect.cache_clear()
    assert target.kind == "hip"
    assert "AMD" in target.unsupported


@pytest.mark.parametrize("kind", ["cpu", "xpu", "mps"])
def test_other_devices_have_a_reason(kind):
    assert kind in detect(torch.device(kind)).unsupported


def test_old_gpus_have_a_reason():
    assert "older than 8.0" in Target.cuda(75).unsupported
    assert not Target.cuda(120).unsupported


def test_import_and_cpu_work_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, sta_compile.ops\n"
        "from sta_compile.ir.attention_spec import AttentionSpec\n"
        "spec = AttentionSpec(('video',), tiles=(1, 1, 3), window=(1, 1, 1)).text()\n"
        "q = torch.randn(1, 1, 6, 8)\n"
        "torch.ops.sta.attention(q, q, q, None, None, [6], [1, 1, 6], spec, 1.0)\n"
        "assert 'sta_compile.codegen.triton' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_prepare_on_a_cpu_does_nothing():
    geometry = geometry_of(
        [192], (3, 8, 8), AttentionSpec(("video",), tiles=(3, 4, 4), window="full").text()
    )
    shape, device = (1, 2, 192, 64), torch.device("cpu")
    assert launch.prepare(shape, 2, torch.bfloat16, device, geometry, 0) == ()
