"""Which attention is self-attention over a (T, H, W) token grid, and where is the text beside the video?

The axes of q and k (see `trace_dims`) answer both: a token axis `([t3 h4 w5 | l7])` is a 3x4x5 grid followed by a context
segment of 7 tokens. What is asked of a site before it may be replaced, in order: q and k have the same token axis and come
from the same token stream; exactly one segment is a grid, and its factors are proved by a convolution, a patchify, an
unpatchify or positions, or declared by the option `grid`; nothing in the batch axis is a frame; the mask is absent or says
no more than how many context tokens are valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal

import sympy
import torch.fx

from .attention_site import AttentionSite, Order
from .axes import Atom, Axis, Size, axis_size, resolve, same_size, segments_of, size_of
from .graph_view import fake_value, is_parameter
from .hints import Hint, Hints
from .operator_limits import unsupported
from .prove_mask import Below, Everywhere, lower_bound, prove_mask
from .token_streams import TokenStreams
from .trace_dims import DimTrace

OF_CALL = "another graph of this call"
_NO_HINTS = Hints()
_WITHOUT_LATENT = ("unpatchify", "option grid", "positions of the rope tables", OF_CALL)


@dataclass(frozen=True)
class Refusal:
    """An attention that stays as it is, and what would change that."""

    name: str
    reason: str
    hint: str
    over_grid: bool = True  # False: nothing shows that its tokens are video at all
    by_request: bool = False  # an option keeps it exact


@dataclass(frozen=True, eq=False)
class GridAxis:
    """A token axis that is a grid, and its factors: frames (or none), rows and columns, outermost first."""

    axis: Axis
    factors: Axis
    evidence: str
    kind: Literal["proved", "declared", "hinted"] = "proved"
    hint: Hint | None = None
    contradicts: tuple[int, int, int] | None = None  # a declared grid of as many tokens

    @property
    def basis(self) -> str:
        """How the grid is known, for the report."""
        text = f"{self.kind} by {self.evidence}"
        if self.contradicts is not None:
            text += f", so {self.contradicts} of option grid is not used"
        return text

    @property
    def shape(self) -> tuple[Size, Size, Size]:
        sizes = [f.size for f in self.factors if isinstance(f, Atom)]
        frames, rows, cols = [1, *sizes] if len(sizes) == 2 else sizes
        return frames, rows, cols


@dataclass(frozen=True, eq=False)
class ContextLengths:
    """Valid tokens of the context segment after the video: `limit - start`, clamped to the segment."""

    limit: torch.fx.Node
    start: Size


@dataclass(frozen=True, eq=False)
class VideoAttention:
    """Self-attention over a token grid.

    segments: (role, size) in sequence order; one role is "video".
    lengths: None when every context token is valid.
    """

    site: AttentionSite
    grid: GridAxis
    segments: tuple[tuple[str, Size], ...]
    lengths: ContextLengths | None


def same_axis(a: Axis, b: Axis) -> bool:
    return resolve(a) == resolve(b)


class GridInference:
    """Answers for the attention sites of one graph. declared: option `grid`; known: token count -> grid in this call."""

    def __init__(
        self,
        trace: DimTrace,
        declared: tuple[int, int, int] | None = None,
        hints: Hints = _NO_HINTS,
        known: Mapping[int, tuple[int, int, int] | None] = MappingProxyType({}),
    ) -> None:
        self.trace = trace
        self.declared = declared
        self.hints = hints
        self.known = known
        self._inputs = self._latents(
            n for n in trace.view.nodes if trace.view.is_root_input(n) and not is_parameter(n)
        )
        output = next(iter(reversed(trace.view.gm.graph.nodes)))
        self._outputs = self._latents(output.all_input_nodes)
        # declared grids: one tuple of factors per token axis
        self._declared: dict[Axis, Axis] = {}
        self.streams = TokenStreams(trace)

    def _latents(self, nodes: Any) -> list[list[Axis]]:
        """Axes of the tensors among the nodes: b, c, t, (h p), (w p) of a latent that is cut into patches."""
        known = [dims for dims in map(self.trace.dims, nodes) if dims is not None]
        return [[resolve(axis, to_grid=True) for axis in dims] for dims in known]

    def classify(self, site: AttentionSite) -> VideoAttention | Refusal | None:
        """What a site is; None for attention that is not over video tokens (cross-attention, text)."""
        if site.opaque:
            return self._opaque(site)
        axes = [self.token_axis(site, *operand) for operand in site.operands]
        q_axis, k_axis, v_axis = axes
        if q_axis is None or k_axis is None or v_axis is None or not same_axis(k_axis, v_axis):
            return None
        parts = segments_of(q_axis)
        grids = [i for i, part in enumerate(parts) if self.grid_of(part) is not None]
        if not same_axis(q_axis, k_axis):
            return self._unequal(site, parts, grids, segments_of(k_axis))
        if not self.streams.same_stream(site, parts[grids[0]] if grids else q_axis):
            return None
        if self._frames_in_batch(site):
            return Refusal(
                site.name,
                "factorised attention: frames or positions are in the batch axis",
                "nothing to do: such attention is short already",
            )
        if not grids:
            return self._no_grid(site, q_axis)
        if any(self.streams.joined(site, parts[g]) for g in grids):
            return Refusal(
                site.name,
                "its block is called with the video and with other tokens",
                "give each stream of tokens a block of its own, or compile without nested regions",
            )
        if not all(self._from_latent(site, parts[g]) for g in grids):
            return None
        if len(grids) > 1:
            return Refusal(
                site.name, "the sequence holds the video grid more than once", "report the model"
            )
        return self._video(site, parts, grids[0])

    def token_axis(self, site: AttentionSite, node: torch.fx.Node, order: Order) -> Axis | None:
        """The tokens of one sample; where samples stand one after the other, they are the outer factors."""
        dims = self.trace.dims(node)
        if dims is None:
            return None
        axis = resolve(dims[order.tokens])
        outer: Size = 1
        while order.packed and not same_size(outer, site.samples):
            if not axis:
                return None
            outer, axis = outer * axis_size(axis[:1]), axis[1:]
        return axis

    def _opaque(self, site: AttentionSite) -> Refusal | None:
        """Attention of which no more is known than what it reads."""
        assert site.problem is not None
        q, k = (self.trace.dims(n) or () for n in (site.q, site.k))
        keys = [part for axis in k for part in segments_of(axis)]
        shared = [part for axis in q for part in segments_of(axis) if part in keys]
        if not any(part in shared for axis in q for part in segments_of(axis) if len(part) > 1):
            return None
        # The tokens may have the samples before them.
        over_grid = any(self.grid_of(part[-n:]) is not None for part in shared for n in (2, 3))
        return Refusal(site.name, site.problem.reason, site.problem.hint, over_grid=over_grid)

    def _video(
        self, site: AttentionSite, parts: tuple[Axis, ...], index: int
    ) -> VideoAttention | Refusal:
        grid = self.grid_of(parts[index])
        assert grid is not None
        problem = unsupported(site)
        if problem is not None:
            return Refusal(site.name, problem.reason, problem.hint)
        segments = tuple(
            ("video" if i == index else "context", axis_size(part)) for i, part in enumerate(parts)
        )
        lengths = self._lengths(site, segments, index) if site.mask is not None else None
        if isinstance(lengths, Refusal):
            return lengths
        return VideoAttention(site, grid, segments, lengths)

    def _lengths(
        self, site: AttentionSite, segments: tuple[tuple[str, Size], ...], index: int
    ) -> ContextLengths | Refusal | None:
        assert site.mask is not None
        fact = prove_mask(self.trace.view, site.mask) if _per_sample(site.mask) else None
        if fact == Everywhere(True):
            return None
        last = len(segments) - 1
        if isinstance(fact, Below) and not fact.negated and index == last - 1:
            start: Size = sum(size for _, size in segments[:last])
            bound = lower_bound(self.trace.view, fact.limit)
            if bound is not None and _at_least(bound, start):
                return ContextLengths(fact.limit, start)
        return Refusal(
            site.name,
            "its mask may hide video tokens: only padding of the text after the video can be proved harmless",
            "pass no mask, or trim the padding from the prompt",
        )

    def _unequal(
        self,
        site: AttentionSite,
        parts: tuple[Axis, ...],
        grids: list[int],
        keys: tuple[Axis, ...],
    ) -> Refusal | None:
        if self._is_part_of_grid(parts, keys):
            return Refusal(
                site.name,
                "its queries are a part of the video's tokens",
                "attend with all of them in one call, or put the parts together in their order by torch.cat",
            )
        if any(any(same_axis(parts[g], part) for part in keys) for g in grids):
            return Refusal(
                site.name,
                "queries and keys are different sequences that share the video tokens",
                "nothing to do yet: keys beside the query's own sequence are not supported",
            )
        return None

    def _is_part_of_grid(self, parts: tuple[Axis, ...], keys: tuple[Axis, ...]) -> bool:
        """Are the queries a slice of the keys, and these a grid?"""
        for factor in (part[0] for part in parts if len(part) == 1):
            if isinstance(factor, Atom) and factor.slice_of is not None:
                whole = segments_of(factor.slice_of[0])
                return whole == keys and any(self.grid_of(key) is not None for key in keys)
        return False

    def _no_grid(self, site: AttentionSite, axis: Axis) -> Refusal:
        parts = segments_of(axis)
        for doubt in self.hints.doubts:
            dims = self.trace.dims(doubt.node)
            if dims is not None and any(p in parts for p in segments_of(dims[doubt.dim])):
                return Refusal(
                    site.name,
                    f"token grid of {axis_size(axis)} tokens is not known: {doubt.reason}",
                    doubt.hint,
                    over_grid=False,
                )
        return Refusal(
            site.name,
            f"token grid of {axis_size(axis)} tokens is not known: nothing in this graph gives its "
            "frames, rows and columns",
            "if they are video, compile the whole model instead of its blocks, or pass "
            "options={'grid': (frames, rows, cols)}",
            over_grid=False,
        )

    def grid_of(self, part: Axis) -> GridAxis | None:
        """What the graph proves comes first: a declared grid of as many tokens may be that of another resolution."""
        stated = self._of_call(part) or self._of_option(part)
        found = self.proved(part) or stated or self.by_positions(part)
        if found is None or found.kind == "declared" or self.declared is None:
            return found
        contradicted = same_size(prod(found.shape), prod(self.declared)) and not all(
            map(same_size, found.shape, self.declared)
        )
        return replace(found, contradicts=self.declared) if contradicted else found

    def proved(self, part: Axis) -> GridAxis | None:
        atoms = _grid_atoms(part)
        if atoms is None:
            return None
        hint = self.hints.by_atom.get(atoms[-1])
        if hint is not None:
            return GridAxis(part, atoms, hint.evidence, "hinted", hint)
        origin = next((a.origin for a in atoms if a.origin), "")
        if origin and all(a.origin for a in atoms[-2:]):
            return GridAxis(part, atoms, origin)
        if self._spread_over(self._inputs, atoms):
            return GridAxis(part, atoms, "reshape patchify")
        if self._spread_over(self._outputs, atoms):
            return GridAxis(part, atoms, "unpatchify")
        return None

    def _of_call(self, part: Axis) -> GridAxis | None:
        size = axis_size(part)
        shape = self.known.get(size) if isinstance(size, int) else None
        return None if shape is None else GridAxis(part, self._stated(part, shape), OF_CALL)

    def _of_option(self, part: Axis) -> GridAxis | None:
        if self.declared is None or not same_size(axis_size(part), prod(self.declared)):
            return None
        return GridAxis(part, self._stated(part, self.declared), "option grid", "declared")

    def _stated(self, part: Axis, shape: tuple[int, int, int]) -> Axis:
        return self._declared.setdefault(resolve(part), tuple(Atom(s) for s in shape))

    def by_positions(self, part: Axis) -> GridAxis | None:
        atoms = _grid_atoms(part)
        if atoms is None or len(atoms) != 3:
            return None
        return GridAxis(part, atoms, "positions of the rope tables")

    def _spread_over(self, latents: list[list[Axis]], atoms: tuple[Atom, ...]) -> bool:
        """Does one latent have each of the atoms as the outermost factor of a dimension of its own?

        Two alone may be frames and positions in a frame: they are rows and columns if both are cut into patches.
        """
        for axes in latents:
            own = [axis for atom in atoms for axis in axes if axis[:1] == (atom,)]
            if len(own) == len(atoms) and (len(atoms) > 2 or all(len(axis) > 1 for axis in own)):
                return True
        return False

    def _from_latent(self, site: AttentionSite, part: Axis) -> bool:
        """Do the site's tokens come from the latent that proves its grid?

        Text of as many tokens has the grid's axis too, once it is added to a table of positions that the video shares.
        """
        grid = self.grid_of(part)
        if grid is None or grid.hint is not None or grid.evidence in _WITHOUT_LATENT:
            return True
        return bool(
            self.streams.source(site, site.q, part) & self.streams.tokens_of_latent(resolve(part))
        )

    def _frames_in_batch(self, site: AttentionSite) -> bool:
        """Is a part of q's batch axis an axis of the latent other than its batch?"""
        latents = (*self._inputs, *self._outputs)
        inner = {axis[0] for axes in latents for axis in axes[1:] if axis}
        order = site.q_order
        others = (order.heads, order.tokens, order.features)
        dims = self.trace.dims(site.q) or ()
        batch = {
            f for d, axis in enumerate(dims) if d not in others for f in resolve(axis, to_grid=True)
        }
        return any(f in inner for f in batch if isinstance(f, Atom))


def _per_sample(mask: torch.fx.Node) -> bool:
    """Is the first axis of a mask that of the samples? Fewer than four axes are those of heads, queries and keys."""
    shape = fake_value(mask).shape
    return len(shape) == 4 or all(same_size(size_of(s), 1) for s in shape[:-1])


def _grid_atoms(part: Axis) -> tuple[Atom, ...] | None:
    """The two or three factors that a token axis may have to be a grid."""
    factors = resolve(part, to_grid=True)
    atoms = tuple(f for f in factors if isinstance(f, Atom))
    return atoms if len(atoms) == len(factors) and len(factors) in (2, 3) else None


def _at_least(bound: Size, start: Size) -> bool:
    return bool(sympy.expand(bound - start).is_nonnegative)
