"""Attention that is one call: `F.scaled_dot_product_attention`, and the operators of attention libraries.

A call is read by the names of its arguments: `_flash_attn_forward(q, k, v, 0.0, 0.25, False, -1, -1, 0.0, None, False)` has
softmax_scale 0.25 and no window. An argument that would change what is computed, and isn't at its neutral value, makes the
site a problem; so does a call that only looks like attention, three tensors of heads under a name like `block_attn`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.fx

from .attention_names import (
    FREE,
    LAYOUTS,
    LOOKS_LIKE,
    MEANINGS,
    ORDERS,
    SET_NATIVE,
    is_known_call,
    target_name,
)
from .attention_site import (
    BND,
    NHD,
    NO_SCALE,
    PACKED,
    AttentionSite,
    DimOrder,
    Problem,
    default_scale,
    dropout_of,
)
from .axes import same_size, size_of
from .flex_call import flex_problem
from .graph_view import canonical_name, fake_value, is_tensor, module_path, number_of
from .known_integers import equal_steps, known_integers

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_FLEX = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options")


def attention_call(node: torch.fx.Node) -> AttentionSite | None:
    """The attention that one node calls, or what looks like it."""
    call = _read(node)
    if call is not None:
        return call.site()
    return _unknown(node)


@dataclass(frozen=True)
class Operands:
    """What a known call reads, all in one order, which its output has too."""

    q: torch.fx.Node
    k: torch.fx.Node
    v: torch.fx.Node
    mask: torch.fx.Node | None
    order: DimOrder


def operands_of(node: torch.fx.Node) -> Operands | None:
    """The operands of a known call."""
    call = _read(node)
    if call is None:
        return None
    mask = call.meant.get("mask")
    return Operands(call.q, call.k, call.v, mask if is_tensor(mask) else None, call.order)


@dataclass(frozen=True)
class _Call:
    """A known call; meant: its arguments by what they mean, others: those that must be neutral."""

    node: torch.fx.Node
    q: torch.fx.Node
    k: torch.fx.Node
    v: torch.fx.Node
    order: DimOrder
    meant: Mapping[str, Any]
    others: Mapping[str, Any]

    def site(self) -> AttentionSite | None:
        output, read_too = _output_of(self.node)
        features = size_of(fake_value(self.q).shape[-1])
        scale = self.meant.get("scale")
        scale = default_scale(features) if scale is None else number_of(scale)
        if output is None:
            return None
        order, samples, problem = self._packing()
        mask = self.meant.get("mask")
        if read_too:
            problem = Problem("its log-sum-exp is read too", "return the output of attention only")
        if scale is None:
            problem = NO_SCALE
        if mask is not None and not is_tensor(mask):
            problem = Problem(f"a mask of type {type(mask).__name__}", SET_NATIVE)
        return AttentionSite(
            output,
            self.q,
            self.k,
            self.v,
            1.0 if scale is None else scale,
            module_path(self.node),
            mask if is_tensor(mask) else None,
            *(order,) * 4,
            causal=bool(self.meant.get("causal", False)),
            gqa=bool(self.others.get("enable_gqa", False)),
            dropout=dropout_of(self.meant.get("dropout")),
            samples=samples,
            opaque=samples == 0,
            steps=() if output is self.node else (self.node,),
            problem=problem or self._not_neutral(),
        )

    def _packing(self) -> tuple[DimOrder, int, Problem | None]:
        """The order, the number of samples in a packed call, and why that can't be told."""
        given = [self.meant.get(f"{x} lengths") for x in "qk"]
        if self.order is not PACKED:
            return self.order, 1, None
        q_ends, k_ends = (known_integers(x) for x in given)
        total = size_of(fake_value(self.q).shape[self.order.tokens])
        step = None if q_ends is None or q_ends != k_ends else equal_steps(q_ends)
        if q_ends is None or step is None or not same_size(q_ends[-1], total):
            return (
                self.order,
                0,
                Problem(
                    f"the sequence lengths of `{target_name(self.node)}` depend on data or differ",
                    SET_NATIVE,
                ),
            )
        samples = len(q_ends) - 1
        return (NHD if samples == 1 else PACKED), samples, None

    def _not_neutral(self) -> Problem | None:
        if canonical_name(self.node) == "flex_attention":
            return flex_problem(
                self.node, self.others.get("score_mod"), self.others.get("block_mask")
            )
        for name, value in self.others.items():
            if not FREE.fullmatch(name) and not _is_neutral(name, value):
                return Problem(f"`{target_name(self.node)}` with `{name}`", SET_NATIVE)
        return None


