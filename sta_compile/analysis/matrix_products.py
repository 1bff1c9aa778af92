"""Products of two tensors with a label for every dimension, and how transposes move dimensions.

`q @ k` and `einsum("bqd,bdk->bqk", q, k)` are one thing: two dimensions that one factor has alone, one summed over, and the
rest in both factors and the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx

from .graph_view import argument, canonical_name, fake_value, is_tensor

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Product:
    """out = left @ right, with a label for each dimension of the three."""

    left: torch.fx.Node
    right: torch.fx.Node
    left_labels: Labels
    right_labels: Labels
    out_labels: Labels

    def roles(self) -> tuple[str, str, str] | None:
        """The labels of left only, right only, and the one summed over; None if there are more of a kind."""
        a, b, out = (set(x) for x in (self.left_labels, self.right_labels, self.out_labels))
        kinds = (a & out - b, b & out - a, a & b - out)
        if any(len(kind) != 1 for kind in kinds) or a - b - out or b - a - out:
            return None
        (left,), (right,), (summed,) = kinds
        return left, right, summed


def batch_labels(rank: int) -> Labels:
    """Labels of the batch dimensions of a product, counted from the right as broadcasting does."""
    return tuple(f"batch {i}" for i in range(rank - 2, 0, -1))


def product_of(node: torch.fx.Node) -> Product | None:
    """A matrix product of two tensors of two dimensions or more."""
    name = canonical_name(node)
    if name == "einsum":
        return _einsum(node)
    if name not in ("matmul", "bmm", "baddbmm"):
        return None
    first = 1 if name == "baddbmm" else 0
    left, right = (argument(node, first + i, n) for i, n in enumerate(("batch1", "batch2")))
    if name == "matmul" and not is_tensor(left):
        left, right = argument(node, 0, "input"), argument(node, 1, "other")
    if not (is_tensor(left) and is_tensor(right)):
        return None
    ranks = [fake_value(n).dim() for n in (left, right, node)]
    if min(ranks) < 2:
        return None
    a, b, out = map(batch_labels, ranks)
    return Product(left, right, (*a, "row", "sum"), (*b, "sum", "column"), (*out, "row", "column"))


def _einsum(node: torch.fx.Node) -> Product | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if len(operands) != 2 or not all(map(is_tensor, operands)) or not isinstance(equation, str):
        return None
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    a, comma, b = inputs.partition(",")
    if not arrow or not comma:
        return None
    ranks = [fake_value(n).dim() for n in (*operands, node)]
    labels = [letters_of(text, rank) for text, rank in zip((a, b, out), ranks, strict=True)]
    if any(one is None or len(set(one)) != len(one) for one in labels):
        return None
    left, right = operands
    return Product(left, right, *labels)  # type: ignore[arg-type]


def letters_of(text: str, rank: int) -> Labels | None:
    """The labels of one operand of an einsum's equation, or of its result; "..." stands for batch dimensions.

    None if it has not as many dimensions.
    """
    before, dots, after = text.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not dots):
        return None
    return (*before, *(f"... {i}" for i in range(hidden, 0, -1)), *after)


def moved(node: torch.fx.Node, rank: int) -> list[int] | None:
    """For a transpose or permute: which dimension of the input each of the output's is."""
    name = canonical_name(node)
    dims = list(range(rank))
    if name == "mT":
        dims[-2], dims[-1] = dims[-1], dims[-2]
    elif name == "transpose":
        a, b = argument(node, 1, "dim0"), argument(node, 2, "dim1")
        if not (isinstance(a, int) and isinstance(b, int)):
            return None
        dims[a], dims[b] = dims[b], dims[a]
    elif name == "permute":
        given: Any = node.kwargs.get("dims", node.args[1:])
        if len(given) == 1 and isinstance(given[0], (tuple, list)):
            given = given[0]
        dims = [d % rank for d in given]
    elif name == "movedim":
        source, target = argument(node, 1, "source"), argument(node, 2, "destination")
        if not (isinstance(source, int) and isinstance(target, int)):
            return None
        dims.insert(target % rank, dims.pop(source % rank))
    else:
        return None
    return dims
