"""Run in a process with TRITON_INTERPRET=1: the kernels of precision="nvfp4" on the CPU.

What is quantized is equal, bit for bit, to tiers.formats. Attention is that of sta_compile.tiers over the same blocks. Where
the kernel packs keys of several runs into a block, weights are rounded below another maximum, and it is near. Products are
taken in float32, in which operands are exact: the interpreter has no block-scaled ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import pad

from sta_compile.codegen.triton.build import constants
from sta_compile.codegen.triton.forward import attention_forward
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.kernel_spec import Blocks, KernelSpec
from sta_compile.ir.token_blocks import token_blocks
from sta_compile.ir.visibility import Visibility
from sta_compile.ops import quantized_reference
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime.quantize_nvfp4 import quantized_nvfp4
from sta_compile.runtime.tensors import Tensors
from sta_compile.runtime.triton_bind import bind
from sta_compile.tiers.arithmetic import Nvfp4
from sta_compile.tiers.attention import Tier, tiered_attention
from sta_compile.tiers.formats import nvfp4_scale, quantize_e4m3, quantize_nvfp4
from tests import oracle
from tests.codegen.interpreted import CASES

SCALE = 0.2
BLOCKS = Blocks(32, 32, 4, 2)
NEAR = 2.5e-2  # what rounding of the weights is off by
# Runs and text are whole blocks of 32 keys, none of which the kernel packs.
WHOLE = ((2, 8, 8), (1, 4, 1), (1, 3, 1), "cv", [32, 128], None, [0, 1], None, None)


class Call:
    """One of CASES with other heads and head dims. Keys are sixteenths, so that the kernel's mean of them is exact."""

    def __init__(self, case, heads, head_dim, dtype, masked=False):
        grid, tiles, window, letters, segments, lengths, flags, _, _ = case
        roles = tuple({"c": "context", "k": "keys", "v": "video"}[x] for x in letters)
        batch = len(flags or lengths or [0])
        key_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
        dense = None if flags is None else torch.tensor(flags, dtype=torch.bool)
        text = AttentionSpec(roles, tiles=tiles, window=window).text()
        self.geometry = geometry = geometry_of(segments, grid, text)
        shown = torch.rand(batch, geometry.context_keys) < 0.5 if masked else None
        of_video = torch.rand(batch, geometry.tiling.tokens) < 0.8 if masked else None
        windows = window if isinstance(window[0], tuple) else (window,)
        masks = key_lengths, dense, shown, of_video
        seen = [oracle.full_mask(grid, tiles, w, roles, segments, batch, *masks) for w in windows]
        self.seen = torch.stack(seen, 1)
        self.hidden = ~self.seen.any(1).any(1)[:, None, :, None]
        self.visible = Visibility(geometry, key_lengths, shown, dense, of_video)

        def tensor(count, tokens):
            x = torch.randn(batch, tokens, count, head_dim).transpose(1, 2)
            return (x * torch.logspace(-1, 0.2, head_dim)).to(dtype)

        q = tensor(heads[0], geometry.queries)
        k, v = (tensor(heads[1], geometry.keys) for _ in range(2))
        q[:, :, 3], v[..., 1] = 0, 0
        k = ((k + 1) * 16).round() / 16
        for x in (k, v):
            x.masked_fill_(self.hidden, torch.nan)
        everything = None if of_video is None else of_video.all(1)
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
        self.tensors = Tensors(q, k, v, out, lse, *masks, everything)
        self.spec = KernelSpec(
            "triton",
            "forward",
            90,
            {torch.float32: "fp32", torch.float16: "fp16"}[dtype],
            head_dim,
            BLOCKS,
            "pointer",
            len(geometry.contexts),
            "i32" if lengths else "",
            dense is not None,
            masked,
            masked,
            len(windows) > 1,
            "nvfp4",
        )

    @property
    def given(self):
        return [x.float() for x in self.tensors[:3]]

    def check_bits(self):
        q, k, v = self.given
        k, v = (x.masked_fill(self.hidden, 0) for x in (k, v))
        made = quantized_nvfp4(self.tensors, self.geometry, SCALE, "none")
        mean = k.sum(2, keepdim=True) / (~self.hidden).sum(2, keepdim=True).clamp(min=1)
        k = (k - mean).masked_fill(self.hidden, 0)
        scales = nvfp4_scale(q, (3,)), nvfp4_scale(k, (2, 3))
        zeros = 0, 2 * made.q.shape[3] - q.shape[3]
        of_q, of_k = (quantize_nvfp4(pad(x, zeros), s) for x, s in zip((q, k), scales, strict=True))
        of_v, v_scale = quantize_e4m3(v, (2,))
        for found, expected in (
            (made.q_scale, scales[0]),
            (made.q_scales, of_q.scales),
            (made.q, of_q.codes),
            (made.k_scale, scales[1]),
            (made.k_scales, of_k.scales),
            (made.k, of_k.codes),
            (made.v_scale, v_scale),
            (made.v.mT, of_v),
        ):
            bits = torch.uint8 if found.itemsize == 1 else found.dtype
            assert torch.equal(found.view(bits).flatten(), expected.view(bits).flatten())
        shift = SCALE * (q * mean.repeat_interleave(q.shape[1] // k.shape[1], 1)).sum(-1)
        torch.testing.assert_close(made.shift, shift, atol=1e-5, rtol=1e-5)
        return made

    def attend(self, loads="pointer"):
        """(out in float32, lse) of the kernel"""
        made = self.check_bits()
        spec = replace(self.spec, loads=loads)
        binding = bind(spec, made, self.geometry, SCALE)
        fixed = constants(spec) | {"PRECISION": "fp32"}
        attention_forward[(binding.programs,)](*binding.arguments(made), *fixed.values())
        return self.tensors.out.float(), self.tensors.lse


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def near(call):
    out, lse = call.attend()
    expected, expected_lse = quantized_reference.forward(*call.given, call.visible, SCALE, "nvfp4")
    exact, _ = oracle.attention(*(x.nan_to_num() for x in call.given), call.seen, SCALE)
    assert relative(out, expected) < NEAR < 5e-2 < relative(out, exact) < 0.3
    torch.testing.assert_close(lse, expected_lse, atol=NEAR, rtol=0)


def same(call, loads):
    out, lse = call.attend(loads)
    blocks = token_blocks(call.geometry, BLOCKS.m, BLOCKS.n)
    tiers = torch.tensor(blocks.visible).int()[None, None] * int(Tier.SKIM)
    tiers = tiers.expand(*out.shape[:2], -1, -1).clone()
    tiers[call.visible.whole] = int(Tier.SKIM)
    arithmetic = Nvfp4("fp8"), Nvfp4("fp8")
    expected, expected_lse = tiered_attention(*call.given, tiers, blocks, SCALE, *arithmetic)
    # A weight in the middle between two values may go to either.
    assert relative(out, expected) < 1e-3
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=0)


def main():
    torch.manual_seed(0)
    same(Call(WHOLE, (2, 1), 64, torch.float32), "tma")
    near(Call(CASES[5], (2, 1), 40, torch.float32, masked=True))
    near(Call(CASES[7], (2, 1), 80, torch.float16))
    print("all equal the reference")


if __name__ == "__main__":
    main()
