"""The sequence of an attention over video: which tokens stand beside the grid, and which of them are valid?

Queries `[video 60]` over keys `[text 7 | video 60]` are the segments ("keys", 7), ("video", 60); text that asks as well is
"context". Neighbours of one role are one segment, for kernels take few of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import sympy
import torch.fx

from .. import _torch
from .._sizes import depends_on_data, suppose
from .attention_site import AttentionSite
from .axes import Atom, Axis, Size, axis_size, resolve, same_size, segments_of
from .graph_view import GraphView
from .mask_facts import TRUE, Below, Fact
from .mask_values import MaskValues
from .prove_mask import ContextMask, MaskProver, sizes_behind

Segment = tuple[str, Size]  # role, tokens


@dataclass(frozen=True)
class Tokens:
    """The sequence of one attention.

    segments: (role, tokens) in the order of the keys; roles are "video" (one), "context" and "keys".
    lengths: per segment beside the video its valid keys, a prefix (`Below`), TRUE or FALSE; None if all keys are valid.
    mask: "bool" or "additive" if the site's mask has to tell which keys beside the video are valid; then no lengths.
    video_mask: it has to tell which keys of the video are valid, too. All were, when the model was compiled.
    """

    segments: tuple[Segment, ...]
    lengths: tuple[Fact, ...] | None = None
    mask: Literal["", "bool", "additive"] = ""
    video_mask: bool = False

    @property
    def video(self) -> int:
        """Index of the video segment."""
        return [role for role, _ in self.segments].index("video")

    def with_ends(self, first: int, last: int) -> Tokens:
        """The same sequence, with so many tokens at the video's ends beside it: every query sees them all."""
        at = self.video
        size = self.segments[at][1] - first - last
        before, after = ([("context", n)] * bool(n) for n in (first, last))
        segments = (
            *self.segments[:at],
            *before,
            ("video", size),
            *after,
            *self.segments[at + 1 :],
        )
        if self.lengths is None:
            return replace(self, segments=merged(segments))
        valid = (TRUE,) * len(before), (TRUE,) * len(after)
        lengths = (*self.lengths[:at], *valid[0], *valid[1], *self.lengths[at:])
        return replace(self, segments=segments, lengths=lengths)

    @property
    def video_query(self) -> Size:
        """The video's first query."""
        return sum(size for role, size in self.segments[: self.video] if role != "keys")


def same_axis(a: Axis, b: Axis) -> bool:
    return resolve(a) == resolve(b)


def start_of(parts: Sequence[Axis], index: int) -> Size:
    """Where a part of a sequence begins."""
    start: Size = sum(map(axis_size, parts[:index]))
    return start


def match_segments(
    queries: Sequence[Axis], keys: Sequence[Axis], video_query: int, video_key: int
) -> tuple[Segment, ...] | None:
    """Roles of the parts of the keys; None if there are queries that don't stand among the keys in their order."""
    before = _roles(queries[:video_query], keys[:video_key])
    after = _roles(queries[video_query + 1 :], keys[video_key + 1 :])
    if before is None or after is None:
        return None
    return (*before, ("video", axis_size(keys[video_key])), *after)


def _roles(queries: Sequence[Axis], keys: Sequence[Axis]) -> list[Segment] | None:
    """Queries beside the video see all keys, so any keys of as many tokens may stand for theirs; here, the same axis."""
    left = list(queries)
    out: list[Segment] = []
    for part in keys:
        asks = bool(left) and resolve(left[0]) == resolve(part)
        if asks:
            left.pop(0)
        out.append(("context" if asks else "keys", axis_size(part)))
    return None if left else out


