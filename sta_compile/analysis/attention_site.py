"""One attention computation of a graph, whatever its spelling: which values, and which of their dimensions is what.

`einsum("bqhd,bkhd->bhqk", q, k)` reads q as [batch, tokens, heads, features]: its `DimOrder` is (batch 0, heads 2, tokens 1,
features 3). bmm reads [batch * heads, tokens, features], which has no dimension of heads; flash-attn's packed form reads
[batch * tokens, heads, features], where batch and tokens are one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx

from .axes import Size, size_of
from .graph_view import fake_value, number_of


@dataclass(frozen=True)
class DimOrder:
    """Dimensions of a tensor by what they hold. batch, heads: None if the tensor has no such dimension.

    batch == tokens: one dimension holds both, the samples one after the other.
    """

    batch: int | None
    heads: int | None
    tokens: int
    features: int

    @property
    def packed(self) -> bool:
        return self.batch == self.tokens

    def before(self, moved: Sequence[int]) -> DimOrder:
        """The order of what a transpose read. moved: which dimension of its input each of its output's is."""
        batch, heads = (None if d is None else moved[d] for d in (self.batch, self.heads))
        return DimOrder(batch, heads, moved[self.tokens], moved[self.features])

    def after(self, moved: Sequence[int]) -> DimOrder:
        """The order of what a transpose makes of a tensor of this order."""
        places = [0] * len(moved)
        for place, dim in enumerate(moved):
            places[dim] = place
        return self.before(places)


BHND = DimOrder(0, 1, 2, 3)
BNHD = DimOrder(0, 2, 1, 3)
BND = DimOrder(0, None, 1, 2)  # heads merged into the batch, or none
NHD = DimOrder(None, 1, 0, 2)  # one sample
PACKED = DimOrder(0, 1, 0, 2)


@dataclass(frozen=True)
class Problem:
    """Why an attention can't be replaced, though it is one, and what to do."""

    reason: str
    hint: str


@dataclass(frozen=True)
class Projections:
    """The linear layers around an attention that has its own: in_weight [3 * width, width] for q, k and v."""

    heads: int
    in_weight: torch.fx.Node
    in_bias: torch.fx.Node | None
    out_weight: torch.fx.Node
    out_bias: torch.fx.Node | None


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """One attention computation.

    node: its output. q, k, v: what it reads; q_order, ...: their dimensions.
    scale: factor of q @ k^T before the softmax.
    mask: the mask node, or None. causal, gqa, dropout: as in SDPA.
    samples: sequences of equal length in a packed dimension.
    steps: the nodes that compute it, where they are several; they read q, k and v at different times.
    private: those of them that write in place into memory that nothing else sees.
    problem: set where this spelling, or what is asked of it, has no replacement.
    opaque: nothing is known of the dimensions.
    projections: of a site that reads and returns the tokens outside of its linear layers.
    """

    node: torch.fx.Node
    q: torch.fx.Node
    k: torch.fx.Node
    v: torch.fx.Node
    scale: float
    name: str
    mask: torch.fx.Node | None = None
    q_order: DimOrder = BHND
    k_order: DimOrder = BHND
    v_order: DimOrder = BHND
    out_order: DimOrder = BHND
    causal: bool = False
    gqa: bool = False
    dropout: float = 0.0
    samples: int = 1
    steps: tuple[torch.fx.Node, ...] = ()
    private: frozenset[torch.fx.Node] = frozenset()
    problem: Problem | None = None
    opaque: bool = False
    projections: Projections | None = None

    @property
    def operands(self) -> tuple[tuple[torch.fx.Node, DimOrder], ...]:
        return (self.q, self.q_order), (self.k, self.k_order), (self.v, self.v_order)

    @property
    def head_dim(self) -> Size:
        width = sizes_of(self.q, self.q_order, self.samples)[3]
        return width if self.projections is None else width // self.projections.heads

    @property
    def heads(self) -> Size:
        """Query heads; 1 where they are merged into the batch."""
        own = sizes_of(self.q, self.q_order, self.samples)[1]
        return own if self.projections is None else self.projections.heads

    @property
    def recorded(self) -> bool:
        """Are gradients of it recorded?"""
        values = map(fake_value, (self.node, self.q, self.k, self.v))
        return torch.is_grad_enabled() and any(x.requires_grad for x in values)

    @property
    def heads_in_batch(self) -> bool:
        """Are heads merged into the batch, so that one sample can't be told from another?"""
        merged = self.q_order.heads is None and self.q_order.batch is not None
        return merged and self.projections is None


def sizes_of(
    node: torch.fx.Node, order: DimOrder, samples: int = 1
) -> tuple[Size, Size, Size, Size]:
    """Sizes as [batch, heads, tokens, features]; 1 for a dimension that the tensor doesn't have."""
    shape = [size_of(s) for s in fake_value(node).shape]
    batch = samples if order.batch is None or order.packed else shape[order.batch]
    heads = 1 if order.heads is None else shape[order.heads]
    tokens = shape[order.tokens] // samples if order.packed else shape[order.tokens]
    return batch, heads, tokens, shape[order.features]


NO_SCALE = Problem("its scale is not a number", "pass the scale as a Python number")


def dropout_of(value: Any) -> float:
    """A probability of dropout; 1 for one that is not known."""
    probability = 0.0 if value is None else number_of(value)
    return 1.0 if probability is None else probability


def default_scale(features: Size) -> float | None:
    """1 / sqrt(head dim), what every spelling takes if no scale is given; None for a head dim that isn't a number."""
    return 1.0 / math.sqrt(features) if isinstance(features, int) else None
