"""Small problems with everything beside the video, as arguments of the operator and as a mask from the definition."""

from __future__ import annotations

import torch

from sta_compile.ir.attention_spec import AttentionSpec
from tests import oracle

# grid, tiles, window (or several, which heads take in turn), roles, segments, key_lengths, dense
SMALL = {
    "one token": ((1, 1, 1), (1, 1, 1), (1, 1, 1), ("video",), [1], None, None),
    "divides": ((6, 8, 16), (3, 4, 4), (3, 3, 1), ("video",), [768], None, None),
    "ragged": ((7, 13, 17), (3, 3, 4), (1, 3, 3), ("video",), [1547], None, None),
    "full cols": ((5, 9, 11), (5, 3, 3), (3, 1, 3), ("video",), [495], None, None),
    "full": ((5, 9, 11), (5, 3, 3), (5, 3, 3), ("video",), [495], None, None),
    # 1200 = 6 * 192 + 48: the last block of rows has one warpgroup's, and so have the text's
    "a few rows and many keys": (
        (5, 12, 20),
        (5, 3, 4),
        (5, 3, 4),
        ("video", "context"),
        [1200, 40],
        [[40], [7], [0]],
        None,
    ),
    "text after": (
        (5, 12, 16),
        (3, 3, 4),
        (1, 3, 3),
        ("video", "context"),
        [960, 200],
        [[200], [77], [0]],
        None,
    ),
    "text before, dense": (
        (5, 12, 16),
        (3, 3, 4),
        (1, 1, 3),
        ("context", "video"),
        [300, 960],
        [[300], [129], [1]],
        [False, True, False],
    ),
    "text on both sides": (
        (4, 9, 31),
        (4, 3, 5),
        (1, 3, 1),
        ("context", "video", "context"),
        [129, 1116, 127],
        [[129, 0], [128, 127], [0, 0]],
        [True, False, True],
    ),
    "four contexts": (
        (3, 8, 8),
        (3, 2, 2),
        (1, 1, 1),
        ("context", "context", "video", "context", "context"),
        [17, 0, 192, 130, 5],
        None,
        [False, False, True],
    ),
    "keys before": (
        (5, 12, 16),
        (3, 3, 4),
        (1, 3, 3),
        ("keys", "video"),
        [333, 960],
        [[333], [128], [0]],
        [False, True, False],
    ),
    "keys around, context after": (
        (4, 9, 31),
        (4, 3, 5),
        (1, 3, 1),
        ("keys", "video", "keys", "context"),
        [65, 1116, 200, 40],
        None,
        [True, False, False],
    ),
    "a window for each head": (
        (7, 13, 17),
        (3, 3, 4),
        ((3, 1, 3), (1, 3, 1), (3, 3, 4), (1, 1, 1)),
        ("video", "context"),
        [1547, 70],
        [[70], [33], [0]],
        [False, True, False],
    ),
    "a window for each head, no text": (
        (5, 12, 16),
        (5, 3, 4),
        ((3, 1, 3), (1, 3, 1), (5, 1, 1)),
        ("video",),
        [960],
        None,
        None,
    ),
}


def tensors(shape, layout, dtype, generator):
    b, h, n, d = shape
    if layout == "bhnd":
        x = torch.randn(b, h, n, d, device="cuda", generator=generator)
    elif layout == "bnhd":
        x = torch.randn(b, n, h, d, device="cuda", generator=generator).transpose(1, 2)
    else:  # a third of a fused projection
        x = torch.randn(b, n, h, 3 * d, device="cuda", generator=generator).transpose(1, 2)
    return x.to(dtype)[..., -d:]


def problem(
    case,
    heads,
    head_dim,
    dtype,
    layout,
    kernel,
    shown=None,
    hidden=None,
    value_scale=1.0,
    precision="native",
):
    """Arguments of sta::attention for three samples, and bool [batch, 1 or heads, queries, keys].

    shown: share of the keys beside the video that a key mask leaves. hidden: keys of the video that one hides, in the first
    sample only. Keys that no query sees are NaN.
    """
    grid, tiles, window, roles, segments, lengths, flags = SMALL[case]
    batch, keys = 3, sum(segments)
    if isinstance(window[0], tuple):
        window = tuple(window[head % len(window)] for head in range(heads[0]))
    queries = sum(n for n, role in zip(segments, roles, strict=True) if role != "keys")
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        tensors((batch, h, tokens, head_dim), layout, dtype, generator)
        for h, tokens in ((heads[0], queries), (heads[1], keys), (heads[1], keys))
    )
    v = v * value_scale
    key_mask = None
    if shown is not None:
        key_mask = torch.rand(batch, keys - grid[0] * grid[1] * grid[2]) < shown
        key_mask[0] = False
    video_mask = None
    if hidden is not None:
        video_mask = torch.ones(batch, grid[0] * grid[1] * grid[2], dtype=torch.bool)
        video_mask[0, list(hidden)] = False
    lengths = lengths and torch.tensor(lengths)
    beside = roles, segments, batch, lengths, flags, key_mask, video_mask
    windows = window if isinstance(window[0], tuple) else (window,)
    mask = torch.stack([oracle.full_mask(grid, tiles, each, *beside) for each in windows], 1).cuda()
    for x in (k, v):
        x.masked_fill_(~mask.flatten(1, 2).any(1)[:, None, :, None], torch.nan)
    spec = AttentionSpec(
        roles, tiles=tiles, window=window, kernel=kernel, precision=precision
    ).text()
    key_lengths, key_mask, video_mask = (
        None if x is None else x.cuda() for x in (lengths, key_mask, video_mask)
    )
    dense = None if flags is None else torch.tensor(flags, device="cuda")
    scale = head_dim**-0.5
    where = (key_lengths, dense, segments, list(grid), spec, scale, key_mask, video_mask)
    return [q, k, v, *where], mask


def relative(a, b):
    """Norm of the difference over the norm of b; the norm of a where b is zero."""
    difference, size = (a.double() - b.double()).norm(), b.double().norm()
    return (difference / size if size > 0 else difference).item()
