"""Run in a process with TRITON_INTERPRET=1: the Triton kernel on the CPU against the definition.

The interpreter multiplies bf16 wrongly (triton 3.6 to 3.9), so only fp16 and fp32 run here.
"""

from __future__ import annotations

import torch

from sta_compile.codegen.triton.build import constants
from sta_compile.codegen.triton.forward import attention_forward
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.kernel_spec import Blocks, KernelSpec
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime.tensors import Tensors
from sta_compile.runtime.triton_bind import bind
from tests import oracle

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}

# grid, tiles, window, roles, segments, key_lengths, dense, (heads, kv_heads), head_dim
CASES = [
    ((3, 4, 5), (3, 2, 3), (1, 1, 3), "cvc", [7, 60, 21], [[3, 17], [0, 21]], [0, 1], (2, 1), 16),
    ((4, 6, 8), (3, 3, 3), (3, 1, 1), "vc", [192, 40], None, None, (1, 1), 32),
    ((3, 7, 6), (3, 3, 1), (1, 3, 1), "cv", [33, 126], [[33]], None, (1, 1), 40),
    ((2, 9, 11), (1, 3, 3), (1, 1, 1), "ccvc", [5, 0, 198, 70], [[1, 0, 69]], [0], (1, 1), 32),
    ((1, 1, 1), (1, 1, 1), (1, 1, 1), "v", [1], None, None, (1, 1), 8),
    ((3, 4, 5), (3, 2, 3), (1, 1, 3), "kvc", [37, 60, 21], [[30, 17], [0, 21]], [0, 1], (2, 1), 16),
    ((3, 4, 4), (3, 2, 2), (1, 1, 1), "ckvk", [19, 16, 48, 33], None, [0, 0], (1, 1), 32),
    ((3, 7, 6), (3, 3, 2), ((3, 1, 2), (1, 3, 1)), "vc", [126, 21], [[17], [3]], [0, 1], (2, 1), 16),
]  # fmt: skip


def run(case, dtype, loads, layout, blocks, masked=False, video_masked=False):
    grid, tiles, window, letters, segments, lengths, flags, heads, head_dim = case
    roles = tuple({"c": "context", "k": "keys", "v": "video"}[x] for x in letters)
    batch = len(flags or lengths or [0])
    key_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    dense = None if flags is None else torch.tensor(flags, dtype=torch.bool)
    text = AttentionSpec(roles, tiles=tiles, window=window).text()
    geometry = geometry_of(segments, grid, text)
    shown = torch.rand(batch, geometry.context_keys) < 0.5 if masked else None
    of_video = torch.rand(batch, geometry.tiling.tokens) < 0.8 if video_masked else None
    if of_video is not None:
        of_video[0, : 2 * geometry.tiling.tokens // 3] = False  # whole blocks, the first ones
    if of_video is not None and batch > 1:
        of_video[-1] = True
    extra = key_lengths, dense, shown, of_video
    windows = window if isinstance(window[0], tuple) else (window,)
    masks = [oracle.full_mask(grid, tiles, w, roles, segments, batch, *extra) for w in windows]
    mask = torch.stack(masks, 1)
    unseen = ~mask.any(1).any(1)[:, None, :, None]

    def tensor(count, tokens):
        if layout == "bnhd":
            x = torch.randn(batch, tokens, count, head_dim).transpose(1, 2)
        else:
            x = torch.randn(batch, count, tokens, head_dim)
        return x.to(DTYPES[dtype])

    q = tensor(heads[0], geometry.queries)
    k, v = (tensor(heads[1], geometry.keys).masked_fill_(unseen, torch.nan) for _ in range(2))
    out = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:3], torch.nan)
    spec = KernelSpec(
        "triton",
        "forward",
        90,
        dtype,
        head_dim,
        blocks,
        loads,
        len(geometry.contexts),
        "i32" if lengths else "",
        dense is not None,
        masked,
        video_masked,
        len(windows) > 1,
    )
    scale = 0.2
    hides_nothing = None if of_video is None else of_video.all(1)
    tensors = Tensors(q, k, v, out, lse, key_lengths, dense, shown, of_video, hides_nothing)
    binding = bind(spec, tensors, geometry, scale)
    arguments = binding.arguments(tensors)
    attention_forward[(binding.programs,)](*arguments, *constants(spec).values())
    expected, expected_lse = oracle.attention(q.float(), k.float(), v.float(), mask, scale)
    tolerance = 2e-5 if dtype == "fp32" else 4e-3
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=tolerance, rtol=tolerance)


def main():
    torch.manual_seed(0)
    small, wide = Blocks(16, 16, 4, 2), Blocks(32, 16, 4, 2)
    run(CASES[0], "fp32", "pointer", "bnhd", small)
    run(CASES[1], "fp32", "pointer", "bhnd", small)
    run(CASES[1], "fp16", "tma", "bnhd", wide)
    run(CASES[2], "fp16", "pointer", "bnhd", wide)
    run(CASES[3], "fp32", "tma", "bhnd", wide)
    run(CASES[4], "fp32", "pointer", "bhnd", small)
    run(CASES[5], "fp32", "pointer", "bnhd", small)
    run(CASES[5], "fp16", "tma", "bnhd", wide, masked=True)
    run(CASES[6], "fp32", "tma", "bhnd", small)
    run(CASES[6], "fp32", "pointer", "bhnd", wide, masked=True)
    run(CASES[0], "fp32", "pointer", "bnhd", small, video_masked=True)
    run(CASES[1], "fp16", "tma", "bnhd", wide, video_masked=True)
    run(CASES[5], "fp16", "tma", "bnhd", wide, masked=True, video_masked=True)
    run(CASES[7], "fp32", "pointer", "bnhd", small)
    run(CASES[7], "fp16", "tma", "bhnd", wide, video_masked=True)
    print("all equal the definition")


if __name__ == "__main__":
    main()
