"""precision="fp8" on a Hopper GPU against the definition, and its quantized operands against tiers.formats, bit for bit."""

from __future__ import annotations

import warnings

import pytest
import torch

from sta_compile.codegen.cutlass_blocks import FP8_BLOCKS
from sta_compile.codegen.toolchain import missing
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.visibility import Visibility
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import launch, quantize, say
from sta_compile.runtime.tensors import Tensors
from sta_compile.tiers.formats import quantize_e4m3
from tests import oracle
from tests.codegen.interpreted_quantize import in_order
from tests.gpu.cases import SMALL, problem, relative, tensors

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
ERROR = 5.5e-2  # on N(0, 1)


def attend(arguments):
    """(out, lse), of the kernel in e4m3"""
    free = torch.full((arguments[0].numel() * 4,), torch.nan, device="cuda")
    del free  # what the caching allocator hands out again
    out, lse = torch.ops.sta.attention(*arguments)
    assert launch.kernel_of(launch.Call(*arguments)).endswith(" fp8")
    return out, lse


def check(case, heads, head_dim, dtype=torch.bfloat16, layout="bnhd", **masks):
    arguments, mask = problem(
        case, heads, head_dim, dtype, layout, "auto", precision="fp8", **masks
    )
    out, lse = attend(arguments)
    q, k, v = (x.double() for x in arguments[:3])
    expected, expected_lse = oracle.attention(q, k, v, mask, head_dim**-0.5)
    assert out.stride() == torch.empty_like(arguments[0]).stride()
    assert relative(out, expected) < ERROR
    torch.testing.assert_close(lse.double(), expected_lse, atol=0.25, rtol=0)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "fused"])
@pytest.mark.parametrize("case", [case for case in SMALL if len(SMALL[case][4]) <= 5])
def test_cases(case, layout):
    check(case, (4, 2), 128, layout=layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", FP8_BLOCKS)
@pytest.mark.parametrize("case", ["ragged", "text on both sides"])
def test_head_dims_and_dtypes(case, head_dim, dtype):
    check(case, (2, 2), head_dim, dtype)


@pytest.mark.parametrize("shown", [0.0, 0.5])
@pytest.mark.parametrize("hidden", [None, (0, 7, 190), range(192)])
@pytest.mark.parametrize("case", ["text on both sides", "four contexts", "keys before"])
def test_hidden_keys(case, shown, hidden):
    check(case, (4, 2), 128, shown=shown, hidden=hidden)


GRID, TILES, WINDOW = (7, 13, 17), (3, 3, 4), (1, 3, 3)
TOKENS = 7 * 13 * 17


def inputs(change=lambda q, k, v: (q, k, v), tokens=TOKENS, head_dim=128):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = 1, 2, tokens, head_dim
    made = [tensors(shape, "bnhd", torch.float32, generator) for _ in range(3)]
    return [x.bfloat16() for x in change(*made)]


def arguments_of(q, k, v, grid=GRID, tiles=TILES, window=WINDOW):
    spec = AttentionSpec(("video",), tiles=tiles, window=window, precision="fp8").text()
    return [q, k, v, None, None, [q.shape[2]], list(grid), spec, q.shape[3] ** -0.5]


def outliers(q, k, v):
    large = torch.ones(q.shape[3], device="cuda")
    large[[3, 77]] = 50
    return q * large, k / large, v * large


def zeros(q, k, v):
    q[:, :, 100:300], k[:, :, 200:500], v[:, :, 300:600] = 0, 0, 0
    return q, k, v


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        (lambda q, k, v: (q * 20, k, v), 0.3),  # logits of standard deviation 20
        (lambda q, k, v: (q, k, v * 1e3), ERROR),
        (lambda q, k, v: (q, k + 30, v), ERROR),
        (outliers, 7e-2),
        (zeros, ERROR),
        (lambda q, k, v: (q, k[:, :, :1].expand_as(k), v), ERROR),
        (lambda q, k, v: (q * 0, k * 0, v), ERROR),
    ],
    ids=["std 20", "v of 1e3", "k far from zero", "outliers", "zeros", "equal keys", "no scores"],
)
def test_hard_inputs(change, bound):
    q, k, v = inputs(change)
    out, _ = attend(arguments_of(q, k, v))
    mask = oracle.full_mask(GRID, TILES, WINDOW, ("video",), [TOKENS], 1, None, None, None, None)
    mask = mask[:, None] if mask.dim() == 3 else mask
    expected, _ = oracle.attention(q.double(), k.double(), v.double(), mask.cuda(), 128**-0.5)
    assert torch.isfinite(out).all()
    assert relative(out, expected) < bound


