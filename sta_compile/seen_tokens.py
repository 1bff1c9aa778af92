"""Which tensors of one call hold tokens of a known grid, in its order.

A graph shows it of what leaves it. Python may do anything to that before the next graph gets it, so it is known of the very
tensor, as long as nobody writes to it (private torch APIs, tested on 2.11 and 2.13: Tensor._version, UntypedStorage._cdata,
torch.utils._python_dispatch.is_traceable_wrapper_subclass):

    graph 1 returns x, of 9x30x52 tokens                  of(x) = {1: ((14040, (9, 30, 52)),)}
    y = x[:, order], by code that no graph holds          of(y) = {}
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from .analysis.position_values import COLUMNS
from .ir.known_tokens import Doubt, Segments

Dimensions = dict[int, "Segments | Doubt"]


class SeenTokens:
    """writes_told: someone calls `forget` for each write, as of a tensor made in inference mode nothing else tells."""

    def __init__(self) -> None:
        self.writes_told = False
        self._dims: MutableMapping[Tensor, tuple[_State, Dimensions]] = WeakTensorKeyDictionary()
        self._returned: MutableMapping[Tensor, _State] = WeakTensorKeyDictionary()

    def state_given(self, tensor: Tensor) -> None:
        """It is as the model was given it."""
        self._dims[tensor] = (_state_of(tensor), {})

    def state(self, tensor: Tensor, dim: int, known: Segments | Doubt) -> None:
        self._dims[tensor] = (_state_of(tensor), {**self.of(tensor), dim: known})

    def state_returned(self, tensor: Tensor) -> None:
        """A graph that got no tokens of a known grid returns it."""
        self._returned[tensor] = _state_of(tensor)

    def forget(self, written: Collection[int | None]) -> None:
        """What has its values in memory that was written (see `memory_of`)."""
        kept: Any
        for kept in (self._dims, self._returned):
            for tensor in [x for x in kept if memory_of(x) in written]:
                del kept[tensor]

    def forget_all(self) -> None:
        self._dims.clear()
        self._returned.clear()

    def of(self, tensor: Tensor) -> Dimensions:
        """By the dimension."""
        return self._dims[tensor][1] if self.knows(tensor) else {}

    def knows(self, tensor: Tensor) -> bool:
        """Are its tokens, if it has any, where the video has them, or where is it known that they are?"""
        return tensor in self._dims and self._is_unchanged(tensor, self._dims[tensor][0])

    def is_returned(self, tensor: Tensor) -> bool:
        """Is it as a graph returned it that got no tokens of a known grid?"""
        return tensor in self._returned and self._is_unchanged(tensor, self._returned[tensor])

    def _is_unchanged(self, tensor: Tensor, since: _State) -> bool:
        told = since.version is not None or self.writes_told
        return told and since == _state_of(tensor)


class _State(NamedTuple):
    """How often a tensor was written, if it counts that, and the memory that it has: `x.data = y` gives it another."""

    version: int | None
    memory: int | None


def _state_of(tensor: Tensor) -> _State:
    return _State(None if tensor.is_inference() else tensor._version, memory_of(tensor))


def memory_of(tensor: Tensor) -> int | None:
    """Which memory a tensor shares with its views; None for one that wraps other tensors, or is sparse."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    return int(tensor.untyped_storage()._cdata)


def may_be_tokens(tensor: Tensor) -> bool:
    """Is it [batch, tokens, features], or tokens first?"""
    if not tensor.is_floating_point() or tensor.dim() != 3:
        return False
    features = tensor.shape[-1]
    return not isinstance(features, int) or features > COLUMNS


def may_be_video(tensor: Tensor) -> bool:
    """Is it a latent, or like one, or tokens?"""
    return tensor.is_floating_point() and tensor.dim() >= 3


def may_be_table(tensor: Tensor, dim: int) -> bool:
    """Has it one row for each token, whatever the batch, as positions have?"""
    others = [n for d, n in enumerate(tensor.shape[:-1]) if d != dim]
    return tensor.dim() != 3 and all(n == 1 for n in others)
