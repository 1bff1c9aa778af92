"""One spelling for the many ways to write an operation in a Dynamo graph.

`x.view(...)`, `torch.reshape(x, ...)`, `operator.iadd`, `x.add_` and `aten.add.Tensor` reach a backend as different
targets. A `GraphView` gives each node one name, its arguments by name or position, its fake value and the module that
it came from, and it walks the bodies of higher-order operators (checkpoints, nested regions) as if they were inlined:
body nodes come right before the call, and a body placeholder knows the arguments of all its call sites.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.fx

from .._torch import body_of_call, is_higher_order, is_vmapped, specialise_float

# Python's operators and torch's synonyms -> the name that the rest of the analysis uses.
_ALIASES = {
    "concat": "cat",
    "concatenate": "cat",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "div": "truediv",
    "divide": "truediv",
    "true_divide": "truediv",
    "multiply": "mul",
    "subtract": "sub",
    "and_": "logical_and",
    "or_": "logical_or",
    "invert": "logical_not",
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_not": "logical_not",
    "greater_equal": "ge",
    "greater": "gt",
    "less_equal": "le",
    "less": "lt",
    "and": "logical_and",
    "or": "logical_or",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "special_softmax": "softmax",
    "special_log_softmax": "log_softmax",
    "special_logsumexp": "logsumexp",
    "adjoint": "mT",  # of real tensors
    "mH": "mT",
    "numpy_T": "T",  # torch 2.14
    "matrix_H": "T",
    "H": "T",
    "mod": "remainder",
    # Products of (activations, packed weights, ...), of torch and of bitsandbytes.
    "_scaled_mm": "mm",
    "_int_mm": "mm",
    "_weight_int8pack_mm": "linear",
    "_weight_int4pack_mm": "linear",
    "gemm_4bit": "linear",
    "gemv_4bit": "linear",
    "int8_scaled_mm": "linear",
}
# Methods that Python calls on the right operand, of operations whose operands may be swapped; `torch.rand` is none.
_REFLECTED = {"radd": "add", "rmul": "mul", "rand": "logical_and", "ror": "logical_or"}
_INPLACE_OPERATORS = {
    "iadd": "add",
    "isub": "sub",
    "imul": "mul",
    "itruediv": "truediv",
    "ifloordiv": "floordiv",
    "imod": "mod",
    "ipow": "pow",
    "imatmul": "matmul",
    "iand": "and",
    "ior": "or",
    "ixor": "xor",
    "ilshift": "lshift",
    "irshift": "rshift",
}
_WRITES = ("setitem", "delitem")
# Position-independent along every axis, though torch does not tag them as pointwise.
_POINTWISE = {
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long", "bool",
    "contiguous", "clone", "detach", "alias", "dropout", "feature_dropout", "_to_copy", "truediv",
    "floordiv", "neg", "pos", "silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "identity",
    "hardtanh", "leaky_relu", "elu", "mish", "view_as_dtype", "copy", "masked_fill", "where",
    "nan_to_num", "clamp", "clip", "lerp", "addcmul", "addcdiv", "cpu", "cuda", "requires_grad_",
    "conj", "real", "imag", "polar", "complex", "logical_and", "logical_or", "logical_not", "fill",
    "rsub", "rtruediv", "rfloordiv", "rpow", "rmod", "xor", "rxor",
    "lift_fresh", "lift_fresh_copy",
    "all_reduce", "wait_tensor",  # over processes, element by element
}  # fmt: skip

# In a placeholder's meta.
_PARAMETER = "sta_parameter"
_CONSTANT = "sta_constant"
# Of a tensor's autograd, not of its elements.
_OF_AUTOGRAD = ("requires_grad_", "detach_")


@lru_cache(maxsize=4096)
def is_pointwise(name: str) -> bool:
    """Does every output element depend on the input elements at the same (broadcast) position only?"""
    if name in _POINTWISE:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def _target_name(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target.__name__.split("::")[-1]
    return getattr(target, "__name__", type(target).__name__)


def _special(name: str) -> tuple[str, bool]:
    """`x == y` may be the method `__eq__` or operator.eq, by the version of torch."""
    special = name.startswith("__") and name.endswith("__")
    return (name[2:-2], True) if special else (name, False)


def canonical_name(node: torch.fx.Node) -> str:
    """The one name of a node's operation, without the in-place underscore; "" for non-calls."""
    if node.op not in ("call_function", "call_method"):
        return ""
    name, special = _special(_target_name(node))
    if special and name in _REFLECTED:
        return _REFLECTED[name]
    if (
        special
        or getattr(node.target, "__module__", "") == "_operator"
        or node.target is operator.getitem
    ):
        name = _INPLACE_OPERATORS.get(name, name)
    if name == "getattr" and len(node.args) == 2:  # x.mT
        name = str(node.args[1])
    if name.endswith("_") and not name.endswith("__") and name not in _ALIASES:
        name = name[:-1]
    return _ALIASES.get(name, name)


