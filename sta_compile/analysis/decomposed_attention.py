"""Attention as steps: `softmax(scale * q @ k^T + mask) @ v` in matmul, bmm, baddbmm or einsum.

Every dimension of a product gets a label, which follows it through transposes, casts and views up to the softmax and from
there to the second product. What the labels are called says nothing; which of them are summed over says it all:

    einsum("bqhd,bkhd->bhqk")   b, h in both factors and the result, d summed over, q and k in one factor each
    softmax(-1)                 over k, so k is the label of the keys and q that of the queries
    einsum("bhqk,bkhd->bqhd")   sums over k
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx

from .attention_site import NO_SCALE, AttentionSite, DimOrder, Problem, dropout_of
from .axes import same_size, size_of
from .graph_view import (
    argument,
    canonical_name,
    fake_value,
    is_inplace,
    is_tensor,
    module_path,
    number_of,
)
from .matrix_products import Labels, Product, batch_labels, moved, product_of
from .softmax import Softmax

_CASTS = ("to", "float", "half", "bfloat16", "type", "type_as", "contiguous", "clone")
_VIEWS = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
_MOVES = ("transpose", "permute", "mT", "movedim")
_OPERATIONS = ("add", "mul", "truediv", "masked_fill", "where", "sub")
_HIDDEN = -1e4  # scores below are those of keys that are not seen
_FARTHEST = 16  # steps between a product and its softmax


@dataclass
class Scores:
    """The way from a product to its softmax's input."""

    product: torch.fx.Node
    steps: list[torch.fx.Node] = field(default_factory=list)  # from the product to the softmax
    scale: float = 1.0
    mask: torch.fx.Node | None = None
    mask_step: torch.fx.Node | None = None  # where it is added
    problem: Problem | None = None


def scaled(node: Any) -> tuple[Any, float] | None:
    """(x, factor) if the node is x * factor or x / factor with a Python number."""
    name = canonical_name(node)
    if name not in ("mul", "truediv") or len(node.args) < 2:
        return None
    a, b = node.args[:2]
    if name == "mul" and number_of(a) is not None:
        a, b = b, a
    factor = number_of(b)
    if factor is None or not is_tensor(a) or (name == "truediv" and factor == 0):
        return None
    return a, (factor if name == "mul" else 1.0 / factor)


def is_followed(name: str) -> bool:
    """May scores go through an operation of this name on their way to the softmax?"""
    return name in (*_CASTS, *_VIEWS, *_MOVES, *_OPERATIONS)


def _scores(node: Any, left: int = _FARTHEST) -> Scores | None:
    """Walks from a softmax's input back to the product."""
    if not is_tensor(node) or left == 0:
        return None
    name = canonical_name(node)
    if product_of(node) is not None:
        return _product_scores(node)
    inner = scaled(node)
    if inner is not None:
        source, factor = inner
        found = _scores(source, left - 1)
        if found is not None and found.mask is not None and factor != 1.0:
            found.problem = _MASK_SCALED
        if found is not None:
            found.scale *= factor
    elif name in (*_CASTS, *_VIEWS, *_MOVES):
        found = _scores(argument(node, 0, "input"), left - 1)
    elif name == "sub" and _is_maximum_of(argument(node, 1, "other"), node.args[0]):
        found = _scores(
            node.args[0], left - 1
        )  # a softmax doesn't see what all scores have in common
    elif name in _OPERATIONS:
        found = _with_tensor(node, name, left)
    else:
        return None
    if found is not None:
        found.steps.append(node)
    return found


_MASK_TURNED = Problem(
    "its mask is added to scores that are not [batch, heads, queries, keys]",
    "call torch.nn.functional.scaled_dot_product_attention",
)
_MASK_SCALED = Problem("its mask is multiplied by the scale too", "add the mask after the scale")


def _product_scores(node: torch.fx.Node) -> Scores:
    found = Scores(node)
    if canonical_name(node) == "baddbmm":
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        factor = number_of(alpha)
        found.scale = 1.0 if factor is None else factor
        if factor is None:
            found.problem = NO_SCALE
        if beta != 0:
            found.mask, found.mask_step = argument(node, 0, "input"), node
            if beta != 1:
                found.problem = _MASK_SCALED
    found.steps.append(node)
    return found


