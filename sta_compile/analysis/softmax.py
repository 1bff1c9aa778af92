"""Which operations are a softmax? One call, or its steps.

    softmax(x, d)                       log_softmax(x, d).exp()               (x - x.logsumexp(d, True)).exp()
    e = x.exp(); e / e.sum(d, True)     (e @ v) / e.sum(-1, True), where the values are weighed first

What is subtracted from x, its maximum for one, is seen by whoever reads x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx

from .attention_site import Problem
from .axes import same_size, size_of
from .graph_view import argument, canonical_name, fake_value, is_tensor
from .matrix_products import product_of

_CASTS = ("to", "float", "half", "bfloat16", "type", "type_as", "contiguous", "clone")
_CONSTANT_ADDED = Problem(
    "its probabilities are divided by more than their sum",
    "use torch.softmax, or call torch.nn.functional.scaled_dot_product_attention",
)


@dataclass(frozen=True)
class Softmax:
    """node: what the values are multiplied by. source: the scores. dim: along which they are normalised.

    steps: the nodes from the scores on, `node` among them. quotient: of values that are weighed before the division.
    """

    node: torch.fx.Node
    source: Any
    dim: int
    steps: tuple[torch.fx.Node, ...]
    quotient: torch.fx.Node | None = None
    problem: Problem | None = None


def softmax_of(node: torch.fx.Node) -> Softmax | None:
    """The softmax that ends at a node."""
    name = canonical_name(node)
    if name == "softmax":
        return _made(node, argument(node, 0, "input"), argument(node, 1, "dim"), (node,))
    if name == "exp":
        return _of_logarithms(node)
    if name in ("truediv", "mul") and len(node.args) > 1:
        return _divided(node, name)
    return None


def _made(
    node: torch.fx.Node, source: Any, dim: Any, steps: tuple[torch.fx.Node, ...]
) -> Softmax | None:
    return Softmax(node, source, dim, steps) if isinstance(dim, int) else None


def _of_logarithms(node: torch.fx.Node) -> Softmax | None:
    inner: Any = node.args[0]
    name = canonical_name(inner) if is_tensor(inner) else ""
    if name == "log_softmax":
        return _made(node, argument(inner, 0, "input"), argument(inner, 1, "dim"), (inner, node))
    if name != "sub" or inner.kwargs.get("alpha", 1) != 1:
        return None
    source, total = inner.args[0], argument(inner, 1, "other")
    if not is_tensor(total) or canonical_name(total) != "logsumexp" or total.args[0] is not source:
        return None
    dim = _kept_dim(total)
    return None if dim is None else _made(node, source, dim, (total, inner, node))


def _divided(node: torch.fx.Node, name: str) -> Softmax | None:
    """e / e.sum(), or e * e.sum().reciprocal()."""
    above: Any
    below: Any
    above, below = node.args[:2]
    steps: tuple[torch.fx.Node, ...] = (node,)
    if name == "mul":
        if _is(above, "reciprocal"):
            above, below = below, above
        if not _is(below, "reciprocal"):
            return None
        steps, below = (below, *steps), below.args[0]
    if not is_tensor(above) or not is_tensor(below):
        return None
    problem = None
    if canonical_name(below) in ("add", "clamp", "clamp_min"):
        tensors = [a for a in (*below.args, *below.kwargs.values()) if is_tensor(a)]
        if len(tensors) != 1:
            return None
        steps, below, problem = (below, *steps), tensors[0], _CONSTANT_ADDED
    total, dim = _total(below)
    exponential: Any = None if total is None else _behind_casts(total.args[0])
    if total is None or dim is None or not _is(exponential, "exp"):
        return None
    steps = (exponential, total, *steps)
    source = exponential.args[0]
    if _behind_casts(above) is exponential:
        return Softmax(node, source, dim, steps, problem=problem)
    product = product_of(above)
    if product is None or _behind_casts(product.left) is not exponential:
        return None
    rows_kept = product.out_labels[:-1] == product.left_labels[:-1]
    if not rows_kept or dim not in (-1, fake_value(exponential).dim() - 1):
        return None
    return Softmax(exponential, source, dim, steps, node, problem)


def _total(node: Any) -> tuple[torch.fx.Node | None, int | None]:
    """A sum over one dimension that is still there, and the dimension."""
    if _is(node, "sum"):
        return node, _kept_dim(node)
    inner: Any = node.args[0] if is_tensor(node) and node.args else None
    if not _is(inner, "sum") or _dim(inner) not in (-1, fake_value(inner).dim()):
        return None, None
    shape = fake_value(node).shape
    added = same_size(size_of(shape[-1]), 1) and len(shape) == fake_value(inner).dim() + 1
    return (
        (inner, -1) if added and canonical_name(node) in ("unsqueeze", "getitem") else (None, None)
    )


def _is(node: Any, name: str) -> bool:
    return is_tensor(node) and canonical_name(node) == name


def _behind_casts(node: Any) -> Any:
    while is_tensor(node) and canonical_name(node) in _CASTS:
        node = node.args[0]
    return node


def _kept_dim(node: torch.fx.Node) -> int | None:
    """The dimension that a reduction leaves with one element."""
    return _dim(node) if argument(node, 2, "keepdim", False) is True else None


def _dim(node: torch.fx.Node) -> int | None:
    dim = argument(node, 1, "dim", node.kwargs.get("axis"))
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    return dim if isinstance(dim, int) else None