def _is_neutral(name: str, value: Any) -> bool:
    """Does an argument leave attention as it is? A window of 0 tokens to one side does not; one that is -1 or None does."""
    if "window" in name:
        sides = value if isinstance(value, (tuple, list)) else (value,)
        return all(side is None or number_of(side) == -1 for side in sides)
    return value in (None, False) or number_of(value) in (0, -1)


def _read(node: torch.fx.Node) -> _Call | None:
    if not is_known_call(node):
        return None
    given = _arguments(node)
    meant = {MEANINGS[name]: value for name, value in given.items() if name in MEANINGS}
    others = {name: value for name, value in given.items() if name not in MEANINGS}
    q, k, v = (cast(torch.fx.Node, meant.get(x)) for x in "qkv")
    if not (is_tensor(q) and is_tensor(k) and is_tensor(v)):
        return None
    order = LAYOUTS.get(meant.get("layout", ""), ORDERS[canonical_name(node)])
    if "lengths" in " ".join(name for name, value in meant.items() if value is not None):
        order = PACKED
    rank = fake_value(q).dim()
    if rank == 3 and order is not PACKED:
        order = BND
    elif rank == 4 and order is PACKED:  # one row of packed samples
        return None
    return _Call(node, q, k, v, order, meant, others) if rank in (3, 4) else None


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call by name; those without a name are left out."""
    target: Any = node.target
    if canonical_name(node) == "scaled_dot_product_attention":
        names: Sequence[str] = _SDPA
    elif isinstance(target, torch._ops.HigherOrderOperator):
        names = _FLEX
    elif isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        overload = target if isinstance(target, torch._ops.OpOverload) else target.default
        names = [argument.name for argument in overload._schema.arguments]
    else:
        try:
            names = list(inspect.signature(target).parameters)
        except (TypeError, ValueError):
            names = ()
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _output_of(node: torch.fx.Node) -> tuple[torch.fx.Node | None, bool]:
    """The node of a call's output, and whether anything else that it returns is read."""
    if not isinstance(fake_value(node), (tuple, list)):
        return node, False
    picks = [
        user for user in node.users if canonical_name(user) == "getitem" and user.args[0] is node
    ]
    outputs = [pick for pick in picks if pick.args[1] == 0]
    others = [
        user for user in node.users if user not in outputs and (user.users or user not in picks)
    ]
    return (outputs[0] if len(outputs) == 1 else None), bool(others)


def _unknown(node: torch.fx.Node) -> AttentionSite | None:
    """A call that is attention by its name and its operands, which nothing else is known of."""
    name = target_name(node).split("::")[-1]
    if node.op != "call_function" or not LOOKS_LIKE.search(name):
        return None
    given = [*node.args, *node.kwargs.values()]
    tensors = [a for a in given if is_tensor(a) and fake_value(a).is_floating_point()][:3]
    if "packed" in name:  # q, k and v, or k and v, in one tensor
        tensors = (tensors[:2] + tensors[-1:] * 3)[:3] if tensors else []
    shapes = [fake_value(a).shape for a in tensors]
    if len(tensors) < 3 or len({len(s) for s in shapes}) > 1 or len(shapes[0]) not in (3, 4, 5):
        return None
    if not same_size(*(size_of(s[-1]) for s in shapes[:2])):
        return None
    problem = Problem(f"its attention is `{target_name(node)}`, which is not known", SET_NATIVE)
    if is_known_call(node):
        problem = Problem(
            f"`{name}` of tensors with {len(shapes[0])} dimensions",
            "call attention on [batch, heads, tokens, head_dim]",
        )
    q, k, v = (cast(torch.fx.Node, tensor) for tensor in tensors)
    return AttentionSite(node, q, k, v, 1.0, module_path(node), problem=problem, opaque=True)
