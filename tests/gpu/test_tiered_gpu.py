"""The kernel with tiers on a Hopper GPU, against its definition with tiers at random, and the whole operator against its
reference."""

from __future__ import annotations

import pytest
import torch

from sta_compile.codegen.cutlass_blocks import TIER_BLOCKS
from sta_compile.codegen.toolchain import missing
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.geometry import Geometry
from sta_compile.ir.kernel_spec import KernelSpec
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.trade import Trade
from sta_compile.ir.window import Window
from sta_compile.runtime import launch
from sta_compile.runtime.cutlass_runner import CutlassRunner, start_of_tiers
from sta_compile.runtime.quantize import quantized
from sta_compile.runtime.tensors import Tensors, TieredTensors
from sta_compile.runtime.tiered import plan_of
from sta_compile.tiers.statistics import key_statistics
from tests.gpu.cases import relative

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
SHARES = ((1.0, 0.0), (0.0, 0.0), (0.3, 0.0), (0.0, 1.0), (0.0, 0.3), (0.2, 0.3))  # refine, skim
CASES = {
    "tiles of 384": ((6, 16, 16), (1, 2, 2), (0, 0), (2, 2), None),
    "ragged": ((5, 9, 11), (1, 3, 3), (0, 0), (2, 2), None),
    "ragged, text": ((5, 9, 11), (2, 2, 3), (70, 33), (4, 2), None),
    "a dense sample": ((12, 16, 16), (2, 2, 2), (0, 33), (2, 2), (False, True)),
}


class Problem:
    """Random operands with a mean, NaN where a kernel writes; tiers at random."""

    def __init__(self, case, head_dim, dtype=torch.bfloat16):
        grid, tiles, (before, after), (heads, kv_heads), dense = CASES[case]
        self.tiling, self.before = Tiling(grid, tiles), before
        segments = [
            (before, "context"),
            (self.tiling.tokens, "video"),
            (after, "context"),
        ]
        given = [each for each in segments if each[0]]
        self.geometry = Geometry(
            tuple(n for n, _ in given), tuple(role for _, role in given), self.tiling, Window(tiles)
        )
        generator = torch.Generator("cuda").manual_seed(0)
        batch, tokens = (2 if dense else 1), self.geometry.keys

        def make(count):
            shape = batch, tokens, count, head_dim
            x = torch.randn(shape, device="cuda", dtype=dtype, generator=generator)
            return x.transpose(1, 2)

        q, k, v = make(heads), make(kv_heads), make(kv_heads)
        v += k  # values that lean with their keys
        k += torch.randn(head_dim, device="cuda", dtype=dtype, generator=generator)
        out = torch.full_like(q, torch.nan)
        lse = torch.full(q.shape[:3], torch.nan, device="cuda")
        self.dense = None if dense is None else torch.tensor(dense, device="cuda")
        self.tensors = Tensors(q, k, v, out, lse, None, self.dense)
        self.scale = head_dim**-0.5
        name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        blocks = TIER_BLOCKS[head_dim]
        self.spec = KernelSpec(
            *("cutlass", "forward", 90, name, head_dim, blocks, "tma", 0, "", False),
            precision="tiered",
        )
        self.plan = plan_of(self.spec, self.tensors, self.geometry)
        made = quantized(self.tensors, self.geometry, self.scale, sources=self.plan.sources)
        self.bytes = made.q, made.k, made.v, made.q_scale, made.k_scale, made.v_scale, made.shift
        video = slice(before, before + self.tiling.tokens)
        self.means = key_statistics(k[:, :, video], v[:, :, video], self.plan.blocks)

    def launch(self, refine, skim):
        """The kernel's output, with so many blocks of each tier; a second launch has the same bits."""
        q = self.tensors.q
        blocks = self.plan.blocks.runs
        shape = *q.shape[:2], len(self.plan.rows.runs), len(blocks)
        u = torch.rand(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        self.tiers = tiers = (u < refine + skim).int() + (u < refine)
        counts = torch.stack([(tiers == 2).sum(-1), (tiers == 1).sum(-1)], -1).int()
        order = tiers.argsort(dim=-1, descending=True, stable=True).int()
        bias = (blocks[:, 1].float().log() / self.scale).expand(shape)
        bias = bias.masked_fill(tiers > 0, -torch.inf)
        padding = -shape[-1] % 128
        bias = torch.nn.functional.pad(bias, (0, padding), value=-torch.inf).contiguous()
        lists = bias, order, counts, blocks, self.plan.byte_blocks
        means = self.means.mean_k, self.means.mean_v, self.means.slope(self.scale).mT.contiguous()
        tensors = TieredTensors(*self.tensors[:5], *self.bytes, *means, *lists, *self.tensors[5:])
        binary = CutlassRunner().build(self.spec, 0)
        start = start_of_tiers(self.spec, binary, self.tensors, self.plan, self.scale)
        start(tensors)
        first = self.tensors.out.clone()
        for _ in range(20):
            start(tensors)
        assert torch.equal(first, self.tensors.out)
        return first, self.tensors.lse

    def expected(self):
        q, k, v = (x.float() for x in self.tensors[:3])
        share = q.shape[1] // k.shape[1]
        mean_k, mean_v = (
            x.float().repeat_interleave(share, 1) for x in (self.means.mean_k, self.means.mean_v)
        )
        k, v = (x.repeat_interleave(share, 1) for x in (k, v))
        lengths = self.plan.blocks.runs[:, 1]
        of_key = torch.arange(len(lengths), device="cuda").repeat_interleave(lengths.long())
        rows = self.plan.rows.runs
        of_query = torch.arange(len(rows), device="cuda").repeat_interleave(rows[:, 1].long())
        tiers = self.tiers[:, :, of_query]  # [batch, heads, queries of the video, blocks]
        video = slice(self.before, self.before + self.tiling.tokens)
        seen = torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool, device="cuda")
        skipped = torch.zeros(*q.shape[:3], len(lengths), dtype=torch.bool, device="cuda")
        seen[:, :, video, video] = tiers[..., of_key] > 0
        skipped[:, :, video] = tiers == 0
        if self.dense is not None:
            seen[self.dense] = True
            skipped[self.dense] = False
        scores = self.scale * (q @ k.mT)
        of_means = self.scale * (q @ mean_k.mT) + lengths.float().log()
        scores = torch.cat(
            [scores.masked_fill(~seen, -torch.inf), of_means.masked_fill(~skipped, -torch.inf)], -1
        )
        weights = scores.softmax(-1)
        slope = self.means.slope(self.scale).float().repeat_interleave(share, 1)
        lean = weights[..., k.shape[2] :].sum(-1, keepdim=True) * (q @ slope)
        return weights @ torch.cat([v, mean_v], 2) + lean, scores.logsumexp(-1)


