"""What of a value can the nodes that read it depend on, apart from numbers?

The signature of rows 2 .. 50 of a tensor [2, 50, 8] is shape (2, 48, 8), strides (400, 8, 1),
offset 16, dtype and device. Signatures compare by structure: symbolic sizes are
equal if their expressions are, and comparing never adds a guard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

Aspect = Literal["shape", "dtype", "device", "strides"]


@dataclass(frozen=True)
class Symbolic:
    """A symbolic size or number, equal to another one of the same expression."""

    expression: Any  # sympy
    value: Any = field(compare=False)  # SymInt, SymFloat or SymBool

    def __str__(self) -> str:
        return str(self.expression)


@dataclass(frozen=True)
class TensorSignature:
    shape: tuple[Any, ...]
    strides: tuple[Any, ...] | None  # None: not a strided tensor
    offset: Any
    dtype: torch.dtype
    device: torch.device
    conjugate: bool


# Of a tensor, of a symbolic number, of a tuple or list of values, or the value itself.
Signature = Any


def signature(value: Any) -> Signature:
    if isinstance(value, torch.Tensor):
        strided = value.layout == torch.strided
        return TensorSignature(
            tuple(map(_size, value.shape)),
            tuple(map(_size, value.stride())) if strided else None,
            _size(value.storage_offset()) if strided else 0,
            value.dtype,
            value.device,
            value.is_conj(),
        )
    if isinstance(value, (list, tuple)):
        return tuple(map(signature, value))
    return _size(value)


def differs(before: Signature, now: Signature, aspect: Aspect) -> str | None:
    """How an aspect changed, "(2, 4) -> (2, 5)"; None if it did not.

    Whatever isn't a tensor has nothing but a shape: its value. Sizes whose expressions differ count
    as equal if that can be proved, or if they are equal for the example inputs.
    """
    if isinstance(before, TensorSignature) and isinstance(now, TensorSignature):
        a, b = getattr(before, aspect), getattr(now, aspect)
        return None if _same(a, b) else f"{_text(a)} -> {_text(b)}"
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        changes = (differs(a, b, aspect) for a, b in zip(before, now, strict=True))
        return next(filter(None, changes), None)
    if aspect != "shape" or _same(before, now):
        return None
    return f"{_text(before)} -> {_text(now)}"


def _size(value: Any) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expression = value.node.expr
        number = isinstance(value, torch.SymInt) and expression.is_Integer
        return int(expression) if number else Symbolic(expression, value)
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, Symbolic) and not isinstance(b, Symbolic):
        return bool(a == b)
    if a == b:
        return True
    a, b = (x.value if isinstance(x, Symbolic) else x for x in (a, b))
    if all(isinstance(x, (bool, torch.SymBool)) for x in (a, b)):
        return bool(_relation(a) == _relation(b))
    if not all(isinstance(x, (int, torch.SymInt)) for x in (a, b)):
        return False
    return statically_known_true(a == b) or _hint(a) == _hint(b) is not None


def _relation(value: bool | torch.SymBool) -> Any:
    """A truth value, or what it is the truth of, in one of the ways to write it: a <= b is b >= a."""
    if isinstance(value, bool):
        return value
    expression = value.node.expr
    return getattr(expression, "canonical", expression)


def _hint(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.hint if value.node.has_hint() else None
    return value


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return str(value)
