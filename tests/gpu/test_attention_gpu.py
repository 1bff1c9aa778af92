"""The Triton kernels on a real GPU against the definition. `kernel=triton` raises if none can run."""

from __future__ import annotations

import warnings

import pytest
import torch

import sta_compile.ops
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.runtime import launch, say
from sta_compile.runtime.prepare import Request, prepare
from tests import oracle
from tests.gpu.cases import SMALL, problem, relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ERROR = {torch.bfloat16: 4e-3, torch.float16: 8e-4, torch.float32: 2e-5}


def poison_free_memory(*sizes):
    """The caching allocator hands these blocks out again, full of NaN."""
    blocks = [torch.full((size,), torch.nan, device="cuda") for size in sizes for _ in range(3)]
    del blocks


def check(
    case, heads, head_dim, dtype, layout, kernel="triton", value_scale=1.0, shown=None, hidden=None
):
    arguments, mask = problem(
        case, heads, head_dim, dtype, layout, kernel, shown, hidden, value_scale
    )
    q, k, v = arguments[:3]
    poison_free_memory(q.numel() * q.itemsize // 4, q.numel() // head_dim)
    out, lse = torch.ops.sta.attention(*arguments)
    expected, expected_lse = oracle.attention(
        q.double(), k.double(), v.double(), mask, head_dim**-0.5
    )
    assert out.stride() == torch.empty_like(q).stride()
    assert relative(out, expected) < ERROR[dtype]
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=2e-4)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "fused"])
@pytest.mark.parametrize("case", SMALL)
def test_cases(case, layout):
    check(case, (4, 2), 128, torch.bfloat16, layout)


@pytest.mark.parametrize("shown", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("case", [case for case in SMALL if len(SMALL[case][3]) > 1])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(128, torch.bfloat16), (72, torch.float16), (64, torch.float32)]
)
def test_key_masks(case, shown, head_dim, dtype):
    check(case, (4, 2), head_dim, dtype, "bnhd", shown=shown)


@pytest.mark.parametrize("shown", [None, 0.5])
@pytest.mark.parametrize("hidden", [(), (0, 7, 190), range(192)])
@pytest.mark.parametrize("case", ["ragged", "text on both sides", "four contexts", "keys before"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.bfloat16), (72, torch.float16)])
def test_masks_over_the_video(case, hidden, shown, head_dim, dtype):
    check(case, (4, 2), head_dim, dtype, "bnhd", shown=shown, hidden=hidden)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 72, 80, 96, 120, 128, 160, 256])
def test_head_dims_and_dtypes(head_dim, dtype):
    check("text on both sides", (2, 2), head_dim, dtype, "bnhd")


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 1)])
def test_shared_key_heads(heads):
    check("text after", heads, 64, torch.bfloat16, "bhnd")


def test_large_values_in_half_precision():
    check("text after", (2, 2), 64, torch.float16, "bhnd", value_scale=1e3)


@pytest.mark.parametrize("shown", [None, 0.5])
@pytest.mark.parametrize("case", ["ragged", "text on both sides", "keys before"])
def test_pointer_loads(case, shown, monkeypatch):
    """What runs when TMA is not there, at a head dim that has it."""
    monkeypatch.setattr(
        "sta_compile.codegen.triton_forward.TritonForward._refuse_tma", lambda *_: "not now"
    )
    monkeypatch.setattr(launch, "_ready", {})
    launch.select.cache_clear()
    check(case, (4, 2), 128, torch.bfloat16, "bnhd", shown=shown)
    launch.select.cache_clear()


def test_rows_that_are_not_aligned():
    grid, segments = [3, 8, 8], [192]
    spec = AttentionSpec(("video",), tiles=(3, 4, 4), window=(1, 3, 3), kernel="triton").text()
    wide = torch.randn(2, 192, 3, 3 * 41, device="cuda", dtype=torch.bfloat16)
    q, k, v = (wide[..., 41 * i + 1 : 41 * i + 41].transpose(1, 2) for i in range(3))
    out, _ = torch.ops.sta.attention(q, k, v, None, None, segments, grid, spec, 0.2)
    exact = spec.replace("triton", "reference")
    expected, _ = torch.ops.sta.attention(q, k, v, None, None, segments, grid, exact, 0.2)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def wan(heads=2, head_dim=128, **kwargs):
    grid = (21, 45, 80)
    tokens = 21 * 45 * 80
    spec = AttentionSpec(("video",), tiles=(4, 5, 11), window=(3, 3, 3), kernel="triton").text()
    shape = (1, tokens, heads, head_dim)
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
    )
    return [q, k, v, None, None, [tokens], list(grid), spec, head_dim**-0.5]


def reference_of(arguments):
    exact = [x.replace("triton", "reference") if isinstance(x, str) else x for x in arguments]
    return torch.ops.sta.attention(*exact)[0]


def test_a_real_grid():
    arguments = wan()
    out, _ = torch.ops.sta.attention(*arguments)
    assert relative(out, reference_of(arguments)) < 4e-3