class SequenceReader:
    """Finds which keys are valid, for the attentions of one graph."""

    def __init__(self, view: GraphView, values: Mapping[torch.fx.Node, Any]) -> None:
        self.view = view
        self.equal: dict[Any, Any] = {}  # lengths that a mask is understood by if they are the same
        self._prover = MaskProver(view)
        self._values = MaskValues(view, values)

    def read(self, site: AttentionSite, segments: tuple[Segment, ...]) -> Tokens | None:
        """The sequence with what the site's mask says of it; None if the mask may hide video keys, and does or may be
        expected to."""
        plain = Tokens(segments)
        if site.mask is None:
            return Tokens(merged(segments))
        start, video = plain.video_query, segments[plain.video][1]
        sizes = [size for _, size in segments]
        found = self._proved(site, plain, self._prover)
        if found is None or found.video != TRUE:
            self._suppose_equal_lengths(site, plain)
        if found is None:
            return None
        if found.hides_nothing:
            return Tokens(merged(segments))
        if found.prefixes and _starts_are_known(segments, found.facts):
            return Tokens(segments, found.facts)
        mask: Literal["bool", "additive"] = "additive" if found.additive else "bool"
        if found.video == TRUE:
            return Tokens(merged(segments), mask=mask)
        at: Size = sum(sizes[: plain.video])
        if not self._values.shows(site.mask, start, at, video):
            return None
        return Tokens(merged(segments), mask=mask, video_mask=True)

    def _proved(self, site: AttentionSite, plain: Tokens, prover: MaskProver) -> ContextMask | None:
        assert site.mask is not None
        sizes = [size for _, size in plain.segments]
        asking = [i for i, (role, _) in enumerate(plain.segments) if role != "keys"]
        return prover.prove(site.mask, self.view.position[site.node], sizes, plain.video, asking)

    def _suppose_equal_lengths(self, site: AttentionSite, plain: Tokens) -> None:
        """Notes which symbols of the mask must be the same as those of the sequence for the mask to leave the video alone.

        `cat([text_mask, ones(S - text_mask.shape[1])])` does so if the mask is as long as the text, which has a symbol of
        its own where Dynamo found both to change.
        """
        env = _torch.shape_env_of(self.view.gm)
        if env is None or site.mask is None:
            return
        ours = _symbols(size for _, size in plain.segments)
        values = {_torch.known_value(symbol, env): symbol for symbol in ours}
        theirs = sorted(_symbols(sizes_behind(self.view, site.mask)) - ours, key=str)
        equal = {s: values.get(_torch.known_value(s, env)) for s in theirs}
        equal = {symbol: own for symbol, own in equal.items() if own is not None}
        if not equal:
            return
        take_back = suppose(equal, env)
        found = self._proved(site, plain, MaskProver(self.view))
        take_back()
        if found is not None and found.video == TRUE:
            self.equal.update(equal)


def _symbols(sizes: Iterable[Size]) -> set[Any]:
    """Those that don't depend on data."""
    symbolic = [size for size in sizes if not isinstance(size, int)]
    return {s for size in symbolic for s in size.free_symbols if not depends_on_data(s)}


def _starts_are_known(segments: tuple[Segment, ...], facts: Sequence[Fact]) -> bool:
    """Can lengths be written into the graph? Each counts from a known number, or from the start of its segment."""
    starts = [
        sum(size for _, size in segments[:i])
        for i, (role, _) in enumerate(segments)
        if role != "video"
    ]
    return all(
        not isinstance(fact, Below) or isinstance(fact.start, int) or same_size(fact.start, start)
        for fact, start in zip(facts, starts, strict=True)
    )


def with_wholes(axis: Axis) -> Iterator[Axis]:
    """The parts of an axis, and after each that is a slice, those of what it was sliced from."""
    for part in segments_of(axis):
        yield part
        if len(part) == 1 and isinstance(part[0], Atom) and part[0].slice_of is not None:
            yield from segments_of(part[0].slice_of[0])


def merged(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Neighbours of one role as one segment; sums that are known at run time only are no dimension of any value."""
    out: list[Segment] = []
    for role, run in groupby(segments, key=itemgetter(0)):
        sizes = [size for _, size in run]
        total = sympy.sympify(sum(sizes))
        out += [(role, int(total))] if total.is_Integer else _numbers_joined(role, sizes)
    return tuple(out)


def _numbers_joined(role: str, sizes: Sequence[Size]) -> list[Segment]:
    """Of one role: neighbours that are numbers are added up."""
    out: list[Segment] = []
    for size in sizes:
        last = out[-1][1] if out else None
        if isinstance(size, int) and isinstance(last, int):
            out[-1] = (role, last + size)
        else:
            out.append((role, size))
    return out
