"""Keys that were written into memory and are read from there: a cache that is made once for all chunks of a video.

    cache[:, :, start : start + n] = k; attention(q, cache[:, :, : start + n], ...)

Nothing says what the axis of such memory is made of, so the video's keys are not found in it. `rewriting.forward_writes`
reads them from where they came from, if the memory holds just these; others are named in the report.
"""

from __future__ import annotations

import torch.fx

from .attention_site import AttentionSite, Problem
from .axes import Axis
from .token_streams import TokenStreams
from .token_values import storage_of, written_storages

WRITTEN = Problem(
    "the video's keys are written into a buffer, and read back from there",
    "put them together by torch.cat([cache[:, :, :start], keys], 2), and write them into the cache besides",
)


class WrittenKeys:
    """Answers for the attention sites of one graph."""

    def __init__(self, streams: TokenStreams) -> None:
        self._streams = streams
        self._written: dict[int, list[torch.fx.Node]] | None = None

    def has(self, site: AttentionSite, part: Axis) -> bool:
        """Were tokens of the axis of a part of the queries written into the memory that the keys are read from?"""
        view, streams = self._streams.trace.view, self._streams
        if self._written is None:
            self._written = written_storages(view)
        memory: set[int] = set()
        tokens: set[int] = set()  # of the video itself, to which a residual may be added in place
        for value in streams.behind(site.k):
            (tokens if streams.holds(value, part) else memory).update(storage_of(value))
        return any(
            view.position[write] < view.position[site.node]
            and any(streams.holds(n, part) for n in write.all_input_nodes)
            for storage in memory - tokens
            for write in self._written.get(storage, ())
        )