def is_inplace(node: torch.fx.Node) -> bool:
    """Does the node write into its first argument?"""
    if node.op == "call_method":
        name, special = _special(str(node.target))
        if special:
            return name in _INPLACE_OPERATORS or name in _WRITES
        return name.endswith("_") and not name.endswith("__") and name not in _OF_AUTOGRAD
    if node.op != "call_function":
        return False
    name = _target_name(node)
    if name in _OF_AUTOGRAD:
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    if name in _WRITES or (
        getattr(node.target, "__module__", "") == "_operator" and name in _INPLACE_OPERATORS
    ):
        return True
    if name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_"):
        return True
    return _by_flag(node) or node.kwargs.get("out") is not None


def _by_flag(node: torch.fx.Node) -> bool:
    """`F.relu(x, inplace=True)` and its like, by keyword or by position."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    if not inspect.isfunction(node.target):
        return False
    names = list(inspect.signature(node.target).parameters)
    position = names.index("inplace") if "inplace" in names else len(node.args)
    return position < len(node.args) and bool(node.args[position])


def fake_value(node: Any) -> Any:
    """The fake value of a node (FakeTensor, SymInt, tuple, ...); other values are returned as they are.

    None inside vmap: what a tensor there is of one sample says nothing about the whole, and its memory can't be read.
    """
    if isinstance(node, torch.fx.Node):
        value = node.meta.get("example_value")
        value = node.meta.get("val") if value is None else value
        return None if is_vmapped(value) else value
    return value_of(node)


def number_of(value: Any) -> float | None:
    """A Python number; one that Dynamo made an input of is known from here on, with a guard."""
    value = fake_value(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return specialise_float(value) if isinstance(value, torch.SymFloat) else None


def value_of(arg: Any) -> Any:
    if isinstance(arg, (tuple, list)):
        return type(arg)(fake_value(a) for a in arg)
    return arg


def argument(node: torch.fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument that may be given by position or by name."""
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if len(node.args) > position else default


