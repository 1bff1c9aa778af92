"""Which keys does the mask of an attention hide, from all queries of the video alike? Proved from the graph.

HunyuanVideo builds `ones(B, S).masked_fill(arange(S) >= N + text_length, False)`: key j is valid iff j < N + length, and
a length counts, so all N video keys are valid and the mask says no more than the number of valid text tokens. Of
`F.pad(text_mask, (N, 0), value=True)` it is known that the video is valid, and the text is data: a key mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx

from .axes import Size, size_of
from .graph_view import GraphView, fake_value, is_tensor
from .mask_facts import ADDITIVE, FALSE, TRUE, TRUTH, Below, Fact
from .mask_spans import ONE, Span, Spans, is_one, sizes_of
from .read_mask import MaskReader


@dataclass(frozen=True)
class ContextMask:
    """What a mask says of the keys. facts: per segment beside the video, in the order of the keys.

    additive: the mask holds 0 for valid keys and large negative numbers for others, instead of True and False.
    video: what it says of the video's keys, the same to all queries of the video.
    """

    facts: tuple[Fact, ...]
    additive: bool
    video: Fact = TRUE

    @property
    def hides_nothing(self) -> bool:
        return all(fact == TRUE for fact in (self.video, *self.facts))

    @property
    def prefixes(self) -> bool:
        """Is of each segment beside the video a number of first keys valid (none, or all), and all of the video?"""
        return self.video == TRUE and all(
            fact in (TRUE, FALSE) or (isinstance(fact, Below) and not fact.negated)
            for fact in self.facts
        )


class MaskProver:
    """Answers for the masks of one graph."""

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self._reader = MaskReader(view)

    def prove(
        self,
        mask: torch.fx.Node,
        before: int,
        keys: Sequence[Size],
        video: int,
        video_queries: tuple[Size, Size],
    ) -> ContextMask | None:
        """What a mask, read at position `before` of the graph, says; None if queries may see other keys than others do.

        The mask broadcasts to [batch, heads, queries, keys]. keys: segments along the keys; video: index of the video's;
        video_queries: start and stop of the video's queries. Queries beside the video may see nothing at all: rows of
        padding, which nobody reads.
        """
        facts: list[Fact] = []
        of_video: Fact = TRUE
        additive = fake_value(mask).dtype != torch.bool
        start: Size = 0
        for index, size in enumerate(keys):
            stop = start + size
            fact = self._fact(mask, before, (start, stop), video_queries)
            if fact is None or (index == video and fact == FALSE):
                return None
            if index == video:
                of_video = fact
            else:
                facts.append(fact)
            start = stop
        one_for_all = is_one(sizes_of(mask)[-1])  # then no part of it is about the video alone
        return (
            None
            if one_for_all and of_video != TRUE
            else ContextMask(tuple(facts), additive, of_video)
        )

    def _fact(
        self,
        mask: torch.fx.Node,
        before: int,
        keys: tuple[Size, Size],
        video_queries: tuple[Size, Size],
    ) -> Fact | None:
        """Of the keys start .. stop, for all queries alike."""
        test = TRUTH if fake_value(mask).dtype == torch.bool else ADDITIVE
        sizes = sizes_of(mask)
        every = self._reader.read(mask, _part(sizes, None, keys), test, before)
        if every is not None and every.queries == TRUE:
            return every.keys
        video = self._reader.read(mask, _part(sizes, video_queries, keys), test, before)
        if every is None or video is None or video.queries != TRUE or video.keys != every.keys:
            return None
        return every.keys


def _part(
    sizes: tuple[Size, ...], queries: tuple[Size, Size] | None, keys: tuple[Size, Size]
) -> Spans:
    """Spans of a mask whose last dimensions are [batch, heads, queries, keys]."""
    spans = [
        Span(label, 0, size) for label, size in zip("bhqk"[4 - len(sizes) :], sizes, strict=True)
    ]
    if queries is not None and len(spans) > 1:
        spans[-2] = Span("q", *queries)
    if spans:
        spans[-1] = Span("k", *keys)
    return tuple(ONE if is_one(n) else span for span, n in zip(spans, sizes, strict=True))


def sizes_behind(view: GraphView, mask: torch.fx.Node) -> set[Size]:
    """The sizes of all that a mask is made of."""
    found: set[Size] = set()
    seen: set[torch.fx.Node] = set()
    left = [mask]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        value = fake_value(node)
        if is_tensor(node):
            found.update(sizes_of(node))
        elif isinstance(value, torch.SymInt):
            found.add(size_of(value))
        left += [*node.all_input_nodes, *view.sources.get(node, ())]
    return found
