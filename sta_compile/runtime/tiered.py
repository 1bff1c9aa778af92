"""Chooses the tiers of a call and makes what kernels with tiers read beside q, k and v."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..codegen.cutlass_blocks import FP8_KEYS
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from ..ir.tiling import Tiling
from ..ir.trade import EXACT, Trade
from ..ir.visibility import Visibility
from ..ir.window import Window
from ..tiers.inside import inside_window
from ..tiers.predict import Context, Predicted
from ..tiers.router import COSTS, Routing, route
from ..tiers.statistics import KEY_GROUPS, QUERY_GROUPS, KeyStatistics, Partition
from .cutlass_bind import by_tile
from .cutlass_problem import thread_blocks
from .quantize import empty, quantized, shown_keys, sixteens_of
from .router import choose_tiers, price_of, take_statistics
from .tensors import DTYPES, QuantizedTensors, Tensors, TieredTensors, may_be_dense
from .tier_tables import byte_layout, key_blocks, tier_rows


@dataclass(frozen=True)
class TierPlan:
    """What calls of one geometry share. inside: bool [1 or heads, rows, key blocks], None for a full window.

    sources, byte_blocks: int32 [..., 2], of `byte_layout`.
    """

    geometry: Geometry
    rows: Partition
    blocks: Partition
    inside: Tensor | None
    sources: Tensor
    byte_blocks: Tensor

    @staticmethod
    def of(geometry: Geometry, rows: int, keys: int, count: int, device: torch.device) -> TierPlan:
        """rows: queries of a thread block. keys: of a block of them. count: thread blocks of a head."""
        return _plan(geometry, rows, keys, count, device)


@lru_cache(maxsize=64)
def _plan(geometry: Geometry, rows: int, keys: int, count: int, device: torch.device) -> TierPlan:
    tiling = geometry.tiling
    of_rows = Partition.of(tiling, tier_rows(tiling, rows, count), QUERY_GROUPS, device)
    of_keys = Partition.of(tiling, key_blocks(tiling, keys), KEY_GROUPS, device)
    windows = geometry.windows
    inside = None
    if not all(window.is_full(tiling) for window in windows):
        inside = inside_window(tiling, windows, of_rows.runs, of_keys.runs)
    layout = byte_layout(tiling, geometry.video_key, keys)
    tables = (torch.tensor(table, dtype=torch.int32, device=device) for table in layout)
    return TierPlan(geometry, of_rows, of_keys, inside, *tables)


def plan_of(spec: KernelSpec, tensors: Tensors, geometry: Geometry) -> TierPlan:
    """The plan of a kernel's calls."""
    m, n = spec.blocks.m, spec.blocks.n
    blocks = thread_blocks(m, by_tile(geometry), tensors.q.shape[1], may_be_dense(tensors))
    return TierPlan.of(geometry, m, n, blocks.video, tensors.q.device)


def routed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: TierPlan,
    shown: Tensor | None,
    scale: float,
    trade: Trade,
) -> tuple[KeyStatistics, Predicted, Tensor]:
    """As `route`. q, k, v: [batch, heads, tokens, head_dim], of all segments. shown: bool [batch, keys], None for all."""
    geometry = plan.geometry
    tokens = geometry.tiling.tokens
    first, key = geometry.video_query, geometry.video_key
    context = None
    if geometry.context_keys:
        beside = torch.ones(geometry.keys, dtype=torch.bool)
        beside[key : key + tokens] = False
        at = beside.nonzero()[:, 0].to(k.device, non_blocking=True)
        context = Context(k[:, :, at], v[:, :, at], None if shown is None else shown[:, at])
    video = k[:, :, key : key + tokens], v[:, :, key : key + tokens]
    return route(
        q[:, :, first : first + tokens],
        *video,
        plan.rows,
        plan.blocks,
        scale,
        trade,
        COSTS,
        context,
        plan.inside,
    )


