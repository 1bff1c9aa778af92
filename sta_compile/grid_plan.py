"""What will be done with the attentions over each token grid of a graph: tiling, window, layout, and the operator's spec."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch.fx

from . import _torch
from .analysis.axes import Axis, Size, atoms_of, axis_size, resolve
from .analysis.grid_axis import GridAxis, as_they_stand, by_name
from .analysis.hints import Hint
from .analysis.infer_grid import Refusal, VideoAttention
from .analysis.propagate_layout import LayoutPlan, propagate_layout
from .analysis.trace_dims import DimTrace
from .errors import InvalidOptionError
from .ir.attention_spec import AttentionSpec, HeadTriples, Triple, is_per_head
from .ir.trade import Trade
from .planning.choose_tiles import Plan, plan_attention
from .planning.cut_layout import LayoutConflict
from .report import ReplacedSite
from .settings import Settings


@dataclass(frozen=True, eq=False)
class GridPlan:
    """The attentions over one token axis.

    grid: its axes in tokens as these stand, outermost first, and plan: its tiling and window; both None for a grid that
        stays symbolic. order: which of them are frames, rows and columns (see `GridAxis`).
    settings: with window and tile in this order.
    ends: first and last frames that every query sees; `plan`, and tile order, are of the frames between them.
    recorded: gradients of its attentions are recorded.
    """

    axis: Axis
    factors: Axis
    sites: tuple[VideoAttention, ...]
    grid: Triple | None
    plan: Plan | None
    settings: Settings
    layout: LayoutPlan
    ends: tuple[int, int] = (0, 0)
    recorded: bool = False

    @property
    def windowed(self) -> Triple | None:
        """The grid without the frames that every query sees."""
        return None if self.grid is None else _between(self.grid, self.ends)

    @property
    def order(self) -> Triple:
        return self.sites[0].grid.order

    @property
    def frame(self) -> Size:
        """Tokens of a frame, where frames come first."""
        _, rows, cols = self.sites[0].grid.shape
        return rows * cols

    @property
    def kept(self) -> float | None:
        """Share of the video's (query, key) pairs that is computed."""
        if self.plan is None or self.grid is None or self.windowed is None:
            return None
        windowed, everything = prod(self.windowed), prod(self.grid)
        return 1 - (1 - self.plan.kept) * (windowed / everything) ** 2

    @property
    def exact(self) -> bool:
        if self.precision == "tiered":
            return False
        return self.plan.is_full if self.plan is not None else self.settings.window == "full"

    @property
    def checked_hint(self) -> Hint | None:
        """The input whose values every call has to be checked for; a full window is exact whatever the grid."""
        return None if self.exact else self.sites[0].grid.hint

    def spec(self, roles: Sequence[str]) -> str:
        """Text of the AttentionSpec for attentions whose segments have these roles."""
        settings, precision = self.settings, self.precision
        trade = settings.trade if precision == "tiered" else Trade()
        common = AttentionSpec(
            roles=tuple(roles),
            request=settings.window,
            tile=settings.tile,
            min_tokens=settings.min_tokens,
            kernel=settings.kernel,
            precision=precision,
            trade=trade,
        )
        if self.plan is None:
            return common.text()
        plan = self.plan
        window: Triple | Literal["full"] | HeadTriples = plan.window.tiles
        if plan.is_full:
            window = "full"
        elif plan.head_windows:
            window = tuple(each.tiles for each in plan.head_windows)
        known = replace(
            common, request=None, tile=None, min_tokens=0, tiles=plan.tiling.tiles, window=window
        )
        return known.text()

    @property
    def precision(self) -> str:
        """As in AttentionSpec."""
        return "native" if self.recorded else self.settings.precision

    def _evidence(self, site: VideoAttention) -> str:
        parts = [site.grid.basis]
        if any(self.ends) and self.settings.always_keep is not None:
            frames = ", ".join(map(str, self.settings.always_keep))
            parts.append(f"beside frames that every query sees: {frames}")
        if self.checked_hint:
            parts.append("checked on the device")
        if site.tokens.video_mask:
            parts.append("its mask is checked on the device to leave all video keys")
        return ", ".join(parts)

    @property
    def why_exact(self) -> str:
        """Why a window that need not be full is; "" if it may be, or is not."""
        if self.plan is None or not self.plan.is_full or self.settings.window == "full":
            return ""
        assert self.windowed is not None
        tokens = "x".join(map(str, by_name(self.order, self.windowed)))
        whose = "each head's window" if is_per_head(self.settings.window) else "the window"
        if any(self.ends):
            return f"always_keep leaves {tokens} tokens, and {whose} has all of these"
        return f"{whose} has all of {tokens} tokens; a smaller window or tile has fewer"

    @property
    def why_native(self) -> str:
        """Why a precision that was asked for is not used; "" if it is."""
        if self.precision == self.settings.precision:
            return ""
        return (
            f"precision={self.settings.precision!r} has no gradients, and they are recorded: attention stays native; call "
            "the model under torch.no_grad()"
        )

    def report(self, kernel: str) -> list[ReplacedSite]:
        """One row per attention; numbers are (frames, rows, cols) whatever the order of the tokens."""
        plan = self.plan

        def named(values: Triple | None) -> Triple | None:
            return None if values is None else by_name(self.order, values)

        return [
            ReplacedSite(
                name=site.site.name,
                grid=named(self.windowed),
                segments=tuple(
                    (role, size if isinstance(size, int) else None)
                    for role, size in site.tokens.segments
                ),
                tiles=named(plan.tiling.tiles) if plan is not None else None,
                tile=named(plan.tiling.extents) if plan is not None else None,
                window=named(plan.window.effective(plan.tiling)) if plan is not None else None,
                windows=len(set(plan.windows)) if plan is not None else 1,
                kept=self.kept,
                kernel=kernel,
                evidence=self._evidence(site),
                order=site.grid.order_text,
                why_exact=self.why_exact,
                precision=self.precision,
                why_native=self.why_native,
            )
            for site in self.sites
        ]


