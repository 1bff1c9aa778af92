"""What precisions "fp8" and "nvfp4" compute, in PyTorch: the path of CPUs and of kernel="reference"."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ir.geometry import Geometry
from ..ir.token_blocks import token_blocks
from ..ir.visibility import Visibility
from ..runtime.quantize import shown_keys
from ..tiers.arithmetic import Arithmetic, Fp8, Nvfp4
from ..tiers.attention import Tier, tiered_attention
from . import reference

ARITHMETIC: dict[str, Arithmetic] = {"fp8": Fp8(), "nvfp4": Nvfp4("fp8")}


def forward(
    q: Tensor, k: Tensor, v: Tensor, visible: Visibility, scale: float, precision: str
) -> tuple[Tensor, Tensor]:
    """(out like q, lse float32 [batch, heads, queries]); all of q, k, v [batch, heads, tokens, d].

    Tiers are read on the host: while a CUDA graph is captured it is the native arithmetic.
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return reference.forward(q, k, v, visible, scale)
    batch, heads = q.shape[:2]
    shown = shown_keys(visible, k)
    geometry = visible.geometry
    sparse = _tiers(geometry, heads, q.device).expand(batch, -1, -1, -1)
    if visible.whole is not None:
        dense = visible.whole.to(q.device)[:, None, None, None]
        sparse = torch.where(dense, int(Tier.SKIM), sparse)
    # Blocks are cut from tiles whatever the windows are, which heads share.
    blocks, arithmetic = token_blocks(geometry), ARITHMETIC[precision]
    return tiered_attention(q, k, v, sparse, blocks, scale, arithmetic, arithmetic, shown)


def _tiers(geometry: Geometry, heads: int, device: torch.device) -> Tensor:
    """[1, heads, query blocks, key blocks]"""
    seen = [
        token_blocks(geometry.with_window(window)).visible
        for window in geometry.head_windows or (geometry.window,) * heads
    ]
    return torch.tensor(seen, device=device)[None].int() * int(Tier.SKIM)
