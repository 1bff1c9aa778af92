"""The C++ kernels of the backward pass on a Hopper GPU against the derivative of dense masked attention in float64."""

from __future__ import annotations

import re
import warnings
from unittest import mock

import pytest
import torch

from sta_compile import config
from sta_compile.codegen.cutlass_blocks import BLOCKS
from sta_compile.codegen.toolchain import missing
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ops import reference
from sta_compile.runtime import build as building
from sta_compile.runtime import launch, launch_backward, say
from tests.gpu.cases import SMALL as ALL
from tests.gpu.cases import problem, relative, tensors

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
SMALL = [case for case in ALL if len(ALL[case][4]) <= 5]  # four segments beside the video at most
ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=[False, True], ids=["summed", "deterministic"])
def deterministic(request):
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


def derivative(arguments, mask, dout):
    """(out, lse), and (dq, dk, dv) in float64, of what the kernels are given; keys that no query sees count as zeros."""
    q, k, v = (x.double() for x in arguments[:3])
    scale, kv_heads = arguments[8], k.shape[1]
    seen = mask.any(2)[..., None]
    share = q.shape[1] // kv_heads
    k, v = (x.repeat_interleave(share, 1).where(seen, 0) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0)
    out = (weights @ v).to(arguments[0].dtype)
    dout = dout.double()
    dscores = weights * (dout @ v.mT - (dout * out.double()).sum(-1, keepdim=True)) * scale

    def of_keys(x):
        return x.unflatten(1, (kv_heads, share)).sum(2)

    grads = dscores @ k, of_keys(dscores.mT @ q), of_keys(weights.mT @ dout)
    return (out, scores.logsumexp(-1).float()), grads


def gradients(arguments, out, lse, dout):
    for size in (arguments[0].numel() // 2, arguments[1].numel() // 2):
        poison = [torch.full((size,), torch.nan, device="cuda") for _ in range(3)]
        del poison
    if "kernel=cutlass" in arguments[7]:
        no_reference = mock.patch.object(reference, "backward", side_effect=AssertionError)
        with no_reference:
            return torch.ops.sta.attention_backward(dout, *arguments[:3], out, lse, *arguments[3:])
    return torch.ops.sta.attention_backward(dout, *arguments[:3], out, lse, *arguments[3:])


def check(case, heads, head_dim, dtype, layout, **masks):
    arguments, mask = problem(case, heads, head_dim, dtype, layout, "cutlass", **masks)
    generator = torch.Generator("cuda").manual_seed(2)
    dout = tensors(arguments[0].shape, layout, dtype, generator)
    (out, lse), expected = derivative(arguments, mask, dout)
    found = gradients(arguments, out, lse, dout)
    for name, x, wanted, like in zip("qkv", found, expected, arguments[:3], strict=True):
        assert x.stride() == torch.empty_like(like).stride()
        assert relative(x, wanted) < ERROR[dtype], f"d{name}"


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "fused"])
@pytest.mark.parametrize("case", SMALL)
def test_cases(case, layout, deterministic):
    check(case, (4, 2), 128, torch.bfloat16, layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", BLOCKS)
@pytest.mark.parametrize("case", ["ragged", "text on both sides"])
def test_head_dims_and_dtypes(case, head_dim, dtype, deterministic):
    check(case, (2, 2), head_dim, dtype, "bnhd")


@pytest.mark.parametrize("shown", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("case", [case for case in SMALL if len(ALL[case][3]) > 1])
def test_key_masks(case, shown, deterministic):
    check(case, (4, 2), 72, torch.float16, "bnhd", shown=shown)


@pytest.mark.parametrize("shown", [None, 0.5])
@pytest.mark.parametrize("hidden", [(), (0, 7, 190), range(192)])
@pytest.mark.parametrize("case", ["ragged", "text on both sides", "four contexts", "keys before"])
def test_masks_over_the_video(case, hidden, shown, deterministic):
    check(case, (4, 2), 128, torch.bfloat16, "bnhd", shown=shown, hidden=hidden)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 1)])
def test_shared_key_heads(heads, deterministic):
    check("text after", heads, 64, torch.bfloat16, "bhnd")


def video(grid, tiles, window, heads, head_dim=128, batch=1):
    tokens = grid[0] * grid[1] * grid[2]
    q, k, v, dout = (
        torch.randn(batch, tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16).transpose(
            1, 2
        )
        for _ in range(4)
    )
    spec = AttentionSpec(("video",), tiles=tiles, window=window, kernel="cutlass").text()
    return [q, k, v, None, None, [tokens], list(grid), spec, head_dim**-0.5], dout


def reference_of(arguments, out, lse, dout):
    exact = [*arguments]
    exact[7] = re.sub("kernel=.*", "kernel=reference", exact[7])
    return gradients(exact, out, lse, dout)


@pytest.mark.parametrize("window", [(3, 3, 3), (99, 99, 99)])
def test_a_real_grid(window, deterministic):
    arguments, dout = video((21, 45, 80), (4, 5, 11), window, heads=1)
    out, lse = torch.ops.sta.attention(*arguments)
    found = gradients(arguments, out, lse, dout)
    for x, wanted in zip(found, reference_of(arguments, out, lse, dout), strict=True):
        assert relative(x, wanted) < 1e-2


