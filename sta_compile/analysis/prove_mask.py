"""Which keys does the mask of an attention hide, from all queries of the video alike? Proved from the graph.

HunyuanVideo builds `ones(B, S).masked_fill(arange(S) >= N + text_length, False)`: key j is valid iff j < N + length, and
a length counts, so all N video keys are valid and the mask says no more than the number of valid text tokens. Of
`F.pad(text_mask, (N, 0), value=True)` it is known that the video is valid, and the text is data: a key mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.fx

from .axes import Size, size_of
from .graph_view import GraphView, fake_value, is_tensor
from .mask_facts import ADDITIVE, FALSE, NOTHING, TRUE, TRUTH, Below, Fact, Seen, same_fact
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
        asking: Sequence[int],
    ) -> ContextMask | None:
        """What a mask, read at position `before` of the graph, says; None if queries may see other keys than others do.

        The mask broadcasts to [batch, heads, queries, keys]. keys: segments along the keys; video: index of the video's;
        asking: those that are queries as well, in this order. Queries beside the video may see nothing at all, or, if no
        other query sees their own keys, anything: rows of padding, which nobody reads.
        """
        parts = list(pairwise(accumulate(keys, initial=0)))
        every = [self._seen(mask, before, None, part) for part in parts]
        if all(seen is not None and seen.queries == TRUE for seen in every):
            facts: list[Fact] | None = [seen.keys for seen in every if seen is not None]
        else:
            ranges = pairwise(accumulate((keys[i] for i in asking), initial=0))
            rows = {
                i: [self._seen(mask, before, queries, part) for part in parts]
                for i, queries in zip(asking, ranges, strict=True)
            }
            facts = _agreed(rows, video)
        if facts is None or facts[video] == FALSE:
            return None
        of_video, beside = facts[video], (*facts[:video], *facts[video + 1 :])
        one_for_all = is_one(sizes_of(mask)[-1])  # then no part of it is about the video alone
        additive = fake_value(mask).dtype != torch.bool
        return None if one_for_all and of_video != TRUE else ContextMask(beside, additive, of_video)

    def _seen(
        self,
        mask: torch.fx.Node,
        before: int,
        queries: tuple[Size, Size] | None,
        keys: tuple[Size, Size],
    ) -> Seen | None:
        """Of some queries, or all of them, and some keys."""
        test = TRUTH if fake_value(mask).dtype == torch.bool else ADDITIVE
        return self._reader.read(mask, _part(sizes_of(mask), queries, keys), test, before)


def _agreed(rows: Mapping[int, Sequence[Seen | None]], video: int) -> list[Fact] | None:
    """Of each segment of the keys, what all queries see that see any. rows: of each segment of queries."""
    ours = rows[video]
    if any(seen is None or seen.queries != TRUE for seen in ours):
        return None
    facts = [seen.keys for seen in ours if seen is not None]
    for own, row in rows.items():
        seen = [each for each in row if each is not None]
        if own == video or all(each == NOTHING for each in row):
            continue
        if len(seen) < len(facts) or not all(
            same_fact(each.keys, fact) for each, fact in zip(seen, facts, strict=True)
        ):
            return None
        asking = [e.queries for e, fact in zip(seen, facts, strict=True) if fact != FALSE]
        if not all(same_fact(each, asking[0]) for each in asking):
            return None
        if any(each.loose for each in seen) and not same_fact(asking[0], facts[own]):
            return None
    return facts


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