def tiered(tensors: Tensors, plan: TierPlan, scale: float, trade: Trade) -> TieredTensors:
    """Of tensors that kernels can read (`is_aligned`). scale: of the scores."""
    geometry = plan.geometry
    masks = tensors.key_lengths, tensors.key_mask, None, tensors.video_mask
    shown = shown_keys(Visibility(geometry, *masks), tensors.k)
    q, k, v, *_ = tensors
    found = take_statistics(q, k, v, geometry, scale, plan.rows, plan.blocks)
    inside = None if plan.inside is None else plan.inside.view(torch.uint8)
    of_plan = geometry, scale, plan.rows, plan.blocks
    price: float | Tensor = trade.price
    if trade.speedup is not None or trade.max_error is not None:
        bound = trade.speedup, trade.max_error
        price = price_of(found, k, v, shown, *of_plan, COSTS, inside, *bound)
    routing = choose_tiers(found, k, v, shown, *of_plan, price, COSTS, inside)
    means = found.mean_k, found.mean_v, found.slope
    made = quantized(tensors, geometry, scale, sources=plan.sources)
    return assembled(tensors, made, means, routing, plan)


def assembled(
    tensors: Tensors,
    made: QuantizedTensors,
    means: tuple[Tensor, Tensor, Tensor],
    routing: Routing,
    plan: TierPlan,
) -> TieredTensors:
    """What the kernel reads, of any routing. means: of keys and values, and slopes."""
    bytes_ = made.q, made.k, made.v
    scales = made.q_scale, made.k_scale, made.v_scale, made.shift
    mean_k, mean_v, slope = means
    lists = routing.bias, routing.order, routing.counts, plan.blocks.runs, plan.byte_blocks
    return TieredTensors(
        *tensors[:5], *bytes_, *scales, mean_k, mean_v, slope.mT.contiguous(), *lists, *tensors[5:]
    )


def empty_tiered(tensors: Tensors, plan: TierPlan) -> TieredTensors:
    """Meta tensors of the same shapes and strides."""
    made = empty(tensors, sixteens_of(plan.sources), "meta")
    batch, heads, _, head_dim = tensors.q.shape
    rows, blocks = len(plan.rows.runs), len(plan.blocks.runs)
    padded = -(-blocks // FP8_KEYS) * FP8_KEYS

    def make(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    mean = make(batch, tensors.k.shape[1], blocks, head_dim, dtype=tensors.q.dtype)
    slope = make(batch, tensors.k.shape[1], head_dim, head_dim, dtype=tensors.q.dtype)
    lists = (
        make(batch, heads, rows, padded, dtype=torch.float32),
        make(batch, heads, rows, blocks),
        make(batch, heads, rows, 2),
        make(blocks, 2),
        make(blocks, 2),
    )
    bytes_ = made.q, made.k, made.v
    scales = made.q_scale, made.k_scale, made.v_scale, made.shift
    return TieredTensors(*tensors[:5], *bytes_, *scales, mean, mean, slope, *lists, *tensors[5:])


def warm_up_tiers(spec: KernelSpec, device: int) -> None:
    """Compiles and loads what chooses tiers, by calls on little: with text, hidden keys and a window, and without."""
    tiling, roles = Tiling((2, 16, 16), (2, 1, 1)), ("video", "context")
    dtype = {name: kind for kind, name in DTYPES.items()}[spec.dtype]
    for text, window in ((0, (2, 1, 1)), (16, (1, 1, 1))):
        segments = (tiling.tokens, text) if text else (tiling.tokens,)
        geometry = Geometry(segments, roles[: len(segments)], tiling, Window(window))
        shape = 1, 1, geometry.keys, spec.head_dim
        x = torch.zeros(shape, dtype=dtype, device=torch.device("cuda", device))
        lse = torch.zeros(shape[:3], device=x.device)
        lengths = torch.zeros(1, 1, dtype=torch.int32, device=x.device) if text else None
        given = Tensors(x, x, x, x, lse, lengths)
        for trade in (EXACT, Trade(speedup=2.0)):
            tiered(given, plan_of(spec, given, geometry), 1.0, trade)
