"""Builds the kernels of a rewritten graph while the model compiles, so that no step waits for them and a CUDA graph can be
captured from the first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from ._torch import graph_modules, size_hint
from .analysis.graph_view import fake_value
from .ir.attention_spec import AttentionSpec


def warm_kernels(gm: torch.fx.GraphModule) -> tuple[str, ...]:
    """Texts of the kernels that the graph's attentions will launch; none on a CPU."""
    kernels: dict[str, None] = {}
    seen: set[Any] = set()
    for module in graph_modules(gm):
        for node in module.graph.nodes:
            if node.target is torch.ops.sta.attention.default:
                request = _request(node)
                if request not in seen:
                    seen.add(request)
                    kernels.update(dict.fromkeys(_prepare(request)))
    return tuple(kernels)


def _request(node: torch.fx.Node) -> tuple[Any, ...]:
    """What decides the kernels of one attention, as plain values; symbolic sizes by their hints."""
    q, k, _, key_lengths, dense, segments, grid, spec, scale, *masks = node.args
    key_mask, video_mask = (*masks, None, None)[:2]
    x, y = fake_value(q), fake_value(k)
    token_major = bool(size_hint(x.stride(1)) < size_hint(x.stride(2)))
    known = all(isinstance(g, int) for g in grid)  # type: ignore[union-attr]
    lengths = None if key_lengths is None else fake_value(key_lengths).dtype
    return (
        tuple(size_hint(s) for s in x.shape),
        size_hint(y.shape[1]),
        size_hint(y.shape[2]),
        x.dtype,
        x.device,
        tuple(size_hint(fake_value(s)) for s in segments) if known else None,  # type: ignore[union-attr]
        tuple(grid) if known else None,  # type: ignore[arg-type]
        spec,
        token_major,
        lengths,
        dense is not None,
        key_mask is not None,
        video_mask is not None,
        scale,
    )


def _prepare(request: tuple[Any, ...]) -> Sequence[str]:
    from .ops.arguments import geometry_of
    from .runtime.prepare import prepare

    shape, kv_heads, keys, dtype, device, segments, grid, text, *how = request
    token_major, lengths, dense, masked, video_masked, scale = how
    spec = AttentionSpec.parse(text)
    return prepare(
        shape,
        kv_heads,
        keys,
        dtype,
        device,
        None if grid is None else geometry_of(segments, grid, text),
        spec.contexts,
        token_major=token_major,
        lengths=lengths,
        dense=dense,
        masked=masked,
        video_masked=video_masked,
        scale=scale,
        kernel=spec.kernel,
    )
