"""What earlier graphs of a call prove of token axes, by their length: the grid, or what stands beside it and where.

FramePack puts its history before the video, outside of its blocks. A block that is compiled alone gets 256 tokens:

    {144: ((144, (3, 6, 8)),), 256: ((16, None), (96, (2, 6, 8)), (144, (3, 6, 8)))}
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .attention_spec import Triple

OF_CALL = "another graph of this call"
Segments: TypeAlias = tuple[tuple[int, Triple | None], ...]  # tokens, and their grid
# Of tokens that are a part of a video in each sample: one of its frames, or a window.
PARTS: Segments = ()
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


def agreed(a: Segments | None, b: Segments | None) -> Segments | None:
    """What two graphs say together; None if they contradict each other, or one of them knows of a contradiction.

    That some are parts of a video goes before all else: their number does not tell others from them.
    """
    if PARTS in (a, b):
        return PARTS
    if a is None or b is None or [tokens for tokens, _ in a] != [tokens for tokens, _ in b]:
        return None
    both = tuple((n, x or y) for (n, x), (_, y) in zip(a, b, strict=True))
    given = (*a, *b)
    return both if all(grid is None or (n, grid) in both for n, grid in given) else None


@dataclass(frozen=True)
class OtherSequence:
    """Tokens that leave a graph and are not proved to be a grid: a dimension of an output, and the inputs it is made of."""

    output: int
    dim: int
    inputs: tuple[int, ...]

    def tokens(
        self, args: Sequence[Any], outputs: Sequence[Any], grids: Collection[int]
    ) -> int | None:
        """How many they are in one call; None if the video is among them: one of the inputs has as many tokens as a grid.

        Text of as many tokens does as well, but then it was told of before.
        """
        shapes = [args[i].shape[:-1] for i in self.inputs]
        ours = any(int(n) in grids for shape in shapes for n in shape)
        return None if ours else int(outputs[self.output].shape[self.dim])
