"""What the values of a graph's inputs say of its token grids, and what they leave in doubt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx

from .. import _torch
from .axes import Atom
from .position_values import Positions, Rows

DECLARE = "pass options={'grid': (frames, rows, cols)}"

TELL = f"if they are video, {DECLARE}"


def how_to_tell() -> str:
    """How a grid that nothing shows is made known: the model around a block may know it."""
    if _torch.is_whole_forward():
        return TELL
    return f"if they are video, sta_compile.compile(model) tells its blocks the grid; or {DECLARE}"


@dataclass(frozen=True, eq=False)
class Hint:
    """A grid that was read from an input of the root graph. A guard may know nothing of its values: a check has to stand in
    the graph."""

    node: torch.fx.Node
    name: str
    positions: Positions

    @property
    def evidence(self) -> str:
        return f"values of input {self.name}"


@dataclass(frozen=True, eq=False)
class Doubt:
    """Why an input of the root graph that has the tokens along `dim` gives no grid, and what to do about it."""

    node: torch.fx.Node
    dim: int
    reason: str
    hint: str


@dataclass(frozen=True, eq=False)
class Hints:
    """by_atom: the hint that made an atom a grid axis. values: what the inputs of the graph hold while it compiles.

    empty: rows of inputs that may be ids of tokens without a grid, and have none in this call.
    """

    by_atom: Mapping[Atom, Hint] = field(default_factory=dict)
    doubts: tuple[Doubt, ...] = ()
    values: Mapping[torch.fx.Node, Any] = field(default_factory=dict)
    empty: Mapping[torch.fx.Node, Rows] = field(default_factory=dict)
