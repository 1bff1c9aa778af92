"""What tensor cores multiply in each precision: operands of QK^T and PV as values that are exact in float32.

An `Arithmetic` says how q, k, v and the weights P are rounded. `multiply` is the product that the kernel makes of two
operands, accumulated in float32. Blocks are [batch, heads, blocks, rows, head_dim]; what pads a short block is zero.

    Native      the input's own dtype
    Fp8         e4m3; a scale for each row of q, each head of k, each channel of v; P times 2^8, at most 256 of 448
                (FlashAttention-3, arXiv 2407.08608, section 3.3, and SageAttention2, arXiv 2411.10958)
    Nvfp4       q and k with groups along head_dim and a float32 scale for each row of q and each head of k; P and v in
                e4m3 as in Fp8, or v with groups of 16 keys and P scaled to the range of its e4m3 scales in each row
                first (SageAttention3, arXiv 2505.11594, section 3.2)
    Refined     NVFP4 and the NVFP4 of what it leaves: three products, all but that of two residuals
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import StaError
from .formats import (
    GROUP,
    nvfp4_scale,
    quantize_e4m3,
    quantize_nvfp4,
    quantize_nvfp4_residual,
    to_e4m3,
)

# P is at most 1 when its row's maximum is taken off. Times 2^8 it uses the exponents of e4m3 down to 2^-17.
P_SCALE = 256.0
_OF_HEAD = (2, 3, 4)


@dataclass(frozen=True)
class Operand:
    """float32 [..., rows, columns]: what is multiplied, and for refined arithmetic what the first rounding left."""

    main: Tensor
    residual: Tensor | None = None

    @property
    def value(self) -> Tensor:
        return self.main if self.residual is None else self.main + self.residual

    @property
    def mT(self) -> Operand:
        return self.map(lambda x: x.mT)

    def map(self, view: Callable[[Tensor], Tensor]) -> Operand:
        """The same selection, order or repetition of both."""
        return Operand(view(self.main), None if self.residual is None else view(self.residual))


def multiply(a: Operand, b: Operand) -> Tensor:
    """a @ b in float32; of refined operands without residual @ residual."""
    product = a.main @ b.main
    if b.residual is not None:
        product = product + a.main @ b.residual
    if a.residual is not None:
        product = product + a.residual @ b.main
    return product


class Arithmetic(ABC):
    """How one tier rounds."""

    @abstractmethod
    def query(self, q: Tensor, /) -> Operand:
        """q [batch, heads, blocks, rows, head_dim]"""

    @abstractmethod
    def key(self, k: Tensor, /) -> Operand:
        """k [batch, kv_heads, blocks, keys, head_dim]"""

    @abstractmethod
    def value(self, v: Tensor, /) -> Operand:
        """v [batch, kv_heads, blocks, keys, head_dim]"""

    @abstractmethod
    def weights(self, p: Tensor, /) -> Operand:
        """exp(score - maximum) [..., rows, keys] of one block of keys, whose maximum it is"""


@dataclass(frozen=True)
class Native(Arithmetic):
    """The dtype of the model; float32 is exact."""

    dtype: torch.dtype = torch.bfloat16

    def query(self, q: Tensor, /) -> Operand:
        return Operand(q.to(self.dtype).float())

    key = value = weights = query


@dataclass(frozen=True)
class Fp8(Arithmetic):
    """e4m3 for all four operands."""

    def query(self, q: Tensor, /) -> Operand:
        return _e4m3(q, (4,))

    def key(self, k: Tensor, /) -> Operand:
        return _e4m3(k, _OF_HEAD)

    def value(self, v: Tensor, /) -> Operand:
        return _e4m3(v, (2, 3))

    def weights(self, p: Tensor, /) -> Operand:
        return Operand(to_e4m3(p * P_SCALE).float() / P_SCALE)


@dataclass(frozen=True)
class Nvfp4(Arithmetic):
    """e2m1 for q and k. pv: "nvfp4" or "fp8", what v and the weights are in."""

    pv: str = "fp8"

    def __post_init__(self) -> None:
        if self.pv not in ("nvfp4", "fp8"):
            raise StaError(
                f'pv={self.pv!r} is no format of v and the weights; pass "nvfp4" or "fp8"'
            )

    def query(self, q: Tensor, /) -> Operand:
        return _nvfp4(q, (4,))

    def key(self, k: Tensor, /) -> Operand:
        return _nvfp4(k, _OF_HEAD)

    def value(self, v: Tensor, /) -> Operand:
        return self.key(v.mT).mT if self.pv == "nvfp4" else Fp8().value(v)

    def weights(self, p: Tensor, /) -> Operand:
        if self.pv == "fp8":
            return Fp8().weights(p)
        return _nvfp4(p, (-1,))


@dataclass(frozen=True)
class Refined(Arithmetic):
    """NVFP4 and its residual for all four operands."""

    def query(self, q: Tensor, /) -> Operand:
        return _refined(q, _OF_HEAD)

    key = query

    def value(self, v: Tensor, /) -> Operand:
        return _refined(v.mT, _OF_HEAD).mT

    def weights(self, p: Tensor, /) -> Operand:
        return _refined(p, (-1,))


def _e4m3(x: Tensor, dims: tuple[int, ...]) -> Operand:
    values, scale = quantize_e4m3(x, dims)
    return Operand(values.float() * scale)


def _nvfp4(x: Tensor, dims: tuple[int, ...]) -> Operand:
    """Zeros fill the last group of 16."""
    columns = x.shape[-1]
    padded = pad(x, (0, -columns % GROUP))
    return Operand(quantize_nvfp4(padded, nvfp4_scale(x, dims)).dequantize()[..., :columns])


def _refined(x: Tensor, dims: tuple[int, ...]) -> Operand:
    main, rest = quantize_nvfp4_residual(x, dims)
    return Operand(main.dequantize(), rest.dequantize())
