"""Outer products in masks: `einsum("bi,bj->bij", v, v)` and `v[:, :, None] @ v[:, None]`."""

from __future__ import annotations

from typing import Any

import torch.fx

from .graph_view import canonical_name, is_tensor
from .mask_spans import Spans, is_one, of_operand, sizes_of
from .matrix_products import letters_of

OUTER = ("einsum", "matmul", "bmm")


def outer_product(node: torch.fx.Node, spans: Spans) -> list[tuple[torch.fx.Node, Spans]] | None:
    """The two factors and which part of each makes a part of their product; None if anything is summed up."""
    if canonical_name(node) != "einsum":
        return _of_columns(node, spans)
    args: Any = node.args
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    given, _, result = str(equation).replace(" ", "").partition("->")
    terms, output = given.split(","), letters_of(result, len(spans))
    if len(operands) != 2 or len(terms) != 2 or output is None or not all(map(is_tensor, operands)):
        return None
    by_letter = dict(zip(output, spans, strict=True))
    out = []
    for term, operand in zip(terms, operands, strict=True):
        letters = letters_of(term, len(sizes_of(operand)))
        if (
            letters is None
            or len(set(letters)) < len(letters)
            or not by_letter.keys() >= set(letters)
        ):
            return None
        inner = tuple(by_letter[letter] for letter in letters)
        out.append((operand, of_operand(operand, inner)))
    return out


def _of_columns(node: torch.fx.Node, spans: Spans) -> list[tuple[torch.fx.Node, Spans]] | None:
    """Of a matrix product of columns with rows."""
    factors: Any = node.args[:2]
    sizes = [sizes_of(x) for x in factors]
    if any(len(n) < 2 for n in sizes) or not is_one(sizes[0][-1]):
        return None
    return [(x, of_operand(x, spans)) for x in factors]
