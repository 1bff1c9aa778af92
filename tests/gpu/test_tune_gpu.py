"""mode="max-autotune" on a real GPU: kernels are measured once, and the choice runs."""

from __future__ import annotations

import pytest
import torch

import sta_compile
from sta_compile import config
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import launch, tune
from sta_compile.runtime.prepare import Request
from tests.end_to_end.tiny import TinyVideo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SPEC = AttentionSpec(("video", "context"), tiles=(3, 4, 4), window=(1, 3, 3))


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "_tuned", {})
    with config.patch(cache_dir=str(tmp_path)):
        yield


def relative(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_measured_runs(dtype):
    segments, grid = [12 * 32 * 32, 200], [12, 32, 32]
    geometry = geometry_of(segments, grid, SPEC.text())
    tokens, device = sum(segments), torch.device("cuda", torch.cuda.current_device())
    shape = (1, 4, tokens, 128)
    request = Request(
        shape, 4, tokens, dtype, device, geometry, 1, lengths=torch.int64, dense=True, scale=0.1
    )
    found = tune.tune(request, "test")
    assert not found.stored
    assert len(found.milliseconds) > 4
    q, k, v = (
        torch.randn(1, tokens, 4, 128, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(3)
    )
    lengths, dense = torch.tensor([[77]], device="cuda"), torch.tensor([False], device="cuda")

    def run(choice):
        text = SPEC.text() + (f" choice={choice}" if choice else "")
        call = launch.Call(q, k, v, lengths, dense, segments, grid, text, 0.1)
        out = torch.ops.sta.attention(*call[:9])[0]
        return out, launch.kernel_of(call)

    out, kernel = run(found.choice)
    assert kernel == min(found.milliseconds, key=lambda name: found.milliseconds[name])
    assert relative(out, run("")[0]) < 1e-2
    tune._tuned.clear()
    again = tune.tune(request, "test")
    assert again.stored
    assert again.choice == found.choice


def test_a_model_measures_once_and_has_the_same_bits():
    torch.manual_seed(0)
    model = TinyVideo(head_dim=64).to("cuda", torch.bfloat16).eval()
    video = torch.randn(1, 4, 6, 32, 32, device="cuda", dtype=torch.bfloat16)
    options = {"min_tokens": 0, "dense_above": None, "window": (6, 12, 12), "max_autotune": True}
    outputs, reports = [], []
    with torch.no_grad():
        for _ in range(2):
            torch._dynamo.reset()
            tune._tuned.clear()
            outputs.append(torch.compile(model, backend="sta", options=options)(video))
            (report,) = sta_compile.reports()
            reports.append(report)
    assert "measured on 6x32x32 tokens" in reports[0].measured[0]
    assert "(stored)" not in reports[0].measured[0]
    assert reports[1].measured[0].endswith("(stored)")
    assert torch.equal(*outputs)
