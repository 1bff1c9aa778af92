from __future__ import annotations

import subprocess
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch

from sta_compile.errors import StaError
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.target import Target
from sta_compile.ir.visibility import Visibility
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import launch, problem, say
from sta_compile.runtime.target import _detect, detect
from sta_compile.runtime.tensors import is_aligned


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors are taken for those of a Hopper GPU whose kernels can be built or not."""
    monkeypatch.setattr(problem, "detect", lambda device: Target.cuda(90))
    monkeypatch.setattr(launch, "_failed", {})
    monkeypatch.setattr(launch, "_ready", {})
    monkeypatch.setattr(launch, "_built", {})
    monkeypatch.setattr(say, "_said", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())


class Runner:
    """Takes the place of every emitter's."""

    def __init__(self):
        self.built, self.bound, self.started = [], [], []
        self.unbuildable, self.unbindable, self.broken = set(), set(), set()  # spec.loads

    def build(self, spec, device):
        self.built.append(spec)
        if spec.loads in self.unbuildable:
            raise RuntimeError("line one\nno registers left")
        return f"binary of {spec.loads}"

    def bind(self, spec, binary, tensors, geometry, scale, price=0.0):
        assert binary == f"binary of {spec.loads}"
        if spec.loads in self.unbindable:
            raise TypeError("what is this")
        self.bound.append((spec, scale))

        def start(tensors):
            if spec.loads in self.broken:
                raise RuntimeError("gone")
            self.started.append((spec, tensors))

        return start


@pytest.fixture
def runner(hopper, monkeypatch):
    made = Runner()
    monkeypatch.setattr(launch, "runner_of", lambda emitter: made)
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
    mask = torch.ones(1, 5, dtype=torch.bool) if masked else None
    of_video = torch.ones(1, video, dtype=torch.bool) if video_masked else None
    arguments = None, flags, [video, 5], list(grid), SPEC, scale, mask, of_video
    return attend(tensor(), tensor(), tensor(), *arguments, kernel=kernel)


def attend(*arguments, kernel):
    """As the operator does."""
    call = launch.Call(*arguments)
    key = launch.key_of(call)
    again = launch.launch_again(call, key)
    if again is not None:
        return again
    geometry = geometry_of(call.segments, call.grid, call.spec)
    masks = call.key_mask, call.dense, call.video_mask
    visible = Visibility(geometry, call.key_lengths, *masks)
    return launch.attention_forward(call, visible, kernel, key)


def test_cpu_runs_the_reference_unless_triton_is_demanded():
    assert call("auto") is None
    assert call("reference") is None
    with pytest.raises(StaError, match=r"kernel='triton' can't run: cpu devices.*pass kernel"):
        call("triton")


def test_kernels_are_tried_in_order_and_each_failure_is_said_once(runner):
    runner.unbuildable = {"tma", "pointer"}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            with pytest.raises(StaError, match="no registers left"):
                call()
    assert [spec.loads for spec in runner.built] == ["tma", "pointer"]
    assert len(seen) == 2
    assert all("RuntimeError: no registers left" in str(w.message) for w in seen)


def test_refusals_are_not_blamed_for_a_failure(runner):
    runner.unbuildable = {"pointer"}
    with pytest.warns(RuntimeWarning), pytest.raises(StaError, match="no registers left"):
        call(head_dim=96)  # has no TMA kernel


def test_the_last_warning_repeats_no_reason(runner, monkeypatch):
    runner.unbindable = {"tma", "pointer"}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            q = torch.randn(1, 2, 192, 64, device="meta", dtype=torch.bfloat16)
            arguments = q, q, q, None, None, [192, 0], [3, 8, 8], SPEC, 0.1
            assert attend(*arguments, kernel="auto") is None
    *failures, last = [str(warning.message) for warning in seen]
    assert len(failures) >= 2  # one for each kernel that can be built here
    assert all("TypeError" in text for text in failures)
    assert last.endswith("which is slow: all kernels for it failed")


def test_a_call_like_an_earlier_one_goes_straight_to_the_binary(runner, monkeypatch):
    call()
    assert len(runner.bound) == 1
    monkeypatch.setattr(launch, "select", lambda *_: pytest.fail("chosen again"))
    out, lse = call()
    assert len(runner.bound) == 1
    (first_spec, first), (spec, again) = runner.started
    assert first_spec == spec
    assert again.out is out
    assert again.lse is lse
    assert first.out is not out


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
def test_calls_that_differ_are_bound_anew(runner, change):
    call()
    call(**change)
    assert len(runner.bound) == len(runner.started) == 2


def test_a_binary_is_built_once_for_all_that_differ_in_lengths(runner):
    for change in ({}, {"grid": (3, 8, 16)}, {"scale": 0.2}, {"token_major": True}):
        call(**change)
    assert len(runner.built) == 1
    assert len(runner.bound) == 4


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_rows_that_are_not_aligned_are_copied(runner, offset):
    call(offset=offset)
    call(offset=offset)
    assert len(runner.bound) == 1
    for _, tensors in runner.started:
        assert all(x.data_ptr() % 16 == 0 for x in tensors[:4])


def test_strides_of_axes_of_one_need_no_alignment():
    x = torch.zeros(3 * 64 + 5, dtype=torch.bfloat16)
    assert is_aligned(x.as_strided((1, 1, 3, 64), (13, 7, 64, 1)))
    assert not is_aligned(x.as_strided((1, 2, 3, 64), (13, 4, 64, 1)))


def test_masks_are_given_as_kernels_expect_them(runner):
    """A mask that starts anywhere is copied to where a compiler was told that it is."""
    flags = torch.ones(17, dtype=torch.bool)[1:2]
    q = torch.randn(1, 2, 197, 64).to(torch.bfloat16)
    attend(q, q, q, None, flags, [192, 5], [3, 8, 8], SPEC, 0.1, kernel="triton")
    ((_, tensors),) = runner.started
    assert tensors.dense.data_ptr() % 16 == 0
    assert torch.equal(tensors.dense, flags)


def test_a_binary_that_breaks_gives_way(runner):
    call()
    runner.broken = {"tma"}
    with pytest.warns(RuntimeWarning, match="tma.*RuntimeError: gone"):
        call()
    assert [spec.loads for spec, _ in runner.started] == ["tma", "pointer"]


def test_nothing_is_built_during_capture(runner, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(StaError, match="CUDA graph is being captured"):
        call()
    assert not runner.built
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call(scale=0.3)  # another binding of what is built
    assert len(runner.started) == 2


@pytest.mark.parametrize(
    ("hip", "capability"), [("6.4", (9, 5)), ("6.4", (9, 4)), ("7.0", (12, 0))]
)
def test_amd_is_never_taken_for_nvidia(hip, capability, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    _detect.cache_clear()
    target = detect(torch.device("cuda", 0))
    _detect.cache_clear()
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
