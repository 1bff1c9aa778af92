"""Run in a process with TRITON_INTERPRET=1: the kernels that quantize, on the CPU, bit for bit against tiers.formats."""

from __future__ import annotations

from unittest import mock

import torch

from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.geometry import Geometry
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.visibility import Visibility
from sta_compile.ir.window import Window
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import quantize
from sta_compile.runtime.quantize import empty_mean, quantized, shown_keys
from sta_compile.runtime.tensors import Tensors
from sta_compile.runtime.tier_tables import byte_layout, key_blocks
from sta_compile.tiers.formats import quantize_e4m3

SCALE = 0.1


def run(
    heads, head_dim, dtype, segments=(1200, 70), lengths=None, masked=False, video=None, size=1.0
):
    batch, (videos, text) = 2, segments
    spec = AttentionSpec(("video", "context"), tiles=(1, 1, 1), window=(1, 1, 1)).text()
    geometry = geometry_of(segments, (1, 1, videos), spec)

    def tensor(count):
        x = torch.randn(batch, videos + text, count, head_dim).transpose(1, 2)
        return (x * size * torch.logspace(-3, 1, head_dim)).to(dtype)

    q, k, v = tensor(heads[0]), tensor(heads[1]) + 3, tensor(heads[1])
    q[:, :, 5:9] = 0
    v[..., 1] = 0
    lengths = None if lengths is None else torch.tensor(lengths)
    mask = torch.rand(batch, text) < 0.5 if masked else None
    of_video = torch.rand(batch, videos) < video if video is not None else None
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    given = Tensors(q, k, v, out, lse, lengths, None, mask, of_video, None)
    shown = shown_keys(Visibility(geometry, lengths, mask, None, of_video), k)
    hidden = torch.zeros(batch, videos + text, dtype=torch.bool) if shown is None else ~shown
    for x in (k, v):
        x.masked_fill_(hidden[:, None, :, None], torch.nan)
    kept = []
    with mock.patch.object(
        quantize, "empty_mean", lambda *x: kept.append(empty_mean(*x)) or kept[0]
    ):
        made = quantized(given, geometry, SCALE, interpreted=True)
    mean = kept[0][:, :head_dim].view(batch, heads[1], 1, head_dim)
    k, v = (x.float().masked_fill(hidden[:, None, :, None], 0) for x in (k, v))
    count = (~hidden).sum(1).clamp(min=1)[:, None, None, None]
    exact = k.double().sum(2, keepdim=True) / count
    torch.testing.assert_close(mean.double(), exact, atol=1e-6 * size, rtol=1e-6)
    smoothed = (k - mean).masked_fill(hidden[:, None, :, None], 0)
    equal(made.q, made.q_scale, quantize_e4m3(q, (3,)))
    equal(in_order(made.k)[:, :, : k.shape[2]], made.k_scale, quantize_e4m3(smoothed, (2, 3)))
    equal(made.v.mT, made.v_scale, quantize_e4m3(v, (2,)))
    of_queries = mean.repeat_interleave(heads[0] // heads[1], 1)
    shift = SCALE * (q.double() * of_queries).sum(-1)
    torch.testing.assert_close(made.shift.double(), shift, atol=1e-5 * size**2, rtol=1e-5)


def run_sources():
    """Sixteens of other keys than their own, some of them short, as kernels with tiers read them."""
    tiling = Tiling((1, 5, 21), (1, 2, 3))
    text, tokens = 3, tiling.tokens
    roles, window = ("context", "video"), Window((1, 1, 1))
    geometry = Geometry((text, tokens), roles, tiling, window)
    q, k, v = (torch.randn(1, 1, text + tokens, 64, dtype=torch.float16) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    layout = byte_layout(tiling, text, 128)
    sources = torch.tensor(layout.sources, dtype=torch.int32)
    given = Tensors(q, k, v, out, lse)
    every = quantized(given, geometry, SCALE, interpreted=True)
    made = quantized(given, geometry, SCALE, interpreted=True, sources=sources)
    keys, values = in_order(made.k)[0, 0], made.v[0, 0].mT
    all_keys, all_values = in_order(every.k)[0, 0], every.v[0, 0].mT
    seen = []
    for index, (first, count) in enumerate(layout.sources):
        at, of = slice(16 * index, 16 * index + count), slice(first, first + count)
        assert torch.equal(keys[at], all_keys[of])
        assert torch.equal(values[at], all_values[of])
        assert not keys[16 * index + count : 16 * index + 16].any()
        assert not values[16 * index + count : 16 * index + 16].any()
        seen += range(first, first + count)
    assert seen == list(range(text, text + tokens))
    for (start, length), (first, _) in zip(layout.blocks, key_blocks(tiling, 128), strict=True):
        assert start % 16 == 0
        assert layout.sources[start // 16][0] == text + first
        assert sum(n for _, n in layout.sources[start // 16 :][: -(-length // 16)]) == length


def in_order(rows):
    """Keys [..., tokens, head_dim] of rows whose sixteens the kernel has permuted: 8n + 2t + i is key 4t + 2n + i."""
    n, t, i = (x.flatten() for x in torch.meshgrid(*map(torch.arange, (2, 4, 2)), indexing="ij"))
    places = (8 * n + 2 * t + i)[torch.argsort(4 * t + 2 * n + i)]
    return rows.unflatten(-2, (-1, 16))[..., places.to(rows.device), :].flatten(-3, -2)


def equal(values, scale, expected):
    of_values, of_scale = expected
    assert torch.equal(scale.flatten(), of_scale.flatten())
    assert torch.equal(values, of_values.view(torch.uint8))


def main():
    torch.manual_seed(0)
    run((2, 1), 64, torch.float16)
    run((1, 1), 80, torch.float32, (300, 5), size=1e3)
    run((2, 2), 128, torch.float16, (130, 40), lengths=[[40], [0]])
    run((1, 1), 64, torch.float16, (200, 50), masked=True, video=0.7)
    run_sources()
    print("all bits are equal")


if __name__ == "__main__":
    main()