def _between(grid: Triple, ends: tuple[int, int]) -> Triple:
    return grid[0] - sum(ends), grid[1], grid[2]


def plan_grids(
    trace: DimTrace, found: Sequence[VideoAttention], settings: Settings
) -> tuple[list[GridPlan], list[Refusal]]:
    """Layout, tiling and window of each grid.

    A symbolic grid is specialised by a guard, unless the user marked one of its axes dynamic, or this is the last compile
    that the recompile limit allows, which then has to serve every other grid. The layout comes first: a guard turns sizes
    of the trace into numbers half way.
    """
    by_axis: dict[Axis, list[VideoAttention]] = {}
    for attention in found:
        by_axis.setdefault(resolve(attention.grid.axis), []).append(attention)
    plans, refused = [], []
    crossing = crossing_axes(by_axis, settings.min_tokens)
    for axis, all_sites in by_axis.items():
        sites, without = _with_windows(all_sites, settings)
        refused += without
        if not sites:
            continue
        try:
            around = settings.layout == "site" or axis in crossing
            layout = propagate_layout(trace, axis, sites, around_sites=around)
        except LayoutConflict:
            refused += [_conflict(site.site.name) for site in sites]
            continue
        first = sites[0].grid
        grid = known_shape(trace.view.gm, first.shape)
        if grid is not None and prod(grid) < settings.min_tokens:
            refused += [_short(site.site.name, prod(grid), settings) for site in sites]
            continue
        plan = _plan(axis, first, sites, grid, _in_order(settings, first.order), layout)
        if plan is None:
            refused += [_frames_apart(site) for site in sites]
            continue
        plans.append(plan)
    return plans, refused


def crossing_axes(axes: Collection[Axis], min_tokens: int) -> set[Axis]:
    """Token axes that are made of some of the same axes, as a video's and its frames'.

    Tile order of one says nothing of the order in the other, so each is put into it around its attentions only.
    """
    large = [
        axis
        for axis in dict.fromkeys(map(resolve, axes))
        if not isinstance(size := axis_size(axis), int) or size >= min_tokens
    ]
    atoms = {axis: set(atoms_of(axis)) for axis in large}
    return {
        axis
        for axis in large
        if any(atoms[axis] & atoms[other] for other in large if other != axis)
    }


def unfit_grid(
    grid: Triple | None, lengths: Collection[Size], found: Collection[VideoAttention]
) -> str:
    """What to say of a declared grid that has as many tokens as no sequence of a graph's attentions, or that the graph
    contradicts; "" if it may be right."""
    for attention in found:
        if attention.grid.contradicts is not None:
            return f"the grid is {attention.grid.basis}"
    if (
        grid is None
        or not lengths
        or any(n == prod(grid) or not isinstance(n, int) for n in lengths)
    ):
        return ""
    longest = sorted((n for n in lengths if isinstance(n, int)), reverse=True)[:4]
    return (
        f"option grid {grid} has {prod(grid)} tokens and fits no attention, whose sequences have "
        f"{', '.join(map(str, longest))}"
    )


