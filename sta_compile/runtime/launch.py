"""Chooses an emitter for a call, builds its kernel and launches it."""

from __future__ import annotations

from torch import Tensor

from ..ir.geometry import Geometry


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    dense: Tensor | None,
    geometry: Geometry,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor] | None:
    """(out, lse), or None if no kernel can run this call."""
    return None
