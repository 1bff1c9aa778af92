"""Are there other sequences of as many tokens as one whose number of tokens alone tells its grid?

A grid that an option declares, or another graph of the call knows, is that of 60 tokens. If text of 60 tokens attends to
itself in the same graph, their number does not tell which of the two is the video. What is made of a sequence token by
token, though nothing shows in which order, is no rival of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .attention_site import AttentionSite
from .axes import Axis, axis_size, resolve, same_size, segments_of
from .token_streams import TokenStreams


class RivalSequences:
    """Answers for the token axes of one graph. attended: sites, and the token axes of their queries and keys."""

    def __init__(
        self, streams: TokenStreams, attended: Iterable[tuple[AttentionSite, Axis, Axis]] = ()
    ) -> None:
        self.streams = streams
        self._parts: list[tuple[AttentionSite, Axis]] = []
        for site, queries, keys in attended:
            shared = set(segments_of(keys))
            self._parts += [(site, part) for part in segments_of(queries) if part in shared]
        self._found: dict[Axis, bool] = {}

    def has(self, part: Axis) -> bool:
        part = resolve(part)
        if part not in self._found:
            alike = [
                (site, p) for site, p in self._parts if same_size(axis_size(p), axis_size(part))
            ]
            mine = {site for site, other in alike if other == part}
            self._found[part] = any(
                self._is_rival(part, mine, other, site) for site, other in alike if other != part
            )
        return self._found[part]

    def _is_rival(
        self, part: Axis, mine: set[AttentionSite], other: Axis, site: AttentionSite
    ) -> bool:
        if site in mine:
            return True
        derived = self.streams.made_of(site.q, part)
        return not derived and not any(self.streams.made_of(m.q, other) for m in mine)
