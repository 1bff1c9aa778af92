"""What earlier graphs of a call prove of token axes, by their length: the grid, or what stands beside it and where.

FramePack puts its history before the video, outside of its blocks. A block that is compiled alone gets 256 tokens:

    {144: ((144, (3, 6, 8)),), 256: ((16, None), (96, (2, 6, 8)), (144, (3, 6, 8)))}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from .attention_spec import Triple

OF_CALL = "another graph of this call"
Segments: TypeAlias = tuple[tuple[int, Triple | None], ...]  # tokens, and their grid
# None: graphs disagree about axes of as many tokens.
Known: TypeAlias = Mapping[int, Segments | None]


class Asked(Mapping[int, Segments | None]):
    """What is known, and which numbers of tokens were asked for: what a compile depends on."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self.asked: set[int] = set()

    def __getitem__(self, tokens: int) -> Segments | None:
        self.asked.add(tokens)
        return self._known[tokens]

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def grid_of_tokens(known: Known, tokens: int) -> Triple | None:
    """The grid of an axis that has nothing beside it."""
    segments = known.get(tokens)
    return segments[0][1] if segments is not None and len(segments) == 1 else None


def agreed(a: Segments, b: Segments) -> Segments | None:
    """What two graphs say together; None if they contradict each other."""
    if [tokens for tokens, _ in a] != [tokens for tokens, _ in b]:
        return None
    both = tuple((n, x or y) for (n, x), (_, y) in zip(a, b, strict=True))
    given = (*a, *b)
    return both if all(grid is None or (n, grid) in both for n, grid in given) else None