def test_equal_values_come_out_as_they_are():
    q, k, v = inputs(lambda q, k, v: (q, k, v[:, :, :1].expand_as(v)))
    out, _ = attend(arguments_of(q, k, v))
    torch.testing.assert_close(out, v.expand_as(out), atol=0, rtol=2e-2)


@pytest.mark.parametrize("needle", [False, True])
def test_many_keys(needle):
    """170,000 of them: flat, and with one that weighs as much as all others."""
    grid = 8, 16, 1328
    tokens = 8 * 16 * 1328
    q, k, v = inputs(lambda q, k, v: (q, k * 0, v + 0.5), tokens)
    if needle:
        k[:, :, 77_777] = q[:, :, 0] * 1.05
    out, lse = attend(arguments_of(q, k, v, grid, (1, 1, 1), "full"))
    rows = q[:, :, :64].double()
    scores = rows @ k.double().mT * 128**-0.5
    expected = scores.softmax(-1) @ v.double()
    assert relative(out[:, :, :64], expected) < 1e-2
    torch.testing.assert_close(lse[:, :, :64].double(), scores.logsumexp(-1), atol=5e-2, rtol=0)


@pytest.mark.parametrize("head_dim", FP8_BLOCKS)
def test_quantized_bits(head_dim, monkeypatch):
    segments, lengths = [1547, 70], torch.tensor([[33], [70]], device="cuda")
    spec = AttentionSpec(("video", "context"), tiles=TILES, window=WINDOW).text()
    geometry = geometry_of(segments, GRID, spec)
    generator = torch.Generator("cuda").manual_seed(0)
    size = torch.logspace(-3, 2, head_dim, device="cuda")
    q, k, v = (
        (tensors((2, heads, 1617, head_dim), "bnhd", torch.float32, generator) * size).bfloat16()
        for heads in (4, 2, 2)
    )
    hidden = torch.arange(1617, device="cuda") >= lengths + 1547
    for x in (k, v):
        x.masked_fill_(hidden[:, None, :, None], torch.nan)
    given = Tensors(q, k, v, torch.empty_like(q), q[..., 0].float(), lengths)
    assert torch.equal(quantize.shown_keys(Visibility(geometry, key_lengths=lengths), k), ~hidden)
    kept = []
    make = quantize.empty_mean
    monkeypatch.setattr(quantize, "empty_mean", lambda *x: kept.append(make(*x)) or kept[0])
    made = quantize.quantized(given, geometry, 0.1)
    mean = kept[0][:, :head_dim].view(2, 2, 1, head_dim)
    # On the CPU: on a GPU torch divides by a number as it multiplies by the inverse.
    q, k, v, hidden, mean = (x.cpu() for x in (q, k, v, hidden, mean))
    k, v = (x.float().masked_fill(hidden[:, None, :, None], 0) for x in (k, v))
    exact = k.double().sum(2, keepdim=True) / (~hidden).sum(1)[:, None, None, None]
    torch.testing.assert_close(mean.double(), exact, atol=1e-5, rtol=1e-4)
    smoothed = (k - mean).masked_fill(hidden[:, None, :, None], 0)
    pairs = (
        (made.q, made.q_scale, quantize_e4m3(q, (3,))),
        (in_order(made.k)[:, :, :1617], made.k_scale, quantize_e4m3(smoothed, (2, 3))),
        (made.v.mT, made.v_scale, quantize_e4m3(v, (2,))),
    )
    for values, scale, (of_values, of_scale) in pairs:
        torch.testing.assert_close(scale.cpu().flatten(), of_scale.flatten(), atol=0, rtol=0)
        apart = values.cpu() != of_values.view(torch.uint8)
        assert not apart.any(), f"{int(apart.sum())} of {apart.numel()} bytes"


def test_the_same_bits_in_every_run_and_in_a_graph():
    arguments = arguments_of(*inputs())
    first, _ = attend(arguments)
    for _ in range(3):
        assert torch.equal(attend(arguments)[0], first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = torch.ops.sta.attention(*arguments)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, first)


def test_what_has_no_fp8_runs_as_native_and_says_so(monkeypatch):
    monkeypatch.setattr(say, "_said", set())
    q, k, v = inputs(head_dim=72)
    with pytest.warns(RuntimeWarning, match="runs as 'native': head dim 72 has no fp8 kernel"):
        found, _ = torch.ops.sta.attention(*arguments_of(q, k, v))
    native = arguments_of(q, k, v)
    native[7] = native[7].replace(" precision=fp8", "")
    assert torch.equal(found, torch.ops.sta.attention(*native)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.ops.sta.attention(*arguments_of(q, k, v))
