"""Tables of sizes that a model reads as numbers: `for frames, rows, cols in grid_sizes.tolist()`.

Models of the Wan family keep the grid of each sample in a small integer tensor, and form rope tables and slices from its
values. To Dynamo these are data: the graph breaks inside each attention. Inside `small_constants` it knows the values of
small tensors that are made in the graph of numbers, and what a model is given as such a table goes into the graph as
numbers, with a guard on each:

    args, kwargs, tables = without_tables(args, kwargs)         tables: (("grid_sizes", ((5, 9, 11),), torch.int64),)
    CallWithTables(model)(tables, args, kwargs)                 builds the tensor where Dynamo can see of what
    WithTables(forward, torch.compile)(args, kwargs)            does both, for a model or for a block that is compiled alone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ._trace import small_constants

__all__ = ["CallWithTables", "WithTables", "call_of", "small_constants", "without_tables"]

_NUMBERS = 64  # as many as a table may have
_TOKENS = 1 << 24  # more than any sample has

Forward = Callable[..., Any]
Table = tuple[int | str, Any, torch.dtype]  # which argument, its numbers as nested tuples, dtype


def without_tables(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, apart_from: Tensor | None = None
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Table, ...]]:
    """The arguments of a call with None for tables of sizes, and the tables. apart_from: is none (a timestep)."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    tables = tuple(
        (key, _tuples(value.tolist()), value.dtype)
        for key, value in named
        if value is not apart_from and _is_table(value)
    )
    found = {key for key, *_ in tables}
    return (
        tuple(None if i in found else value for i, value in enumerate(args)),
        {key: None if key in found else value for key, value in kwargs.items()},
        tables,
    )


class CallWithTables:
    """Calls a model, its tables of sizes built of numbers."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(
        self, tables: Sequence[Table], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        made = {key: torch.tensor(numbers, dtype=dtype) for key, numbers, dtype in tables}
        positional = [made.get(i, value) for i, value in enumerate(args)]
        named = {key: made.get(key, value) for key, value in kwargs.items()}
        return self.call(*positional, **named)


class WithTables:
    """A forward, compiled: once as it is, and once for each table of sizes that it is called with.

    Sizes that depend on the shapes of a call are numbers too, where those shapes are: `static`.
    """

    def __init__(self, forward: Forward, compile: Callable[[Forward], Forward]) -> None:
        self._plain = compile(forward)
        self._with_tables = compile(CallWithTables(forward).__call__)

    def __call__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        apart_from: Tensor | None = None,
        static: bool = False,
    ) -> Any:
        rest, named, tables = without_tables(args, kwargs, apart_from=apart_from)
        if not tables and not static:
            return self._plain(*args, **kwargs)
        shapes: dict[str, Any] = {"automatic_dynamic_shapes": False} if static else {}
        with torch._dynamo.config.patch(specialize_int=True, **shapes):
            return self._with_tables(tables, rest, named)


def call_of(
    model: Any, inputs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A function and its arguments, as which a model of these inputs is compiled: itself, where they hold no table."""
    _, rest, tables = without_tables((), inputs)
    if not tables:
        return model, (), dict(inputs)
    return CallWithTables(model._call_impl).__call__, (tables, (), rest), {}


def _is_table(value: Any) -> bool:
    """Rows of (frames, rows, cols) of some tokens, on the CPU, where reading them waits for nothing."""
    if not isinstance(value, Tensor) or value.device.type != "cpu" or is_fake(value):
        return False
    whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if not whole or value.dim() < 1 or value.shape[-1] != 3 or not 0 < value.numel() <= _NUMBERS:
        return False
    rows = value.reshape(-1, 3).tolist()
    return all(min(row) > 0 and prod(row) <= _TOKENS for row in rows)


def _tuples(numbers: Any) -> Any:
    return tuple(map(_tuples, numbers)) if isinstance(numbers, list) else numbers