@pytest.mark.parametrize("head_dim", TIER_BLOCKS)
@pytest.mark.parametrize("case", CASES)
def test_any_tiers(case, head_dim):
    problem = Problem(case, head_dim)
    for refine, skim in SHARES:
        out, lse = problem.launch(refine, skim)
        expected, expected_lse = problem.expected()
        assert relative(out, expected) < (6e-2 if skim else 1e-2)
        atol = 5e-2 if skim else 1e-3
        torch.testing.assert_close(lse, expected_lse, atol=atol, rtol=0)


def test_fp16():
    problem = Problem("ragged, text", 64, torch.float16)
    out, _ = problem.launch(0.5, 0.0)
    assert relative(out, problem.expected()[0]) < 2e-3


@pytest.mark.parametrize("window", ["full", (1, 1, 3)])
@pytest.mark.parametrize("price", [0.0, 1e-2, 1.0])
def test_the_operator_is_its_reference(window, price):
    torch.manual_seed(0)
    grid, tiles = (5, 9, 11), (1, 3, 3)
    tokens, text = 5 * 9 * 11, 37
    q, k, v = (
        torch.randn(2, tokens + text, 2, 64, device="cuda").bfloat16().transpose(1, 2)
        for _ in range(3)
    )
    lengths = torch.tensor([[text], [5]], device="cuda")
    found = []
    for kernel in ("cutlass", "reference"):
        spec = AttentionSpec(
            ("video", "context"),
            tiles,
            window,
            kernel=kernel,
            precision="tiered",
            trade=Trade(price),
        )
        call = q, k, v, lengths, None, [tokens, text], list(grid), spec.text(), 0.125
        found.append(torch.ops.sta.attention(*call))
        if kernel == "cutlass":
            assert launch.kernel_of(launch.Call(*call)).endswith(" tiered")
    (out, lse), (expected, expected_lse) = found
    assert relative(out, expected) < 3e-2  # keys in e4m3 have other scales there
    torch.testing.assert_close(lse, expected_lse, atol=2e-2, rtol=0)
