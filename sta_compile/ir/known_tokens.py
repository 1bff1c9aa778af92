"""What the graphs of a call tell each other of token axes: the grid of each, or what stands beside it and where.

FramePack puts its history before the video, outside of its blocks. A block that is compiled alone gets 256 tokens:

    ((16, None), (96, (2, 6, 8)), (144, (3, 6, 8)))

A number of tokens does not say in which order they stand. So it is told of a tensor: what left the graph that proves it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from .attention_spec import Triple

OF_CALL = "another graph of this call"
Segments: TypeAlias = tuple[tuple[int, Triple | None], ...]  # tokens, and their grid


class Doubt(Enum):
    """Why tokens tell no grid, though a graph of the call proves one of as many."""

    SEVERAL = "several sequences have as many"
    PARTS = "in each sample they are a part of a video: one of its frames, or a window"
    MOVED = "a graph rolls, flips or picks them"
    ORDER = "they stand in an order other than frames, rows, cols"
    UNSEEN = "no graph shows what has been done to them since"
    UNSHOWN = "no graph has shown where they stand so far"
    UNWATCHED = "nor will it be noted in later calls"


UNKNOWN = (Doubt.UNSEEN, Doubt.UNSHOWN, Doubt.UNWATCHED)  # anything may have been done to them
Known: TypeAlias = Mapping[int, "Segments | Doubt"]  # by the number of tokens
Told: TypeAlias = "tuple[tuple[int, Segments | Doubt], ...]"  # of one tensor, by the dimension


def agreed(a: Segments | Doubt, b: Segments | Doubt) -> Segments | Doubt:
    """What two graphs say together of one number of tokens.

    That some are parts of a video goes before all else: their number does not tell others from them.
    """
    if Doubt.PARTS in (a, b):
        return Doubt.PARTS
    if isinstance(a, Doubt) or isinstance(b, Doubt):
        return a if isinstance(a, Doubt) else b
    if [tokens for tokens, _ in a] != [tokens for tokens, _ in b]:
        return Doubt.SEVERAL
    both = tuple((n, x or y) for (n, x), (_, y) in zip(a, b, strict=True))
    given = (*a, *b)
    told = all(grid is None or (n, grid) in both for n, grid in given)
    return both if told else Doubt.SEVERAL


@dataclass(frozen=True)
class LeavingTokens:
    """Tokens that leave a graph along a dimension of an output, of which it shows something.

    known: a doubt, or segments; the tokens of one may be None, where the graph serves any number of them. inputs: of the
        graph, which are known not to have been moved, or the output is not known to be either.
    """

    output: int
    dim: int
    known: tuple[tuple[int | None, Triple | None], ...] | Doubt
    inputs: tuple[int, ...] = ()

    def of(self, tokens: int) -> Segments | Doubt:
        """What is known of so many of them."""
        if isinstance(self.known, Doubt):
            return self.known
        rest = tokens - sum(n or 0 for n, _ in self.known)
        return tuple((rest if n is None else n, grid) for n, grid in self.known)


@dataclass(frozen=True)
class PassedTokens:
    """Tokens that leave a graph at the places that they had in its inputs. inputs: (input, dimension) of each."""

    output: int
    dim: int
    inputs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Leaving:
    """What a graph shows of its outputs. parts: numbers of tokens that have a part of a video in each sample.

    given: its inputs that are no weights. passes: does `passed` hold all tokens that leave it as they came in?
    """

    tokens: tuple[LeavingTokens, ...] = ()
    parts: tuple[int, ...] = ()
    passed: tuple[PassedTokens, ...] = ()
    given: tuple[int, ...] = ()
    passes: bool = False


def by_number(tokens: int, known: Segments | Doubt) -> Iterator[tuple[int, Segments | Doubt]]:
    """Of a whole axis, and of each grid in it."""
    yield tokens, known
    segments = () if isinstance(known, Doubt) or len(known) == 1 else known
    for n, grid in segments:
        if grid is not None:
            yield n, ((n, grid),)


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
