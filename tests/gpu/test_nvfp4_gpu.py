"""precision="nvfp4" on a GPU: what is quantized against tiers.formats, bit for bit, and attention against its reference.

Blackwell runs the kernel that users get. Hopper has no FP4 products and runs the same kernel on operands that are exact in
bfloat16, which only this test asks for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from sta_compile.codegen.triton_nvfp4 import TritonNvfp4
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.kernel_spec import Blocks
from sta_compile.ir.visibility import Visibility
from sta_compile.ops import quantized_reference
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import launch, say
from sta_compile.runtime.problem import problem_of
from sta_compile.runtime.quantize import shown_keys
from sta_compile.runtime.quantize_nvfp4 import conversion, quantized_nvfp4
from sta_compile.runtime.tensors import Tensors
from sta_compile.tiers.formats import nvfp4_scale, quantize_e4m3, quantize_nvfp4
from tests import oracle
from tests.gpu.cases import SMALL, problem, relative, tensors

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (9, 0), reason="needs a Hopper or Blackwell GPU"),
]
BLACKWELL = CAPABILITY >= (10, 0)
NEAR = 3e-2  # blocks of packed keys have other maxima, below which weights are rounded
ERROR = 0.17  # on N(0, 1)
GRID, TILES, WINDOW = (7, 13, 17), (3, 3, 4), (1, 3, 3)
TOKENS = 7 * 13 * 17


def attend(arguments):
    """(out, lse), of the kernel"""
    call = launch.Call(*arguments)
    free = torch.full((call.q.numel() * 4,), torch.nan, device="cuda")
    del free  # what the caching allocator hands out again
    if BLACKWELL:
        out, lse = torch.ops.sta.attention(*arguments)
        assert launch.kernel_of(call).endswith(" nvfp4")
        return out, lse
    geometry = geometry_of(call.segments, call.grid, call.spec)
    out, lse = torch.empty_like(call.q), torch.empty(call.q.shape[:3], device="cuda")
    flags = launch.flags_of(call, geometry.context_keys > 0)
    given = Tensors(*call[:3], out, lse, *flags)
    spec = problem_of(given, geometry, call.scale).spec(TritonNvfp4(), Blocks(64, 64, 4, 2))
    spec = replace(spec, precision="nvfp4")
    assert launch.run(spec, given, geometry, call.scale) is not None
    return out, lse


def check(arguments, mask, error=ERROR):
    out, lse = attend(arguments)
    call = launch.Call(*arguments)
    geometry = geometry_of(call.segments, call.grid, call.spec)
    visible = Visibility(geometry, call.key_lengths, call.key_mask, call.dense, call.video_mask)
    expected, expected_lse = quantized_reference.forward(*call[:3], visible, call.scale, "nvfp4")
    assert torch.isfinite(out).all()
    assert relative(out, expected) < NEAR
    torch.testing.assert_close(lse, expected_lse, atol=NEAR, rtol=1e-3)
    exact, _ = oracle.attention(*(x.double() for x in call[:3]), mask, call.scale)
    assert relative(out, exact) < error


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "fused"])
@pytest.mark.parametrize("case", [case for case in SMALL if len(SMALL[case][4]) <= 5])
def test_cases(case, layout):
    how = (4, 2), 128, torch.bfloat16, layout, "auto"
    check(*problem(case, *how, precision="nvfp4"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [32, 64, 72, 80, 128])
@pytest.mark.parametrize("case", ["ragged", "text on both sides"])
def test_head_dims_and_dtypes(case, head_dim, dtype):
    how = (2, 2), head_dim, dtype, "bnhd", "auto"
    check(*problem(case, *how, precision="nvfp4"))


@pytest.mark.parametrize("shown", [0.0, 0.5])
@pytest.mark.parametrize("hidden", [None, (0, 7, 190), range(192)])
@pytest.mark.parametrize("case", ["text on both sides", "four contexts", "keys before"])
def test_hidden_keys(case, shown, hidden):
    how = (4, 2), 128, torch.bfloat16, "bnhd", "auto"
    check(*problem(case, *how, precision="nvfp4", shown=shown, hidden=hidden))


def inputs(change=lambda q, k, v: (q, k, v), tokens=TOKENS, head_dim=128):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = 1, 2, tokens, head_dim
    made = [tensors(shape, "bnhd", torch.float32, generator) for _ in range(3)]
    return [x.bfloat16() for x in change(*made)]


def arguments_of(q, k, v, grid=GRID, tiles=TILES, window=WINDOW):
    spec = AttentionSpec(("video",), tiles=tiles, window=window, precision="nvfp4").text()
    return [q, k, v, None, None, [q.shape[2]], list(grid), spec, q.shape[3] ** -0.5]


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q, k, v * 1e3),
        lambda q, k, v: (q, k + 30, v),
        lambda q, k, v: (q, k[:, :, :1].expand_as(k), v),
        lambda q, k, v: (q * 0, k * 0, v),
    ],
    ids=["v of 1e3", "k far from zero", "equal keys", "no scores"],
)
def test_hard_inputs(change):
    mask = oracle.full_mask(GRID, TILES, WINDOW, ("video",), [TOKENS], 1, None, None, None, None)
    mask = mask[:, None] if mask.dim() == 3 else mask
    check(arguments_of(*inputs(change)), mask.cuda())


def test_many_keys():
    """170,000 of equal weight, and values with a mean."""
    grid = 8, 16, 1328
    q, k, v = inputs(lambda q, k, v: (q, k * 0, v + 0.5), 8 * 16 * 1328)
    out, lse = attend(arguments_of(q, k, v, grid, (1, 1, 1), "full"))
    expected = v.double().mean(2, keepdim=True).expand(-1, -1, 64, -1)
    assert relative(out[:, :, :64], expected) < 1e-2
    torch.testing.assert_close(lse.exp(), torch.full_like(lse, k.shape[2]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_quantized_bits(head_dim):
    segments, lengths = [TOKENS, 70], torch.tensor([[33], [70]], device="cuda")
    spec = AttentionSpec(("video", "context"), tiles=TILES, window=WINDOW).text()
    geometry = geometry_of(segments, GRID, spec)
    generator = torch.Generator("cuda").manual_seed(0)
    size = torch.logspace(-3, 2, head_dim, device="cuda")
    q, k, v = (
        tensors((2, heads, sum(segments), head_dim), "bnhd", torch.float32, generator) * size
        for heads in (4, 2, 2)
    )
    q[:, :, 3], q[0, 0, 5, 7], v[..., 1] = 0, torch.nan, 0
    # Sums of sixteenths are exact in any order.
    k = torch.randint(-64, 64, k.shape, device="cuda", generator=generator) / 16 + 3
    q, k, v = (x.bfloat16() for x in (q, k, v))
    hidden = ~shown_keys(Visibility(geometry, key_lengths=lengths), k)[:, None, :, None]
    k, v = (x.masked_fill(hidden, torch.nan) for x in (k, v))
    given = Tensors(q, k, v, torch.empty_like(q), q[..., 0].float(), lengths)
    made = quantized_nvfp4(given, geometry, 0.1, conversion(10 * CAPABILITY[0] + CAPABILITY[1]))
    # On the CPU: on a GPU torch divides by a number as it multiplies by the inverse.
    made = type(made)(*(None if x is None else x.cpu() for x in made))
    q, k, v, hidden = (x.float().cpu() for x in (q, k, v, hidden))
    k, v = (x.masked_fill(hidden > 0, 0) for x in (k, v))
    k = (k - k.sum(2, keepdim=True) / (1 - hidden).sum(2, keepdim=True)).masked_fill(hidden > 0, 0)
    scales = nvfp4_scale(q.nan_to_num(0), (3,)), nvfp4_scale(k, (2, 3))
    zeros = 0, 2 * made.q.shape[3] - head_dim
    of_q, of_k = (quantize_nvfp4(pad(x, zeros), s) for x, s in zip((q, k), scales, strict=True))
    of_v, v_scale = quantize_e4m3(v, (2,))
    keep = torch.ones(q.shape[:3], dtype=torch.bool)
    keep[0, 0, 5] = False  # a NaN is in the scale of its group, and its code may be any
    for found, expected in (
        (made.q_scale, scales[0][..., 0]),
        (made.q_scales, of_q.scales),
        (made.q[keep], of_q.codes[keep]),
        (made.k_scale, scales[1][..., 0, 0]),
        (made.k_scales, of_k.scales),
        (made.k, of_k.codes),
        (made.v_scale, v_scale[..., 0, :]),
        (made.v.mT, of_v),
    ):
        bits = torch.uint8 if found.itemsize == 1 else found.dtype
        apart = found.contiguous().view(bits) != expected.contiguous().view(bits)
        assert not apart.any(), f"{int(apart.sum())} of {apart.numel()}"


def test_the_same_bits_in_every_run():
    arguments = arguments_of(*inputs())
    first, _ = attend(arguments)
    for _ in range(3):
        assert torch.equal(attend(arguments)[0], first)


@pytest.mark.skipif(BLACKWELL, reason="Blackwell has FP4")
def test_a_user_on_hopper_gets_native_and_is_told_so(monkeypatch):
    monkeypatch.setattr(say, "_said", set())
    q, k, v = inputs()
    with pytest.warns(RuntimeWarning, match="no FP4 products; pass precision='fp8'"):
        found, _ = torch.ops.sta.attention(*arguments_of(q, k, v))
    native = arguments_of(q, k, v)
    native[7] = native[7].replace(" precision=nvfp4", "")
    assert torch.equal(found, torch.ops.sta.attention(*native)[0])
