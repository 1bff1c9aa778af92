"""What precision "tiered" computes, in PyTorch: the path of CPUs and of kernel="reference"."""

from __future__ import annotations

import torch
from torch import Tensor

from ..codegen.cutlass_blocks import FP8_KEYS, TIER_ROWS
from ..ir.token_blocks import token_blocks
from ..ir.trade import Trade
from ..ir.visibility import Visibility
from ..runtime.quantize import shown_keys
from ..runtime.tiered import TierPlan, routed
from ..tiers.arithmetic import Fp8, Native
from ..tiers.attention import Tier, tiered_attention
from . import reference


def forward(
    q: Tensor, k: Tensor, v: Tensor, visible: Visibility, scale: float, trade: Trade
) -> tuple[Tensor, Tensor]:
    """(out like q, lse float32 [batch, heads, queries]); all of q, k, v [batch, heads, tokens, d].

    Tiers are read on the host: while a CUDA graph is captured it is the native arithmetic.
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return reference.forward(q, k, v, visible, scale)
    geometry = visible.geometry
    shown = shown_keys(visible, k)
    plan = TierPlan.of(geometry, TIER_ROWS, FP8_KEYS, 0, q.device)
    keys, predicted, chosen = routed(q, k, v, plan, shown, scale, trade)
    # Contexts and dense samples have no tiers: all that they read is refined.
    blocks = token_blocks(geometry.with_window(geometry.window), TIER_ROWS, FP8_KEYS)
    of_rows, of_keys = (
        torch.tensor([tile is not None for tile in tiles], device=q.device)
        for tiles in (blocks.query_tiles, blocks.key_tiles)
    )
    shape = (*q.shape[:2], len(of_rows), len(of_keys))
    tiers = torch.full(shape, int(Tier.REFINE), device=q.device)
    log_skipped = torch.zeros(shape, device=q.device)
    slope = keys.slope(scale)
    video = (of_rows[:, None] & of_keys).expand(shape)
    rows = plan.rows.runs[:, 1] > 0
    tiers[video] = chosen[:, :, rows].long().flatten()
    log_skipped[video] = predicted.log_skipped[:, :, rows].flatten()
    if visible.whole is not None:
        whole = visible.whole.to(q.device)
        tiers[whole] = int(Tier.REFINE)
        slope = slope.masked_fill(whole[:, None, None, None], 0)  # hidden keys may be NaN
    arithmetic = Fp8(), Native(q.dtype)
    return tiered_attention(q, k, v, tiers, blocks, scale, *arithmetic, shown, log_skipped, slope)
