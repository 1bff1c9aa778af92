"""Which keys are valid: the arguments `key_lengths`, `key_mask` and `video_mask` of the attentions over one grid.

Each is made once for all attentions of a graph that read the same mask: before the first of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from ..analysis.attention_site import sizes_of
from ..analysis.axes import Size, same_size, size_of
from ..analysis.graph_view import fake_value
from ..analysis.infer_grid import VideoAttention
from ..analysis.mask_facts import FALSE, Below, Fact
from ..analysis.segments import Tokens
from ..analysis.token_values import storage_of, written_storages
from .fake_values import add_call
from .size_nodes import Number
from .thread_value import ValueThreads
from .tile_order import emit_tile


class MaskNodes:
    """Nodes of the attentions over one grid, which come in graph order."""

    def __init__(self, threads: ValueThreads) -> None:
        self.threads, self.view = threads, threads.view
        self._made: dict[Any, torch.fx.Node] = {}
        self._written = written_storages(self.view)

    def key_lengths(
        self, found: VideoAttention, segments: Sequence[Number]
    ) -> torch.fx.Node | None:
        """Valid tokens of each segment beside the video, int32 [batch, segments]. segments: tokens of each segment."""
        facts = found.tokens.lengths
        if facts is None:
            return None
        owner = self.view.owner[found.site.node]
        key = (owner, facts, tuple(segments), _batch(found))
        if key not in self._made:
            limits = [
                self.threads.reach(fact.limit, owner) if isinstance(fact, Below) else None
                for fact in facts
            ]
            self._made[key] = _Emitter(found).lengths(found.tokens, facts, limits, segments)
        return self._made[key]

    def key_mask(self, found: VideoAttention, segments: Sequence[Number]) -> torch.fx.Node | None:
        """Which tokens beside the video are valid keys, bool [batch, tokens], from the mask of the attention itself."""
        if not found.tokens.mask or len(segments) == 1:
            return None
        return self._of_mask(found, segments, "beside", _Emitter(found).mask)

    def video_mask(
        self,
        found: VideoAttention,
        segments: Sequence[Number],
        grid: Sequence[Number],
        spec: str,
    ) -> torch.fx.Node | None:
        """Which tokens of the video are valid keys, bool [batch, tokens] in tile order, where that is data."""
        if not found.tokens.video_mask:
            return None

        def emit(mask: torch.fx.Node, tokens: Tokens, segments: Sequence[Number]) -> torch.fx.Node:
            return _Emitter(found).video_mask(mask, tokens, segments, grid, spec)

        return self._of_mask(found, segments, (tuple(grid), spec), emit)

    def _of_mask(
        self,
        found: VideoAttention,
        segments: Sequence[Number],
        what: Any,
        emit: Callable[[torch.fx.Node, Tokens, Sequence[Number]], torch.fx.Node],
    ) -> torch.fx.Node:
        """Made of the site's mask, once for all sites that read the same."""
        mask = found.site.mask
        assert mask is not None
        written = any(storage in self._written for storage in storage_of(mask))
        reader = found.site.node if written else None
        key = (what, mask, reader, found.tokens.segments, tuple(segments), _batch(found))
        if key not in self._made:
            self._made[key] = emit(mask, found.tokens, segments)
        return self._made[key]


def _batch(found: VideoAttention) -> Size:
    site = found.site
    return sizes_of(site.q, site.q_order, site.samples)[0]


class _Emitter:
    """Adds nodes before an attention."""

    def __init__(self, found: VideoAttention) -> None:
        self.found, self.q, self.node = found, found.site.q, found.site.node

    def call(self, target: Any, *args: Any) -> torch.fx.Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        with self.node.graph.inserting_before(self.node):
            return add_call(self.node.graph, op, target, args, like=self.node)

    def batch(self) -> Number:
        size = _batch(self.found)
        return (
            size
            if isinstance(size, int)
            else self.call("size", self.q, self.found.site.q_order.batch)
        )

    def total(self, numbers: Sequence[Number]) -> Number:
        total: Number = 0
        for number in numbers:
            if isinstance(total, int) and isinstance(number, int):
                total += number
            else:
                total = self.call(operator.add, total, number)
        return total

    def lengths(
        self,
        tokens: Tokens,
        facts: Sequence[Fact],
        limits: Sequence[torch.fx.Node | None],
        segments: Sequence[Number],
    ) -> torch.fx.Node:
        beside = [i for i in range(len(segments)) if i != tokens.video]
        batch = self.batch()
        columns = []
        for i, fact, limit in zip(beside, facts, limits, strict=True):
            if limit is None or not isinstance(fact, Below):
                count = 0 if fact == FALSE else segments[i]
                same = self.call("new_full", self.q, (batch,), count)
                columns.append(self.call("to", same, torch.int32))
                continue
            start: Size | Number = fact.start
            if not isinstance(start, int):
                start = self.total(segments[:i])
            flat = self.call("expand", self.call("reshape", limit, -1), batch)
            valid = self.call("clamp", self.call("sub", flat, start), 0)
            columns.append(self.call("to", valid, torch.int32))
        return self.call(torch.stack, columns, 1)

    def _row(
        self, mask: torch.fx.Node, tokens: Tokens, segments: Sequence[Number]
    ) -> torch.fx.Node:
        """The row of the first video query, which sees what all valid queries see."""
        row = mask
        if fake_value(row).dim() > 2:  # all heads are alike
            row = self.call("select", row, -3, 0)
        if fake_value(row).dim() > 1:
            pairs = zip(tokens.segments[: tokens.video], segments, strict=False)
            first = self.total([n for (role, _), n in pairs if role != "keys"])
            one = same_size(size_of(fake_value(row).shape[-2]), 1)
            row = self.call("select", row, -2, 0 if one else first)
        return row

    def mask(
        self, mask: torch.fx.Node, tokens: Tokens, segments: Sequence[Number]
    ) -> torch.fx.Node:
        row, video = self._row(mask, tokens, segments), tokens.video
        before, after = self.total(segments[:video]), self.total(segments[video + 1 :])
        stop = self.total([before, segments[video]])
        pieces = [
            self.call("narrow", row, -1, start, length)
            for start, length in ((0, before), (stop, after))
            if length != 0
        ]
        valid = self.call(torch.cat, pieces, -1) if len(pieces) > 1 else pieces[0]
        return self._flags(valid, tokens, self.total([before, after]))

    def video_mask(
        self,
        mask: torch.fx.Node,
        tokens: Tokens,
        segments: Sequence[Number],
        grid: Sequence[Number],
        spec: str,
    ) -> torch.fx.Node:
        row, count = self._row(mask, tokens, segments), segments[tokens.video]
        valid = self.call("narrow", row, -1, self.total(segments[: tokens.video]), count)
        flags = self._flags(valid, tokens, count)
        with self.node.graph.inserting_before(self.node):
            return emit_tile(self.node.graph, flags, 1, 0, grid, spec, True, like=self.node)

    def _flags(self, valid: torch.fx.Node, tokens: Tokens, count: Number) -> torch.fx.Node:
        """Bool [batch, count]."""
        if tokens.mask == "additive":
            valid = self.call("eq", valid, 0)
        return self.call("expand", valid, self.batch(), count)
