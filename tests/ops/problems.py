"""Attention problems of all kinds, as arguments of the operator and as the mask of the definition."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from sta_compile.ir.attention_spec import AttentionSpec
from tests import oracle

ROLES = [
    ("video",),
    ("video", "context"),
    ("context", "video"),
    ("context", "video", "context"),
    ("keys", "video"),
    ("context", "keys", "video", "keys", "context"),
]


def strided(shape, layout, generator, dtype, fused=False):
    """[batch, heads, tokens, head_dim] with heads outside ("bhnd") or inside ("bnhd") tokens."""
    b, h, n, d = shape
    inner = 3 * d if fused else d
    if layout == "bhnd":
        x = torch.randn(b, h, n, inner, generator=generator, dtype=torch.float32)
    else:
        x = torch.randn(b, n, h, inner, generator=generator, dtype=torch.float32).transpose(1, 2)
    return x.to(dtype)[..., -d:]


@st.composite
def problems(draw):
    grid = tuple(draw(st.integers(1, 6)) for _ in range(3))
    tiles = tuple(draw(st.integers(1, length)) for length in grid)
    window = tuple(draw(st.integers(1, 6)) for _ in range(3))
    roles = draw(st.sampled_from(ROLES))
    video = grid[0] * grid[1] * grid[2]
    segments = [video if r == "video" else draw(st.integers(0, 9)) for r in roles]
    batch = draw(st.integers(1, 3))
    contexts = [n for n, r in zip(segments, roles, strict=True) if r != "video"]
    lengths = None
    if contexts and draw(st.booleans()):
        lengths = [[draw(st.integers(0, n)) for n in contexts] for _ in range(batch)]
    shown = None
    if draw(st.booleans()):
        shown = [[draw(st.booleans()) for _ in range(sum(contexts))] for _ in range(batch)]
    of_video = None
    if draw(st.booleans()):
        of_video = [
            [draw(st.integers(0, 9)) < 9 for _ in range(video)]
            if draw(st.booleans())
            else [True] * video
            for _ in range(batch)
        ]
    flags = [draw(st.booleans()) for _ in range(batch)] if draw(st.booleans()) else None
    kv_heads, share = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 4)]))
    if kv_heads * share > 1 and draw(st.booleans()):
        one = st.tuples(*(st.integers(1, 6),) * 3)
        window = tuple(draw(one) for _ in range(kv_heads * share))
    return {
        "grid": grid,
        "tiles": tiles,
        "window": window,
        "roles": roles,
        "segments": segments,
        "batch": batch,
        "key_lengths": lengths,
        "key_mask": shown,
        "video_mask": of_video,
        "dense": flags,
        "heads": (kv_heads * share, kv_heads),
        "head_dim": draw(st.sampled_from([1, 8, 40])),
        "layouts": [draw(st.sampled_from(["bhnd", "bnhd"])) for _ in range(3)],
        "fused": draw(st.booleans()),
        "scale": draw(st.sampled_from([0.125, 1.0, -0.5])),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64])),
        "seed": draw(st.integers(0, 99)),
    }


def build(problem, poison=None):
    """(arguments of the operator, mask of the definition)"""
    p = problem
    generator = torch.Generator().manual_seed(p["seed"])
    keys = sum(p["segments"])
    queries = sum(n for n, r in zip(p["segments"], p["roles"], strict=True) if r != "keys")
    heads, kv_heads = p["heads"]
    q, k, v = (
        strided((p["batch"], h, tokens, p["head_dim"]), layout, generator, p["dtype"], p["fused"])
        for h, tokens, layout in zip(
            (heads, kv_heads, kv_heads), (queries, keys, keys), p["layouts"], strict=True
        )
    )
    lengths = None if p["key_lengths"] is None else torch.tensor(p["key_lengths"])
    dense = None if p["dense"] is None else torch.tensor(p["dense"])
    shown, of_video = (
        None if p[name] is None else torch.tensor(p[name], dtype=torch.bool).view(p["batch"], -1)
        for name in ("key_mask", "video_mask")
    )
    flags = (lengths, dense, shown, of_video)

    def mask_of(window):
        sizes = p["grid"], p["tiles"], window, p["roles"], p["segments"], p["batch"]
        return oracle.full_mask(*sizes, *flags)

    per_head = isinstance(p["window"][0], tuple)
    mask = torch.stack([mask_of(w) for w in p["window"]], 1) if per_head else mask_of(p["window"])
    if poison is not None:
        unseen = ~mask.flatten(1, -2).any(1)[:, None, :, None]
        k, v = (torch.where(unseen, poison, x) for x in (k, v))
    spec = AttentionSpec(p["roles"], tiles=p["tiles"], window=p["window"]).text()
    rest = p["segments"], list(p["grid"]), spec, p["scale"]
    masks = [] if shown is None and of_video is None else [shown, of_video]
    return (q, k, v, lengths, dense, *rest, *masks), mask


BASE = {
    "grid": (3, 4, 5),
    "tiles": (3, 2, 3),
    "window": (1, 1, 3),
    "roles": ("context", "video", "context"),
    "segments": [7, 60, 5],
    "batch": 2,
    "key_lengths": [[3, 5], [0, 1]],
    "key_mask": None,
    "video_mask": None,
    "dense": [False, True],
    "heads": (4, 2),
    "head_dim": 8,
    "layouts": ["bnhd", "bhnd", "bnhd"],
    "fused": False,
    "scale": 0.3,
    "dtype": torch.float64,
    "seed": 0,
}

MASKED = BASE | {
    "roles": ("keys", "video", "context"),
    "key_mask": [[i % 3 == 0 for i in range(12)], [i % 4 != 1 for i in range(12)]],
}
HEAD_WINDOWS = BASE | {"window": ((1, 1, 3), (3, 1, 1), (3, 2, 3), (1, 1, 1))}
# One sample that hides a few keys of the video.
VIDEO_MASKED = BASE | {
    "dense": [False, False],
    "video_mask": [[i % 7 != 2 for i in range(60)], [True] * 60],
}
