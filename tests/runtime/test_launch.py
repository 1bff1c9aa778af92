from __future__ import annotations

import subprocess
import sys
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from sta_compile.errors import StaError
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.target import Target
from sta_compile.ir.visibility import Visibility
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import launch
from sta_compile.runtime.target import detect


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors are taken for those of a Hopper GPU whose kernels can be built or not."""
    monkeypatch.setattr(launch, "detect", lambda device: Target.cuda(90))
    monkeypatch.setattr(launch, "_failed", {})
    monkeypatch.setattr(launch, "_ready", {})
    monkeypatch.setattr(launch, "_said", set())
    monkeypatch.setattr(launch, "_built", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())


class Kernel:
    """Takes the place of a Triton function: first launches are by keyword, later ones are bound."""

    def __init__(self):
        self.first, self.again, self.broken = [], [], False

    def __getitem__(self, grid):
        return partial(self.launch, grid)

    def launch(self, grid, *arguments, **options):
        self.first.append((grid, *arguments))
        return Compiled(self)


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def start(*arguments):
            if self.kernel.broken:
                raise RuntimeError("gone")
            self.kernel.again.append((grid, *arguments))

        return start


@pytest.fixture
def kernel(hopper, monkeypatch):
    made = Kernel()
    monkeypatch.setattr(launch, "_kernel", lambda spec: (made, ("constants", spec.loads), {}))
    return made


SPEC = AttentionSpec(("video", "context"), tiles=(3, 4, 4), window=(1, 3, 3)).text()


def call(
    kernel="triton",
    grid=(3, 8, 8),
    dtype=torch.bfloat16,
    head_dim=64,
    token_major=False,
    offset=0,
    dense=False,
    masked=False,
    video_masked=False,
    scale=0.1,
):
    """offset: of the tensors from the start of their memory, in elements."""
    video = grid[0] * grid[1] * grid[2]
    tokens = video + 5
    count = 2 * tokens * head_dim

    def tensor():
        x = torch.randn(count + offset).to(dtype)[offset:]
        if token_major:
            return x.view(1, tokens, 2, head_dim).transpose(1, 2)
        return x.view(1, 2, tokens, head_dim)

    flags = torch.ones(1, dtype=torch.bool) if dense else None
    geometry = geometry_of([video, 5], grid, SPEC)
    mask = torch.ones(1, 5, dtype=torch.bool) if masked else None
    of_video = torch.ones(1, video, dtype=torch.bool) if video_masked else None
    visible = Visibility(geometry, key_mask=mask, dense=flags, video_mask=of_video)
    return launch.attention_forward(tensor(), tensor(), tensor(), visible, scale, kernel)


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


def test_refusals_are_not_blamed_for_a_failure(hopper, monkeypatch):
    def broken(spec):
        raise RuntimeError("no registers left")

    monkeypatch.setattr(launch, "_kernel", broken)
    with pytest.warns(RuntimeWarning), pytest.raises(StaError, match="no registers left"):
        call(head_dim=96)  # has no TMA kernel


def test_the_last_warning_repeats_no_reason(hopper, monkeypatch):
    monkeypatch.setattr(launch, "_kernel", lambda spec: None)  # not what _run expects
    monkeypatch.setattr(launch, "detect", lambda device: Target.cuda(90, name=device.type))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            q = torch.randn(1, 2, 192, 64, device="meta", dtype=torch.bfloat16)
            visible = Visibility(geometry_of([192, 0], (3, 8, 8), SPEC))
            assert launch.attention_forward(q, q, q, visible, 0.1, "auto") is None
    tma, pointer, last = [str(warning.message) for warning in seen]
    assert "TypeError" in tma
    assert "TypeError" in pointer
    assert last.endswith("which is slow: all kernels for it failed")


def test_a_call_like_an_earlier_one_goes_straight_to_the_binary(kernel, monkeypatch):
    call()
    assert len(kernel.first) == 1
    monkeypatch.setattr(launch, "select", lambda *_: pytest.fail("chosen again"))
    out, _ = call()
    (grid, *arguments), (again_grid, *again) = kernel.first[0], kernel.again[0]
    assert len(kernel.first) == len(kernel.again) == 1
    assert grid == again_grid
    assert len(arguments) == len(again)
    assert again[3].shape == out.shape  # q
    assert again[6] is out
    assert arguments[6] is not out
    assert again[0].base is again[3]
    numbers = slice(13, None)  # after descriptors and tensors
    assert arguments[numbers] == again[numbers]
    assert again[-2:] == ["constants", "tma"]


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 128},
        {"dtype": torch.float16},
        {"grid": (3, 8, 16)},
        {"token_major": True},
        {"dense": True},
        {"masked": True},
        {"video_masked": True},
        {"scale": 0.2},
    ],
)
def test_calls_that_differ_are_bound_anew(kernel, change):
    call()
    call(**change)
    assert (len(kernel.first), len(kernel.again)) == (2, 0)


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_rows_that_are_not_aligned_are_copied(kernel, offset):
    call()
    call(offset=offset)
    assert (len(kernel.first), len(kernel.again)) == (1, 1)
    assert all(x.data_ptr() % 16 == 0 for x in kernel.again[0][4:8])


def test_a_binary_that_breaks_gives_way(kernel):
    call()
    kernel.broken = True
    with pytest.warns(RuntimeWarning, match="tma.*RuntimeError: gone"):
        call()
    assert [launched[-1] for launched in kernel.first] == ["tma", "pointer"]


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
    assert launch.prepare(shape, 2, 192, torch.bfloat16, device, geometry, 0) == ()
