"""Python numbers that Dynamo makes inputs of a graph, in bodies of nested regions.

With dynamic=True each float that a block reads is one, `eps` of its norms too. Torch takes tensors and integers into a
region, no floats: the first call of a body passes the number as a tensor of no dimension, the others as a number. What is
the same number at all calls becomes a constant of the body, with a guard.

    invoke_subgraph(body, x, eps), invoke_subgraph(body, y, eps_1)   ->   invoke_subgraph(body, x), invoke_subgraph(body, y)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .._torch import body_of_call, float_of, graph_modules, is_region
from ..analysis.graph_view import is_tensor


@dataclass(frozen=True)
class _Number:
    """An input of a body that holds one number at all calls. readers: the nodes of the body that are the number."""

    value: float
    inner: Node
    readers: list[Node]
    place: int  # among the arguments of the calls
    calls: list[Node]


def settle_numbers(gm: GraphModule) -> dict[str, float] | None:
    """Makes the numbers in bodies constants, in place; returns them by the names of the values that hold them.

    None, and a graph that is as it was, if one is not the same at all calls of a body, or is more than a number there.
    """
    found: list[_Number] = []
    for module in graph_modules(gm):
        for body, calls in _calls(module).items():
            numbers = list(_numbers(body, calls))
            if None in numbers:
                return None
            found += [number for number in numbers if number is not None]
    names: dict[str, float] = {}
    for number in found:
        names.update(_settle(number))
    return names


def _calls(module: GraphModule) -> dict[GraphModule, list[Node]]:
    calls: dict[GraphModule, list[Node]] = {}
    for node in module.graph.nodes:
        called = body_of_call(module, node) if is_region(node) else None
        if called is not None:
            calls.setdefault(called[0], []).append(node)
    return calls


def _numbers(body: GraphModule, calls: list[Node]) -> Iterator[_Number | None]:
    """The last first; None for a number that is not the same everywhere."""
    inputs = body.graph.find_nodes(op="placeholder")
    first = len(calls[0].args) - len(inputs)
    for place, inner in reversed(list(enumerate(inputs, first))):
        value, *others = (float_of(call.args[place]) for call in calls)
        readers = _readers(inner)
        if value is None and all(other is None for other in others):
            continue
        if value is None or readers is None or any(other != value for other in others):
            yield None
        else:
            yield _Number(value, inner, readers, place, calls)


def _readers(inner: Node) -> list[Node] | None:
    """The nodes of a body that are the number: the input, or each `item` of it; None if it is read as a tensor."""
    if not is_tensor(inner):
        return [inner]
    readers = list(inner.users)
    return readers if all(user.target == "item" for user in readers) else None


def _settle(number: _Number) -> dict[str, float]:
    for reader in number.readers:
        for user in list(reader.users):
            user.args = _with_constant(user.args, reader, number.value)
            user.kwargs = _with_constant(user.kwargs, reader, number.value)
        if reader is not number.inner:
            reader.graph.erase_node(reader)
    number.inner.graph.erase_node(number.inner)
    names = {}
    for call in number.calls:
        operand = call.args[number.place]
        call.args = (*call.args[: number.place], *call.args[number.place + 1 :])
        if isinstance(operand, Node):
            names[operand.name] = number.value
            if operand.op != "placeholder" and not operand.users:
                operand.graph.erase_node(operand)
    return names


def _with_constant(arguments: Any, node: Node, value: float) -> Any:
    return map_arg(arguments, lambda n: value if n is node else n)