def _with_tensor(node: torch.fx.Node, name: str, left: int) -> Scores | None:
    """Scores to which a tensor is added, or that it scales or hides."""
    operands: list[Any] = [a for a in node.args[:3] if is_tensor(a)]
    for operand in operands:
        found = _scores(operand, left - 1)
        if found is None:
            continue
        others = [a for a in operands if a is not operand]
        if name == "add":
            if node.kwargs.get("alpha", 1) != 1:
                found.problem = _MASK_SCALED
            elif others and not fake_value(others[0]).is_floating_point():
                found.problem = Problem(
                    "a tensor that is not floating point is added to its scores",
                    "add 0 and -inf, or give a boolean mask to scaled_dot_product_attention",
                )
            elif others and found.mask is not None:
                found.problem = Problem(
                    "two tensors are added to its scores", "add them up to one mask first"
                )
            elif others:
                found.mask, found.mask_step = others[0], node
        elif name == "sub":
            if others or node.args[0] is not operand:
                found.problem = Problem(
                    "a tensor is subtracted from its scores", "add its negative, as a mask"
                )
        elif name in ("mul", "truediv"):
            found.problem = Problem(
                "its scores are multiplied by a tensor", "multiply the queries by it instead"
            )
        else:
            mask = _visible(node, name, operand)
            if mask is None or found.mask is not None:
                found.problem = Problem(
                    f"its scores are masked by `{name}`",
                    "give the mask to torch.nn.functional.scaled_dot_product_attention",
                )
            found.mask, found.mask_step = mask, node
        return found
    return None


def _visible(node: torch.fx.Node, name: str, scores: torch.fx.Node) -> torch.fx.Node | None:
    """The boolean mask that leaves scores as they are where it is True, and hides the others."""
    if name == "where":
        mask, kept, fill = (*node.args, None, None)[:3]
    else:  # masked_fill(scores, ~mask, fill)
        kept, hidden, fill = node.args[0], argument(node, 1, "mask"), argument(node, 2, "value")
        negated = canonical_name(hidden) == "logical_not" if is_tensor(hidden) else False
        mask = hidden.args[0] if negated else None
    number = number_of(fill)
    if kept is not scores or number is None or number > _HIDDEN or not is_tensor(mask):
        return None
    return mask if fake_value(mask).dtype == torch.bool else None  # type: ignore[return-value]


def _is_maximum_of(node: Any, scores: Any) -> bool:
    while is_tensor(node) and canonical_name(node) in ("getitem", "detach"):
        node = node.args[0]  # max(dim) gives values and indices
    if not isinstance(node, torch.fx.Node) or canonical_name(node) not in ("amax", "max"):
        return False
    return bool(node.args) and node.args[0] is scores


def _relabelled(node: torch.fx.Node, labels: Labels) -> Labels | None:
    """Labels after a step of one tensor; None where dimensions of queries or keys are merged or cut."""
    name, value = canonical_name(node), fake_value(node)
    if name in _MOVES:
        order = moved(node, len(labels))
        return None if order is None else tuple(labels[d] for d in order)
    if name in _VIEWS:
        source = fake_value(argument(node, 0, "input"))
        same = [same_size(size_of(a), size_of(b)) for a, b in _aligned(source.shape, value.shape)]
        if source.dim() == value.dim() and all(same):
            return labels
        if value.dim() < 2 or source.dim() < 2 or not all(same[:2]):
            return None
        return (*batch_labels(value.dim()), *labels[-2:])
    return labels if value.dim() == len(labels) else None