def test_strides_beyond_two_to_the_31():
    """A fused projection of 80 heads: 75,600 rows of 30,720 elements."""
    arguments = wan()
    tokens, heads = 21 * 45 * 80, 80
    fused = torch.randn(tokens, 3, heads, 128, device="cuda", dtype=torch.bfloat16)
    assert fused.stride(0) * tokens > 2**31
    q, k, v = (fused[:tokens, i, -2:].transpose(0, 1)[None] for i in range(3))
    arguments[:3] = q, k, v
    out, _ = torch.ops.sta.attention(*arguments)
    assert relative(out, reference_of([q.clone(), k.clone(), v.clone(), *arguments[3:]])) < 4e-3


def test_calls_that_are_alike_share_a_launch(monkeypatch):
    monkeypatch.setattr(launch, "_ready", {})
    heads, tokens = 2, 192
    spec = AttentionSpec(("video",), tiles=(3, 4, 4), window=(1, 3, 3), kernel="triton").text()
    problem = (None, None, [tokens], [3, 8, 8], spec, 0.2)
    size = tokens * heads * 64

    def compare(offset, token_major):
        memory = torch.randn(3, 1, size + 8, device="cuda", dtype=torch.bfloat16)
        shape = (3, 1, tokens, heads, 64) if token_major else (3, 1, heads, tokens, 64)
        q, k, v = memory[..., offset : offset + size].view(shape)
        q, k, v = (x.transpose(1, 2) if token_major else x for x in (q, k, v))
        arguments = [q, k, v, *problem]
        out, _ = torch.ops.sta.attention(*arguments)
        assert relative(out, reference_of(arguments)) < 4e-3

    for _ in range(3):
        for offset in (0, 8, 4, 1):  # in elements: the last two make copies
            for token_major in (False, True):
                compare(offset, token_major)
    assert len(launch._ready) == 6  # two layouts, and addresses of three remainders of 16 bytes


def test_no_synchronisation():
    arguments = wan()
    arguments[4] = torch.tensor([True], device="cuda")
    torch.ops.sta.attention(*arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ops.sta.attention(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph_capture():
    arguments = wan()
    arguments[4] = torch.tensor([False], device="cuda")
    torch.ops.sta.attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = torch.ops.sta.attention(*arguments)
    for flag in (False, True):
        arguments[4].fill_(flag)
        arguments[0].normal_()
        graph.replay()
        assert relative(out, reference_of(arguments)) < 4e-3


def test_capture_of_a_kernel_that_is_not_built_uses_the_reference():
    arguments = wan(heads=1, head_dim=48)
    arguments[7] = arguments[7].replace("kernel=triton", "kernel=auto")
    arguments[4] = torch.tensor([True], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.cuda.graph(graph):
            out, _ = torch.ops.sta.attention(*arguments)
    graph.replay()
    assert relative(out, torch.ops.sta.attention(*arguments)[0]) < 4e-3


def test_prepared_kernels_are_not_built_again(monkeypatch):
    arguments = wan(heads=2, head_dim=96)
    geometry = sta_compile.ops.arguments.geometry_of(*arguments[5:8])
    shape, device = tuple(arguments[0].shape), torch.device("cuda")
    names = prepare(
        Request(shape, 2, geometry.keys, torch.bfloat16, device, geometry, 0, kernel="triton")
    )
    assert len(names) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # would raise for a kernel that is not built
        out, _ = torch.ops.sta.attention(*arguments)
    graph.replay()
    assert relative(out, reference_of(arguments)) < 4e-3


def test_a_failing_kernel_falls_back_with_one_warning(monkeypatch):
    arguments = wan(heads=1)
    arguments[7] = arguments[7].replace("kernel=triton", "kernel=auto")
    for name in ("_failed", "_ready", "_built"):
        monkeypatch.setattr(launch, name, {})
    monkeypatch.setattr(say, "_said", set())

    class Broken:
        def build(self, spec, device):
            raise RuntimeError("no registers left")

    monkeypatch.setattr(launch, "runner_of", lambda emitter: Broken())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out, _ = torch.ops.sta.attention(*arguments)
        torch.ops.sta.attention(*arguments)
    *cutlass, tma, pointer, rest = [str(w.message) for w in seen]
    assert len(cutlass) <= 1  # where its packages are installed
    assert "tma" in tma
    assert "pointer" in pointer
    assert all("RuntimeError: no registers left" in message for message in (tma, pointer))
    assert rest.endswith("which is slow: all kernels for it failed")
    monkeypatch.undo()
    assert relative(out, reference_of(arguments)) < 4e-3


def test_gradients_and_autocast():
    arguments = wan(heads=1, head_dim=64)
    q = arguments[0].float().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        out, _ = torch.ops.sta.attention(q, *arguments[1:])
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    q2 = arguments[0].float().requires_grad_()
    exact = [x.float() if i < 2 else x for i, x in enumerate(arguments[1:])]
    reference_of([q2, *exact]).square().sum().backward()
    assert relative(q.grad, q2.grad) < 2e-2


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inside_torch_compile(mode):
    arguments = wan(heads=1, head_dim=64)

    @torch.compile(fullgraph=True, mode=mode)
    def f(q, k, v, dense):
        return torch.ops.sta.attention(q * 1.5, k, v, None, dense, *arguments[5:])[0] + 1

    dense = torch.tensor([False], device="cuda")
    for _ in range(3):
        out = f(*arguments[:3], dense)
    expected = reference_of([arguments[0] * 1.5, *arguments[1:4], dense, *arguments[5:]]) + 1
    assert relative(out, expected) < 4e-3
