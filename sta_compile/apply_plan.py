"""All edits of a graph, in order: dense flags, conversions, attention operators."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from . import _torch
from .analysis.attention_site import sizes_of
from .analysis.axes import Size, axis_size, size_of
from .analysis.graph_view import GraphView, fake_value
from .analysis.hints import Hint
from .analysis.infer_grid import VideoAttention
from .analysis.trace_dims import DimTrace
from .grid_plan import GridPlan
from .noise_plan import NoisePlan
from .rewriting.add_input import add_flags
from .rewriting.fake_values import add_call
from .rewriting.flag_nodes import FlagNodes
from .rewriting.insert_dense import insert_check, insert_dense
from .rewriting.insert_layout import insert_layout
from .rewriting.mask_nodes import MaskNodes
from .rewriting.replace_attention import replace_attention
from .rewriting.size_nodes import Number, SizeNodes
from .rewriting.spread_values import spread_values
from .rewriting.thread_value import ValueThreads
from .rewriting.translate_rows import translate_rows
from .settings import Settings


def apply_plan(
    view: GraphView,
    trace: DimTrace,
    plans: Sequence[GridPlan],
    noise: NoisePlan,
    settings: Settings,
) -> None:
    """Edits the graph in place. Nothing in here may fail for a reason that the analysis could have found."""
    threads = ValueThreads(view)
    sizes = SizeNodes(trace, threads)
    dense = None
    if noise.needed and not all(plan.exact for plan in plans):
        dense = _dense_flags(view, plans, noise, settings, sizes)
    unchecked = FlagNodes(trace, threads, dense)
    checked: dict[Hint, FlagNodes] = {}
    orders: list[tuple[GridPlan, Number, list[Number], str]] = []
    for plan in plans:
        hint = plan.checked_hint
        if hint is not None and hint not in checked:
            batch = _batch_number(view, plan, noise, sizes)
            device = fake_value(plan.sites[0].site.q).device
            checked[hint] = FlagNodes(
                trace, threads, insert_check(view.gm, hint, dense, batch, device)
            )
        flags = unchecked if hint is None else checked[hint]
        masks = MaskNodes(threads)
        grid, shift = _windowed(view, plan, sizes)
        spec = plan.spec([role for role, _ in plan.sites[0].tokens.segments])
        copies = insert_layout(view, sizes, plan.layout.conversions, shift, grid, spec)
        spread_values(view, sizes, plan.layout.spreads, shift, grid, spec)
        orders.append((plan, shift, grid, spec))
        for found in plan.sites:
            owner = view.owner[found.site.node]
            local = [g if isinstance(g, int) else threads.reach(g, owner) for g in grid]
            node, tokens = found.site.node, found.tokens
            segments = [sizes.of_size(size, owner, node) for _, size in tokens.segments]
            spec = plan.spec([role for role, _ in tokens.segments])
            replace_attention(
                view,
                found,
                spec,
                local,
                segments,
                masks.key_lengths(found, segments),
                masks.key_mask(found, segments),
                masks.video_mask(found, segments, local, spec),
                None if plan.exact else flags.dense(found),
                copies,
            )
    for plan, shift, grid, spec in orders:  # the numbers may be in the tile order of another grid
        translate_rows(view, sizes, plan.layout.picked, shift, grid, spec)


def _windowed(view: GraphView, plan: GridPlan, sizes: SizeNodes) -> tuple[list[Number], Number]:
    """(T, H, W) of the frames that have a window, and the tokens of the video before them."""
    if plan.windowed is not None:
        _, rows, cols = plan.windowed
        return list(plan.windowed), plan.ends[0] * rows * cols
    first = _first_use(view, plan)
    whole = _grid_numbers(view, plan, sizes, first)
    if not any(plan.ends):
        return whole, 0

    def call(target: Any, a: Number, b: Number) -> torch.fx.Node:
        return add_call(first.graph, "call_function", target, (a, b), like=first)

    with first.graph.inserting_before(first):
        frame = call(operator.mul, whole[1], whole[2])
        frames = call(operator.sub, whole[0], sum(plan.ends))
        ends = [call(operator.mul, n, frame) for n in plan.ends]
        for number, node in zip(plan.ends, ends, strict=True):
            sizes.state(number * plan.frame, node)
        between = axis_size(plan.axis) - sum(plan.ends) * plan.frame
        sizes.state(between, call(operator.mul, frames, frame))
    return [frames, *whole[1:]], ends[0]


def _grid_numbers(
    view: GraphView, plan: GridPlan, sizes: SizeNodes, first: torch.fx.Node
) -> list[Number]:
    """(T, H, W) of a grid that stays symbolic, as nodes of the root graph before its first use."""
    numbers: list[Number] = []
    for factor in plan.factors:
        size = axis_size((factor,))
        node = size if isinstance(size, int) else sizes.of_axis((factor,), first)
        if node is None:  # a value with this axis by itself is made later, one of its size is not
            node = sizes.of_size(size, view.gm, first)
        numbers.append(node)
    return plan.sites[0].grid.in_place(numbers)


def _first_use(view: GraphView, plan: GridPlan) -> torch.fx.Node:
    """The first node of the root graph that may read the grid's sizes, by itself or in its body."""
    readers = [reader for conversion in plan.layout.conversions for reader in conversion.readers]
    readers += [spread.reader for spread in plan.layout.spreads]
    readers += [picked.reader for picked in plan.layout.picked]
    readers += [found.site.node for found in plan.sites]
    return view.in_root(min(readers, key=view.position.__getitem__))


def _dense_flags(
    view: GraphView,
    plans: Sequence[GridPlan],
    noise: NoisePlan,
    settings: Settings,
    sizes: SizeNodes,
) -> torch.fx.Node | None:
    q = fake_value(plans[0].sites[0].site.q)
    if noise.of_call:
        batch = _batch(plans[0].sites[0], noise)
        return add_flags(view.gm, _torch.specialise(batch, _torch.shape_env_of(view.gm)), q.device)
    return insert_dense(
        view.gm,
        noise.fact,
        noise.convention,
        settings.dense_above,
        settings.dense_below,
        _batch_number(view, plans[0], noise, sizes),
        q.device,
    )


def _batch_number(view: GraphView, plan: GridPlan, noise: NoisePlan, sizes: SizeNodes) -> Number:
    output = next(n for n in reversed(view.nodes) if n.op == "output" and view.owner[n] is view.gm)
    return sizes.of_size(_batch(plan.sites[0], noise), view.gm, output)


def _batch(found: VideoAttention, noise: NoisePlan) -> Size:
    """Samples that have a timestep of their own: the attention's batch, or the timestep's where heads are merged into it."""
    site = found.site
    if not site.heads_in_batch:
        return sizes_of(site.q, site.q_order, site.samples)[0]
    shape = [] if noise.fact is None else list(fake_value(noise.fact.node).shape)
    return size_of(shape[0]) if shape else 1