def _with_windows(
    sites: list[VideoAttention], settings: Settings
) -> tuple[list[VideoAttention], list[Refusal]]:
    """Sites whose heads have windows, and the others: a list of windows has one for each head."""
    windows = settings.window
    if not is_per_head(windows):
        return sites, []
    able = [each for each in sites if not each.site.heads_in_batch]
    fitting = [each for each in able if each.site.heads == len(windows)]
    if able and not fitting:
        have = " or ".join(sorted({str(each.site.heads) for each in able}))
        raise InvalidOptionError(
            f"the option window lists {len(windows)} windows, and {able[0].site.name} has {have} heads; list one for "
            "each head, or pass one window for all"
        )
    return fitting, [_other_heads(each, len(windows)) for each in sites if each not in fitting]


def _in_order(settings: Settings, order: Triple) -> Settings:
    """Settings whose window and tile are in the order of the tokens."""
    window, tile = settings.window, settings.tile
    if is_per_head(window):
        window = tuple(as_they_stand(order, each) for each in window)
    elif not isinstance(window, str):
        window = as_they_stand(order, window)
    tile = None if tile is None else as_they_stand(order, tile)
    return replace(settings, window=window, tile=tile)


def _plan(
    axis: Axis,
    first: GridAxis,
    sites: Sequence[VideoAttention],
    grid: Triple | None,
    settings: Settings,
    layout: LayoutPlan,
) -> GridPlan | None:
    """None where frames are to be kept, and the tokens of a frame do not stand together."""
    factors = first.factors
    plan = None if grid is None else plan_attention(grid, settings.window, settings.tile)
    full = plan.is_full if plan is not None else settings.window == "full"
    frames = settings.always_keep
    recorded = any(each.site.recorded for each in sites)
    if frames is None or full:  # a full window keeps all frames
        return GridPlan(
            axis, factors, tuple(sites), grid, plan, settings, layout, recorded=recorded
        )
    if first.order[0] != 0:
        return None
    ends = sum(frame >= 0 for frame in frames), sum(frame < 0 for frame in frames)
    _, rows, cols = first.shape if grid is None else grid
    before, after = (n * rows * cols for n in ends)
    kept = tuple(replace(site, tokens=site.tokens.with_ends(before, after)) for site in sites)
    if grid is None:
        return GridPlan(axis, factors, kept, None, None, settings, layout, ends, recorded)
    between = _between(grid, ends)
    if between[0] < 1:
        raise InvalidOptionError(
            f"always_keep={{'frames': {list(frames)}}} leaves none of the {grid[0]} frames of a {grid} token grid; "
            'keep fewer, or pass window="full" for exact attention'
        )
    plan = plan_attention(between, settings.window, settings.tile)
    return GridPlan(axis, factors, kept, grid, plan, settings, layout, ends, recorded)


def known_shape(gm: torch.fx.GraphModule, shape: tuple[Size, Size, Size]) -> Triple | None:
    if not all(isinstance(size, int) for size in shape) and _torch.last_compile_of_frame():
        return None
    env: Any = _torch.shape_env_of(gm)
    if any(_torch.must_stay_dynamic(size, env) for size in shape):
        return None
    t, h, w = (_torch.specialise(size, env) for size in shape)
    return (t, h, w)


def stays_symbolic(name: str, dynamic: bool) -> Refusal:
    """dynamic: the user marked sizes so; else this is the last graph that the recompile limit allows."""
    if dynamic:
        why = "are marked dynamic"
        hint = "don't mark them, so that each grid has a graph of its own"
    else:
        why = "stay symbolic in the last graph that the recompile limit allows"
        hint = "raise torch._dynamo.config.recompile_limit, or compile by sta_compile.compile(model), which does"
    return Refusal(
        name,
        f"of its frames, rows and columns, which {why}, only the number of tokens is known",
        hint,
    )


def _short(name: str, tokens: int, settings: Settings) -> Refusal:
    return Refusal(
        name,
        f"{tokens} video tokens are fewer than min_tokens={settings.min_tokens}, so attention stays exact",
        f"pass options={{'min_tokens': {tokens}}} to make it sparse all the same",
        by_request=True,
    )


def _frames_apart(site: VideoAttention) -> Refusal:
    return Refusal(
        site.site.name,
        f"always_keep names frames, and the tokens of a frame do not stand together: {site.grid.order_text}",
        "leave always_keep out, or order the tokens (frames, rows, cols) in the model",
    )


def _other_heads(attention: VideoAttention, windows: int) -> Refusal:
    site = attention.site
    if site.heads_in_batch:
        return Refusal(
            site.name,
            "its heads are merged with the batch, so they can't have windows of their own",
            "pass one window for all heads, or write its attention with a dimension of heads",
        )
    return Refusal(
        site.name,
        f"it has {site.heads} heads and the option window lists {windows} windows",
        "pass one window for all heads",
    )


def _conflict(name: str) -> Refusal:
    return Refusal(
        name,
        "its tokens are written in place where they must be in raster order",
        "write the model without in-place operations on video tokens",
    )