def _aligned(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    return zip(reversed(a), reversed(b), strict=False)


@dataclass(frozen=True)
class _Output:
    node: torch.fx.Node
    product: Product
    labels: dict[str, str]  # of the product -> of the scores
    dropout: float
    problem: Problem | None
    steps: tuple[torch.fx.Node, ...]


def _output(softmax: Softmax, labels: Labels) -> _Output | None:
    """The product that a softmax's output goes into, through casts, views and dropout."""
    dropout, problem, steps, node = 0.0, None, [], softmax.node
    while True:
        users = [user for user in node.users if user not in softmax.steps]
        if len(users) > 1:
            problem = Problem("its probabilities are read too", "return no attention weights")
        user = next((u for u in users if product_of(u) is not None), users[0] if users else None)
        if user is None:
            return None
        steps.append(user)
        product = product_of(user)
        if product is not None:
            mine = product.left_labels if product.left is node else product.right_labels
            if canonical_name(user) == "baddbmm" and user.kwargs.get("beta", 1) != 0:
                return None
            named = dict(zip(mine, labels, strict=True))
            return _Output(user, product, named, dropout, problem, tuple(steps))
        name = canonical_name(user)
        if name == "dropout" and argument(user, 2, "training", True):
            dropout = max(dropout, dropout_of(argument(user, 1, "p", 0.5)))
        elif name not in (*_CASTS, *_VIEWS, *_MOVES, "dropout"):
            return None
        relabelled = _relabelled(user, labels)
        if relabelled is None or user.args[0] is not node:
            return None
        node, labels = user, relabelled


def decomposed(softmax: Softmax) -> AttentionSite | None:
    """The attention around a softmax, if it is one."""
    scores = _scores(softmax.source)
    if scores is None:
        return None
    product = product_of(scores.product)
    assert product is not None
    roles = product.roles()
    labelled = _labels_of(scores.steps, product.out_labels)
    labels = labelled.get(scores.steps[-1])
    if roles is None or labels is None:
        return None
    keys = labels[softmax.dim]
    output = _output(softmax, labels)
    if output is None or keys not in roles[:2]:
        return None
    if scores.problem is None and not all(
        _constant_along(keys, step, labelled[step]) for step in scores.steps
    ):
        return None
    left, right, summed = roles
    queries = left if keys == right else right
    q, k = (product.left, product.right) if keys == right else (product.right, product.left)
    q_labels, k_labels = (
        (product.left_labels, product.right_labels)
        if keys == right
        else (product.right_labels, product.left_labels)
    )
    shared = tuple(x for x in q_labels if x in k_labels and x != summed)
    in_order = (*shared, queries, keys)
    if scores.mask_step is not None and labelled[scores.mask_step] != in_order:
        scores.problem = _MASK_TURNED
    sides = _Sides(queries, keys, summed, shared)
    site = sides.site(softmax, scores, output, (q, q_labels), (k, k_labels))
    if site is None or softmax.quotient is None:
        return site
    return replace(site, node=softmax.quotient, steps=(*site.steps, site.node))


def _labels_of(steps: Sequence[torch.fx.Node], labels: Labels) -> dict[torch.fx.Node, Labels]:
    """The labels of each step's output, from the product on, as far as they can be followed."""
    found = {steps[0]: labels}
    for step in steps[1:]:
        after = _relabelled(step, labels)
        if after is None:
            break
        found[step] = labels = after
    return found


def _constant_along(keys: str, step: torch.fx.Node, labels: Labels) -> bool:
    """Is what a step subtracts from the scores the same for all keys?"""
    if canonical_name(step) != "sub":
        return True
    maximum = fake_value(argument(step, 1, "other"))
    if not isinstance(maximum, torch.Tensor):
        return True
    place = labels.index(keys) - len(labels) + maximum.dim()
    return place < 0 or same_size(size_of(maximum.shape[place]), 1)


@dataclass(frozen=True)
class _Sides:
    """The labels of the scores by their role; shared: batch and heads, outermost first."""

    queries: str
    keys: str
    summed: str
    shared: Labels

    def order(self, labels: Labels, tokens: str, features: str) -> DimOrder | None:
        if tokens not in labels or features not in labels or len(self.shared) > 2:
            return None
        batch, heads = (*self.shared, None, None)[:2]
        found: dict[str | None, int] = {x: i for i, x in enumerate(labels)}
        if set(labels) - {batch, heads, tokens, features}:
            return None
        return DimOrder(found.get(batch), found.get(heads), found[tokens], found[features])

    def site(
        self,
        softmax: Softmax,
        scores: Scores,
        output: _Output,
        q: tuple[torch.fx.Node, Labels],
        k: tuple[torch.fx.Node, Labels],
    ) -> AttentionSite | None:
        last = output.product
        roles = last.roles()
        if roles is None or output.labels.get(roles[2]) != self.keys:
            return None
        probabilities_left = set(last.left_labels) == set(output.labels)
        rows, features = roles[:2] if probabilities_left else (roles[1], roles[0])
        if output.labels.get(rows) != self.queries:
            return None
        named = {**output.labels, features: "features"}
        v = last.right if probabilities_left else last.left
        v_labels = last.right_labels if probabilities_left else last.left_labels
        orders = (
            self.order(q[1], self.queries, self.summed),
            self.order(k[1], self.keys, self.summed),
            self.order(tuple(named[x] for x in v_labels), self.keys, "features"),
            self.order(tuple(named[x] for x in last.out_labels), self.queries, "features"),
        )
        if None in orders:
            return None
        q_node, q_factor = _strip_scale(q[0])
        first = () if q_node is q[0] else (q[0],)  # reads q before the others
        return AttentionSite(
            output.node,
            q_node,
            k[0],
            v,
            scores.scale * q_factor,
            module_path(output.node) or module_path(softmax.node),
            scores.mask,
            *orders,  # type: ignore[arg-type]
            dropout=output.dropout,
            steps=(*first, *scores.steps, *softmax.steps, *output.steps),
            problem=softmax.problem or scores.problem or output.problem,
        )


def _strip_scale(node: torch.fx.Node) -> tuple[torch.fx.Node, float]:
    """A q that was multiplied by a number, without it; one that was multiplied in place holds the factor."""
    inner = None if is_inplace(node) else scaled(node)
    return (inner[0], inner[1]) if inner is not None else (node, 1.0)