def is_tensor(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(fake_value(node), torch.Tensor)


def is_parameter(node: torch.fx.Node) -> bool:
    """Is an input a weight or a buffer of the model? Dynamo says so in its name, and what is known otherwise is marked."""
    marked = _PARAMETER in node.meta
    return marked or "_parameters_" in node.name or "_buffers_" in node.name


def mark_parameter(node: torch.fx.Node) -> None:
    node.meta[_PARAMETER] = True


def mark_constant(node: torch.fx.Node, value: torch.Tensor) -> None:
    """Says that a placeholder is a number of the program: `torch.tensor([216])` of an exported one."""
    node.meta[_CONSTANT] = value


def constant_of(node: torch.fx.Node) -> torch.Tensor | None:
    """The tensor that a node was marked with as a constant."""
    value: torch.Tensor | None = node.meta.get(_CONSTANT)
    return value


def module_path(node: torch.fx.Node) -> str:
    """Path of the module that a node came from: "blocks.0.attn1"; "" at the root.

    Example: nn_module_stack key "L['self'].__dict__['_modules']['blocks'].0.attn1" -> "blocks.0.attn1"; a forward behind
    a decorator is a function of `args`, "L['args'][0].layers.0" -> "layers.0".
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = path.replace("__dict__['_modules']", "").replace("._modules", ".")
    path = path.replace(".forward.__self__", "")  # a forward that is an attribute of its module
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    parts = [p for p in path.split(".") if p]
    if parts and parts[0] in ("L", "G"):
        parts = parts[3:] if parts[1:3] == ["args", "0"] else parts[2:]
    for holder in (
        "__self__",
        "cell_contents",
    ):  # of a method that is called, of a function that uses the model
        if holder in parts:
            parts = parts[parts.index(holder) + 1 :]
    return ".".join(p for p in parts if p not in ("_orig_mod", "_modules"))


class GraphView:
    """A Dynamo graph with the bodies of its higher-order operators, in execution order."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.gm = gm
        self.nodes: list[torch.fx.Node] = []
        self.owner: dict[torch.fx.Node, torch.fx.GraphModule] = {}
        # body placeholder -> the argument at each call site; call -> its body
        self.sources: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self.body: dict[torch.fx.Node, torch.fx.GraphModule] = {}
        self.calls: dict[torch.fx.GraphModule, list[torch.fx.Node]] = {}
        self._walk(gm)
        self.position = {node: i for i, node in enumerate(self.nodes)}

    def _walk(self, gm: torch.fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            call = body_of_call(gm, node) if is_higher_order(node) else None
            if call is not None:
                body, operands = call
                first_call = body not in self.calls
                self.calls.setdefault(body, []).append(node)
                self.body[node] = body
                inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
                for inner, outer in zip(inputs, operands, strict=True):
                    if isinstance(outer, torch.fx.Node):
                        self.sources.setdefault(inner, []).append(outer)
                if first_call:
                    self._walk(body)
            self.nodes.append(node)
            self.owner[node] = gm

    def is_root_input(self, node: torch.fx.Node) -> bool:
        return node.op == "placeholder" and self.owner[node] is self.gm

    def in_root(self, node: torch.fx.Node) -> torch.fx.Node:
        """A node of the root graph: itself, or the first call of the body that it is in."""
        while self.owner[node] is not self.gm:
            node = self.calls[self.owner[node]][0]
        return node

    def body_outputs(self, call: torch.fx.Node) -> Any:
        """What the body of a higher-order call returns: nodes in a tuple."""
        output = next(iter(reversed(self.body[call].graph.nodes)))
        return output.args[0]

    def times(self, node: torch.fx.Node) -> int:
        """How often a node runs in a call of the graph: once for each call of the bodies around it."""
        calls = self.calls.get(self.owner[node])
        return 1 if calls is None else sum(map(self.times, calls))

    def producers(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The nodes that a node reads; a body placeholder reads the arguments of its call sites."""
        if node in self.sources:
            return self.sources[node]
        if node in self.body:
            outputs = self.body_outputs(node)
            outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
            return [n for n in outputs if isinstance(n, torch.fx.Node)]
        return list(node.all_input_nodes)

    def picks(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """For `getitem(call, i)` of a higher-order call: the body's i-th output node."""
        if canonical_name(node) != "getitem" or node.args[0] not in self.body:
            return None
        call, index = node.args
        outputs = self.body_outputs(call)  # type: ignore[arg-type]
        picked = outputs[index] if isinstance(outputs, (tuple, list)) else outputs  # type: ignore[index]
        return picked if isinstance(picked, torch.fx.Node) else None

    def backwards(self, start: torch.fx.Node) -> Iterator[torch.fx.Node]:
        """Every node that `start` depends on, `start` first; through `getitem` of a call only the picked output."""
        seen = {start}
        stack = [start]
        while stack:
            node = stack.pop()
            yield node
            picked = self.picks(node)
            for source in [picked] if picked is not None else self.producers(node):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