def test_through_autograd_and_a_gradient_that_is_expanded():
    arguments, _ = video((7, 13, 17), (3, 3, 4), (1, 3, 3), heads=2)
    for x in arguments[:3]:
        x.requires_grad_()
    torch.ops.sta.attention(*arguments)[0].sum().backward()
    found = [x.grad.clone() for x in arguments[:3]]
    with torch.no_grad():
        out, lse = torch.ops.sta.attention(*arguments)
        wanted = reference_of(arguments, out, lse, torch.ones_like(out))
    assert relative(found[2], wanted[2]) < 1e-2
    # dq and dk of a sum over all outputs are differences of equal numbers: small beside what is summed.
    for x in found[:2]:
        assert x.isfinite().all()


def test_a_thousand_launches_are_equal():
    torch.use_deterministic_algorithms(True)
    try:
        arguments, dout = video((7, 26, 34), (3, 3, 4), (1, 3, 3), heads=4)
        out, lse = torch.ops.sta.attention(*arguments)
        first = torch.ops.sta.attention_backward(dout, *arguments[:3], out, lse, *arguments[3:])
        for _ in range(1000):
            again = torch.ops.sta.attention_backward(dout, *arguments[:3], out, lse, *arguments[3:])
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_neighbours_of_a_run_have_no_effect(deterministic):
    """Every tile but those of one window and the queries that see one tile holds NaN."""
    grid, tiles, window = (7, 13, 17), (7, 13, 17), (1, 1, 1)
    arguments, dout = video(grid, tiles, window, heads=1)
    out, lse = torch.ops.sta.attention(*arguments)
    expected = gradients(arguments, out, lse, dout)
    for poison in (torch.nan, 1e4):
        others = [x.clone() for x in (*arguments[:3], dout, out)]
        kept = torch.arange(1547, device="cuda") == 700
        for x in others:
            x[:, :, ~kept] = poison
        q, k, v, given, made = others
        found = gradients([q, k, v, *arguments[3:]], made, lse, given)
        for x, wanted in zip(found, expected, strict=True):
            assert torch.equal(x[:, :, 700], wanted[:, :, 700])


def test_nothing_around_the_gradients_is_written(deterministic):
    arguments, dout = video((7, 13, 17), (3, 3, 4), (1, 3, 3), heads=2, head_dim=72, batch=2)
    out, lse = torch.ops.sta.attention(*arguments)
    expected = gradients(arguments, out, lse, dout)
    call = launch.Call(*arguments)
    key = (deterministic, out.stride(), dout.stride(), *launch.key_of(call))
    plan = launch_backward._ready[key]
    made = launch_backward._tensors(call, out, lse, dout, (None,) * 5, plan.adds)
    wide = {
        name: torch.full((out.numel() + 4096,), 7.0, device="cuda", dtype=out.dtype)
        for name in ("dq", "dk", "dv")
    }
    guarded = {name: x[2048:-2048].view(2, 1547, 2, 72).transpose(1, 2) for name, x in wide.items()}
    made = made._replace(**guarded)
    for _, start in plan.steps:
        start(made)
    for name, wanted in zip(guarded, expected, strict=True):
        assert relative(guarded[name], wanted) < 1e-4  # sums in another order
        assert (wide[name][:2048] == 7).all()
        assert (wide[name][-2048:] == 7).all()


def test_memory_is_given_back():
    arguments, dout = video((21, 45, 80), (4, 5, 11), (3, 3, 3), heads=2)
    out, lse = torch.ops.sta.attention(*arguments)
    before = torch.cuda.memory_allocated()
    grads = torch.ops.sta.attention_backward(dout, *arguments[:3], out, lse, *arguments[3:])
    assert torch.cuda.memory_allocated() - before <= sum(x.nbytes for x in grads) + 2**20


def test_cuda_graph_capture():
    arguments, dout = video((7, 26, 34), (3, 3, 4), (1, 3, 3), heads=2)
    out, lse = torch.ops.sta.attention(*arguments)
    gradients(arguments, out, lse, dout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.ops.sta.attention_backward(dout, *arguments[:3], out, lse, *arguments[3:])
    dout.normal_()
    graph.replay()
    for x, wanted in zip(found, reference_of(arguments, out, lse, dout), strict=True):
        assert relative(x, wanted) < 1e-2


def test_a_build_that_fails_leaves_the_reference(monkeypatch, tmp_path):
    arguments, dout = video((7, 13, 17), (3, 3, 4), (1, 3, 3), heads=2)
    out, lse = torch.ops.sta.attention(*arguments)
    for name in ("_failed", "_built"):
        monkeypatch.setattr(launch, name, {})
    monkeypatch.setattr(launch_backward, "_ready", {})
    monkeypatch.setattr(say, "_said", set())

    def broken(*_):
        raise RuntimeError("no registers left")

    monkeypatch.setattr(building, "_compile", broken)
    with config.patch(cache_dir=str(tmp_path)), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = torch.ops.sta.attention_backward(dout, *arguments[:3], out, lse, *arguments[3:])
    assert any("no registers left" in str(w.message) for w in seen)
    for x, wanted in zip(found, reference_of(arguments, out, lse, dout), strict=True):
        assert torch.equal(x, wanted)
