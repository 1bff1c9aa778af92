"""One name for the spellings of an operation; which of them write into their first argument."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from sta_compile.analysis.graph_view import canonical_name, is_inplace, is_pointwise

# Versions of torch trace `x == y` to operator.eq, to the method "eq" or to the method "__eq__".
SPELLINGS: dict[str, list[Any]] = {
    "eq": [operator.eq, "eq", "__eq__", torch.eq, torch.ops.aten.eq.Tensor],
    "lt": [operator.lt, "lt", "__lt__", torch.less, torch.ops.aten.lt],
    "add": [
        operator.add,
        operator.iadd,
        "add",
        "add_",
        "__add__",
        "__radd__",
        "__iadd__",
        torch.add,
    ],
    "mul": [operator.mul, operator.imul, "__rmul__", "__imul__", torch.multiply],
    "rsub": ["__rsub__", torch.rsub],
    "truediv": [operator.truediv, operator.itruediv, "div", "__truediv__", "__itruediv__"],
    "logical_and": [operator.and_, operator.iand, "__and__", "__iand__", "__rand__", "bitwise_and"],
    "logical_or": [operator.or_, "__or__", "__ior__", torch.logical_or],
    "logical_not": [operator.invert, "__invert__", torch.bitwise_not],
    "getitem": [operator.getitem, "__getitem__"],
    "rand": [torch.rand],
    "setitem": [operator.setitem, "__setitem__"],
}
WRITES = {operator.iadd, operator.imul, operator.itruediv, operator.iand, operator.setitem}
WRITES |= {"add_", "__iadd__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__setitem__"}
CASES = [(name, target) for name, targets in SPELLINGS.items() for target in targets]


def label(case: tuple[str, Any]) -> str:
    """The same in every process, which the repr of a builtin is not."""
    name, target = case
    return f"{name} {target if isinstance(target, str) else getattr(target, '__name__', target)}"


@pytest.mark.parametrize(("name", "target"), CASES, ids=map(label, CASES))
def test_spellings_have_one_name(name: str, target: Any) -> None:
    graph = Graph()
    arguments = graph.placeholder("x"), graph.placeholder("y")
    call = graph.call_method if isinstance(target, str) else graph.call_function
    node = call(target, arguments)
    assert canonical_name(node) == name
    assert is_inplace(node) is (target in WRITES)
    assert is_pointwise(name) is (name not in ("getitem", "setitem", "rand"))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("function", [F.relu, F.silu, F.dropout, F.hardtanh])
def test_a_flag_says_that_a_function_writes(function: Any, by_name: bool, inplace: bool) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    between = {F.dropout: (0.5, True), F.hardtanh: (-1.0, 1.0)}.get(function, ())
    if by_name:
        node = graph.call_function(function, (x,), {"inplace": inplace})
    else:
        node = graph.call_function(function, (x, *between, inplace))
    assert is_inplace(node) is inplace


@pytest.mark.parametrize("name", ["__eq__", "__class__", "softmax", "cumsum", "no such operation"])
def test_what_is_no_operation_is_not_pointwise(name: str) -> None:
    assert not is_pointwise(name)
