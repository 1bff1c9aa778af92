"""Which attention is self-attention over a (T, H, W) token grid, and what stands beside the video?

The axes of q and k (see `trace_dims`) answer both: a token axis `([t3 h4 w5 | l7])` is a 3x4x5 grid followed by a context
segment of 7 tokens. What is asked of a site before it may be replaced, in order: q and k share a part of their tokens, from
one token stream; that part is a grid, and its factors are proved by a convolution, a patchify, an unpatchify or positions,
declared by the option `grid`, or hinted; nothing in the batch axis is a frame; other queries are keys as well, in the same
order; the mask is absent or leaves all keys of the video to its queries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx

from ..ir.known_tokens import OF_CALL, Doubt
from .attention_site import AttentionSite, DimOrder, Problem
from .axes import (
    Atom,
    Axis,
    Size,
    axis_size,
    resolve,
    same_size,
    segments_of,
)
from .factorised import ELSEWHERE, IN_PIECES, Factorisation
from .grid_axis import GridAxis
from .grid_proofs import POSITIONS, RESHAPE, GridProofs
from .hints import Hints, how_to_tell
from .main_part import MainPart
from .moved_tokens import MOVED, MovedTokens
from .operator_limits import (
    FROM_OTHER_GRAPHS,
    MADE_OF_VIDEO,
    ONE_BODY,
    PICKED_BY_DATA,
    SEVERAL_VIDEOS,
    unsupported,
)
from .other_processes import SHARDED, OtherProcesses
from .rival_sequences import RivalSequences
from .segments import SequenceReader, Tokens, match_segments, same_axis, start_of, with_wholes
from .token_parts import TokenParts
from .token_streams import TokenStreams
from .told_axes import REASONS, UNSEEN, ToldAxes
from .trace_dims import DimTrace
from .written_keys import WRITTEN, WrittenKeys

_NO_HINTS, _NOTHING_TOLD = Hints(), ToldAxes()
_WITHOUT_LATENT = ("unpatchify", "option grid", POSITIONS, RESHAPE, OF_CALL)


@dataclass(frozen=True)
class Refusal:
    """An attention that stays as it is, and what would change that."""

    name: str
    reason: str
    hint: str
    over_grid: bool = True  # False: nothing shows that its tokens are video at all
    by_request: bool = False  # an option keeps it exact


@dataclass(frozen=True, eq=False)
class VideoAttention:
    """Self-attention over a token grid, and over the tokens beside it."""

    site: AttentionSite
    grid: GridAxis
    tokens: Tokens


def _doubtful(site: AttentionSite, doubt: Doubt) -> Refusal:
    problem = REASONS[doubt]
    return Refusal(site.name, problem.reason, problem.hint, over_grid=problem is not UNSEEN)


class GridInference:
    """Answers for the attention sites of one graph. declared: option `grid`; told: by other graphs of the call.

    sites: all of them, where one may be told from another by its number of tokens.
    """

    def __init__(
        self,
        trace: DimTrace,
        declared: tuple[int, int, int] | None = None,
        hints: Hints = _NO_HINTS,
        told: ToldAxes = _NOTHING_TOLD,
        sites: Iterable[AttentionSite] = (),
    ) -> None:
        self.trace, self.hints = trace, hints
        self._processes = OtherProcesses(trace.view)
        self.streams = TokenStreams(trace)
        attended = list(self._attended(sites))
        rivals = RivalSequences(self.streams, attended)
        self.grids = GridProofs(trace, declared, hints, told, rivals)
        self._parts = TokenParts(self.streams)
        self._main = MainPart(self._parts, self.grids)
        self.factorisation = Factorisation(
            self.streams, self.grids.folded, self.grids.latents, (asks for _, asks, _ in attended)
        )
        self._moved = MovedTokens(self._parts)
        self._written_keys = WrittenKeys(self.streams)
        self._videos: list[Axis] = []  # of the attentions so far
        self._sequences = SequenceReader(trace.view, hints.values)

    def _attended(
        self, sites: Iterable[AttentionSite]
    ) -> Iterator[tuple[AttentionSite, Axis, Axis]]:
        """The token axes of queries and keys."""
        for site in sites:
            known = not site.opaque
            queries = self.token_axis(site, site.q, site.q_order) if known else None
            keys = self.token_axis(site, site.k, site.k_order) if known else None
            if queries is not None and keys is not None:
                yield site, queries, keys

    def classify(self, site: AttentionSite) -> VideoAttention | Refusal | None:
        """What a site is; None for attention that is not over video tokens (cross-attention, text)."""
        if site.opaque:
            return self._opaque(site, site.problem or PICKED_BY_DATA)
        if self._processes.has(site):
            return Refusal(site.name, SHARDED.reason, SHARDED.hint)
        q_axis, k_axis, v_axis = (self.token_axis(site, *operand) for operand in site.operands)
        if self.streams.all_given(site, (q_axis, k_axis, v_axis)):
            return Refusal(site.name, FROM_OTHER_GRAPHS.reason, FROM_OTHER_GRAPHS.hint, False)
        if q_axis is None or k_axis is None or v_axis is None or not same_axis(k_axis, v_axis):
            return self._opaque(site, PICKED_BY_DATA) if site.q_order.packed else None
        parts, keys = segments_of(q_axis), segments_of(k_axis)
        grids = [i for i, part in enumerate(parts) if self.grids.grid_of(part) is not None]
        if not same_axis(q_axis, k_axis):
            if self._is_part_of_grid(parts, keys):
                return Refusal(
                    site.name,
                    "its queries are a part of the video's tokens",
                    "attend with all of them in one call, or put the parts together in their order by torch.cat",
                )
            asking = grids
            grids = [g for g in asking if any(same_axis(parts[g], part) for part in keys)]
            if not grids:
                if any(self._written_keys.has(site, parts[g]) for g in asking):
                    return Refusal(site.name, WRITTEN.reason, WRITTEN.hint)
                return self._made_of_video(site, site.q, site.k)
        # Text as long as the video has its axis too, once both share a table of positions.
        of_latent = [g for g in grids if self._from_latent(site, parts, g)]
        main = self._main.of(q_axis, parts, of_latent or grids) if grids else None
        if same_axis(q_axis, k_axis):
            tokens = parts if main is None else parts[main : main + 1]
            if not any(self.streams.same_stream(site, part) for part in tokens):
                return None
        elif main is None or self._among_keys(site, parts, main, keys) is None:
            return None
        if main is not None and self._main.has_equals(q_axis, parts, main):
            return Refusal(site.name, SEVERAL_VIDEOS.reason, SEVERAL_VIDEOS.hint)
        factorised = self.factorisation.problem(site, q_axis, [parts[g] for g in grids] or parts)
        if factorised is not None:
            pieces = factorised is IN_PIECES and any(self._moved.operands(site, parts[0]))
            problem = MOVED if pieces else factorised
            return Refusal(site.name, problem.reason, problem.hint)
        if any(self.grids.in_parts(part) for part in ([parts[g] for g in grids] or parts)):
            return Refusal(site.name, ELSEWHERE.reason, ELSEWHERE.hint)
        if main is None:
            return self._no_grid(site, q_axis)
        if any(self.streams.joined(site, parts[g]) for g in grids):
            return Refusal(site.name, ONE_BODY.reason, ONE_BODY.hint)
        grid = self.grids.grid_of(parts[main])
        # Positions that were read from values are those of the tokens as they stand, whatever picked these.
        picked = grid is not None and grid.hint is None
        declared = self.grids.is_declared(parts[main])
        # Tables of positions are believed of tokens that nobody will ever see; tables that are given, of tokens, too, that
        # nobody has seen before.
        shown = [] if declared else [Doubt.UNSEEN, *([Doubt.UNSHOWN] if picked else [])]
        grave = [Doubt.MOVED, *([Doubt.ORDER] if picked else []), *shown]
        in_doubt = self._in_doubt(site, parts[main], grave)
        if in_doubt is not None:
            return in_doubt
        if any(self._moved.operands(site, parts[main], picked=picked, declared=declared)):
            return Refusal(site.name, MOVED.reason, MOVED.hint)
        return self._video(site, parts, main, keys) if of_latent else None

    def lengths(self, sites: Iterable[AttentionSite]) -> set[Size]:
        """Of the sequences that ask in these attentions, and of their segments."""
        axes = [self.token_axis(s, s.q, s.q_order) for s in sites if not s.opaque]
        known = [axis for axis in axes if axis is not None]
        return {axis_size(part) for axis in known for part in (axis, *segments_of(axis))}

    def token_axis(self, site: AttentionSite, node: torch.fx.Node, order: DimOrder) -> Axis | None:
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

    def _opaque(self, site: AttentionSite, problem: Problem) -> Refusal | None:
        """Attention of which no more is known than what it reads."""
        q, k = (self.trace.dims(n) or () for n in (site.q, site.k))
        keys = [key for axis in k for key in with_wholes(axis) if len(key) > 1]
        parts = [part for axis in q for part in segments_of(axis)]
        shared = [part for part in parts if any(part[-len(key) :] == key for key in keys)]
        if not shared:
            return None
        # The tokens may have the samples before them.
        over_grid = any(
            self.grids.grid_of(part[-n:]) is not None for part in shared for n in (2, 3)
        )
        return Refusal(site.name, problem.reason, problem.hint, over_grid=over_grid)

    def _video(
        self,
        site: AttentionSite,
        parts: tuple[Axis, ...],
        index: int,
        keys: tuple[Axis, ...],
    ) -> VideoAttention | Refusal | None:
        grid, problem = self.grids.grid_of(parts[index]), unsupported(site)
        assert grid is not None
        if problem is not None:
            return Refusal(site.name, problem.reason, problem.hint)
        among = self._among_keys(site, parts, index, keys)
        if among is None:
            return None
        segments = match_segments(parts, keys, index, among)
        if segments is None:
            return Refusal(
                site.name,
                "tokens beside the video ask in another order than they are keys, or are no keys",
                "put queries and keys in one order",
            )
        tokens = self._sequences.read(site, segments)
        if tokens is None:
            return Refusal(
                site.name,
                "its mask may hide video tokens: only a mask that leaves all video keys to all queries is harmless",
                "pass no mask, or trim the padding from the prompt",
            )
        self._videos.append(grid.axis)
        return VideoAttention(site, grid, tokens)

    @property
    def equal_lengths(self) -> Mapping[Any, Any]:
        """Sizes that are the same in this call; if they always are, more is known of masks."""
        return self._sequences.equal

    def _among_keys(
        self, site: AttentionSite, parts: tuple[Axis, ...], index: int, keys: tuple[Axis, ...]
    ) -> int | None:
        """Which part of the keys are the video's own tokens; several parts of queries and keys may be of its axis."""
        part = parts[index]
        alike = [i for i, key in enumerate(keys) if same_axis(key, part)]
        if parts == keys and len(alike) == 1:
            return index
        asking = self._parts.sources(site.q, part, start_of(parts, index))
        for i in alike:
            start = start_of(keys, i)
            keyed, valued = (self._parts.sources(n, part, start) for n in (site.k, site.v))
            if asking & keyed & valued:
                return i
        return None

    def _is_part_of_grid(self, parts: tuple[Axis, ...], keys: tuple[Axis, ...]) -> bool:
        """Are the queries a slice of the keys, and these a grid?"""
        for factor in (part[0] for part in parts if len(part) == 1):
            if isinstance(factor, Atom) and factor.slice_of is not None:
                whole = segments_of(factor.slice_of[0])
                return whole == keys and any(self.grids.grid_of(key) is not None for key in keys)
        return False

    def moved(self, node: torch.fx.Node, part: Axis, *, in_all: bool = False) -> bool:
        """Do the tokens of a part of a value stand in another order than the video's?

        in_all: or those of anything that it is made of, embedded or not?
        """
        mixed = in_all and self._moved.moved(node, part, picked=True, projected=True)
        return mixed or self._moved.moved(node, part, picked=True)

    def came_moved(self, node: torch.fx.Node, axis: Axis) -> bool:
        """Are tokens of which no grid is known as many of a video's, in another order?"""
        videos = [resolve(video) for video in (*self.grids.embedded(), *self.grids.told.grids())]
        return any(
            self.streams.made_of(node, video) and self.moved(node, video)
            for video in dict.fromkeys(videos)
            if same_size(axis_size(video), axis_size(axis))
        )

    def is_told(self, grid: GridAxis) -> bool:
        """Is a grid known by other graphs of the call alone?"""
        return all(factor in self.grids.told.names for factor in grid.factors)

    def _in_doubt(
        self, site: AttentionSite, part: Axis, grave: Collection[Doubt]
    ) -> Refusal | None:
        """Whatever tables of positions tell, it is not known where tokens stand that come from another graph."""
        inputs = {n for node, *_ in site.operands for n in self.streams.inputs_of(node)}
        doubted = self.grids.told.doubted.items()
        doubts = [d for n, d in doubted if n in inputs and self.streams.holds(n, part)]
        return next((_doubtful(site, d) for d in doubts if d in grave), None)

    def _no_grid(self, site: AttentionSite, axis: Axis) -> Refusal:
        parts = segments_of(axis)
        in_doubt = next((d for d in map(self.grids.doubt, parts) if d in REASONS), None)
        if in_doubt is not None:
            return _doubtful(site, in_doubt)
        for doubt in self.hints.doubts:
            dims = self.trace.dims(doubt.node)
            if dims is not None and any(p in parts for p in segments_of(dims[doubt.dim])):
                return Refusal(
                    site.name,
                    f"token grid of {axis_size(axis)} tokens is not known: {doubt.reason}",
                    doubt.hint,
                    over_grid=False,
                )
        shared = next((part for part in parts if self.grids.is_shared_number(part)), None)
        if shared is not None:
            return Refusal(
                site.name,
                f"the model has several sequences of {axis_size(shared)} tokens, and only the number of tokens tells "
                "which is the video",
                "give the text (or a second video) another number of tokens",
                over_grid=False,
            )
        found = self._made_of_video(site, site.q)
        if found is not None:
            return found
        return Refusal(
            site.name,
            f"token grid of {axis_size(axis)} tokens is not known: nothing in this graph gives its "
            "frames, rows and columns",
            how_to_tell(),
            over_grid=False,
        )

    def _made_of_video(self, site: AttentionSite, *operands: torch.fx.Node) -> Refusal | None:
        """Attention over tokens that come from one video, in an order that is not known."""
        for video in dict.fromkeys(map(resolve, (*self.grids.embedded(), *self._videos))):
            moved = self._moved.operands(site, video)
            made = all(self.streams.made_of(operand, video) for operand in operands)
            if all(moved) or (made and any(moved)):
                return Refusal(site.name, MOVED.reason, MOVED.hint)
            if made:
                return Refusal(site.name, MADE_OF_VIDEO.reason, MADE_OF_VIDEO.hint)
        return None

    def _from_latent(self, site: AttentionSite, parts: tuple[Axis, ...], index: int) -> bool:
        """Do the site's tokens come from the latent that proves its grid?

        Text of as many tokens has the grid's axis too, once it is added to a table of positions that the video shares.
        """
        part = parts[index]
        grid = self.grids.grid_of(part)
        if grid is None or grid.hint is not None or grid.evidence in _WITHOUT_LATENT:
            return True
        sources = self.streams.source(site, site.q, part)
        if sum(same_axis(other, part) for other in parts) > 1:
            places = self._parts.sources(site.q, part, start_of(parts, index))
            sources = {node for node, _ in places}
        return bool(sources & self.streams.tokens_of_latent(resolve(part)))
