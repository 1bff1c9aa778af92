"""Builds the kernels of a rewritten graph while the model compiles, so that no step waits for them and a CUDA graph can be
captured from the first call."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.fx

from ._torch import graph_modules, size_hint
from .analysis.graph_view import fake_value
from .ir.attention_spec import AttentionSpec, is_per_head
from .ops.arguments import geometry_of
from .runtime import launch
from .runtime.prepare import Request, choices, prepare


def warm_kernels(gm: torch.fx.GraphModule) -> tuple[str, ...]:
    """Texts of the kernels that the graph's attentions will launch; none on a CPU."""
    return tuple(dict.fromkeys(text for request in _requests(gm) for text in prepare(request)))


def first_kernels(gm: torch.fx.GraphModule, device: torch.device) -> tuple[str, ...]:
    """As `warm_kernels`, for a device that need not be there: what is preferred, and nothing is built."""
    requests = (replace(request, device=device) for request in _requests(gm))
    specs = (spec for r in requests if r.has_kernels for first in choices(r)[:1] for spec in first)
    return tuple(dict.fromkeys(spec.text() for spec in specs))


def why_native(gm: torch.fx.GraphModule, device: torch.device | None = None) -> str:
    """Why attention of a graph runs natively that was asked for in another precision; "" where none does.

    device: what it is asked of, if not that of the graph. A CPU has every precision.
    """
    for request in _requests(gm):
        if device is not None:
            request = replace(request, device=device)
        if request.precision == "native" or not request.has_kernels:
            continue
        preferred = (spec for first in choices(request)[:1] for spec in first)
        if any(spec.precision != request.precision for spec in preferred):
            return launch.why_native(request.problem(), request.kernel)
    return ""


def _requests(gm: torch.fx.GraphModule) -> tuple[Request, ...]:
    """Of the graph's attentions, each once."""
    return tuple(
        dict.fromkeys(
            request_of(node)
            for module in graph_modules(gm)
            for node in module.graph.nodes
            if node.target is torch.ops.sta.attention.default
        )
    )


def request_of(node: torch.fx.Node) -> Request:
    """What decides the kernels of one attention; symbolic sizes by their hints."""
    q, k, _, key_lengths, dense, segments, grid, text, scale, *masks = node.args
    key_mask, video_mask = (*masks, None, None)[:2]
    x, y = fake_value(q), fake_value(k)
    spec = AttentionSpec.parse(str(text))
    known = all(isinstance(g, int) for g in grid)  # type: ignore[union-attr]
    geometry = None
    if known:
        sizes = [size_hint(fake_value(s)) for s in segments]  # type: ignore[union-attr]
        geometry = geometry_of(sizes, grid, str(text))  # type: ignore[arg-type]
    return Request(
        tuple(size_hint(s) for s in x.shape),  # type: ignore[arg-type]
        size_hint(y.shape[1]),
        size_hint(y.shape[2]),
        x.dtype,
        x.device,
        geometry,
        spec.contexts,
        token_major=bool(size_hint(x.stride(1)) < size_hint(x.stride(2))),
        lengths=None if key_lengths is None else fake_value(key_lengths).dtype,
        dense=dense is not None,
        masked=key_mask is not None,
        video_masked=video_mask is not None,
        scale=scale,  # type: ignore[arg-type]
        kernel=spec.kernel,
        choice=spec.choice,
        precision=spec.precision,
        head_windows=is_per_head(spec.window) or is_per_head(spec.request),
        backward=torch.is_grad_enabled()
        and any(fake_value(x).requires_grad for x in node.args[:3]),
    )
