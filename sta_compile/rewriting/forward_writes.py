"""Reads what was just written into memory from the value itself.

    cache[:, :, start:end] = k;  cache[:, :, :end]   ->   torch.cat([cache[:, :, :start], k], 2)

The same elements, and the graph shows that the last ones are the video's keys. The memory is written as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .._torch import is_higher_order
from ..analysis.axes import same_size
from ..analysis.graph_view import GraphView, canonical_name, fake_value, is_inplace, is_tensor
from ..analysis.mask_spans import index_items, sizes_of, written_region
from ..analysis.token_values import storage_of, written_storages
from .fake_values import add_call


def forward_writes(view: GraphView) -> int:
    """Edits the root graph; returns how many reads of memory it replaced."""
    written = written_storages(view)
    nodes = list(view.gm.graph.nodes)
    found = [each for node in nodes if (each := _read_of_a_write(view, node, written)) is not None]
    for read in found:
        _replace(view.gm.graph, read)
    return len(found)


@dataclass(frozen=True)
class _Read:
    """A read of memory along `dim`, whose last part was written before. start: where that begins; whole: it is all."""

    node: Node
    value: Node
    dim: int
    first: Any
    start: Any
    whole: bool


def _read_of_a_write(
    view: GraphView, node: Node, written: Mapping[int, Sequence[Node]]
) -> _Read | None:
    memory = node.args[0] if canonical_name(node) == "getitem" else None
    if not isinstance(memory, Node) or not is_tensor(memory) or not is_tensor(node):
        return None
    position = view.position
    earlier = [w for w in _writes(memory, written) if position[w] < position[node]]
    write = max(earlier, key=position.__getitem__, default=None)
    if write is None or canonical_name(write) != "setitem" or write.args[0] is not memory:
        return None
    read = _last_part(node, write)
    if read is None:
        return None
    users = {user for alias in _aliases(node) for user in alias.users}
    last = max((position[user] for user in users), default=0)
    between = range(position[write] + 1, last + 1)
    changes = [*_writes(memory, written), *_writes(read.value, written)]
    if any(position[change] in between for change in changes):
        return None
    readers = (n for n in view.gm.graph.nodes if position[n] in between)
    hidden = (n for n in readers if n.op == "output" or is_higher_order(n) or is_inplace(n))
    return None if any(_holds(n, memory, users) for n in hidden) else read


def _writes(node: Node, written: Mapping[int, Sequence[Node]]) -> list[Node]:
    writes = [write for storage in storage_of(node) for write in written.get(storage, ())]
    return [write for write in writes if not _apart(write.args[0], node)]


def _holds(node: Node, memory: Node, users: set[Node]) -> bool:
    """Does an operation that may write, or return, take the memory, or what is read of it?"""
    memories = set(storage_of(memory))
    return node in users or any(
        memories & set(storage_of(n)) and not _apart(n, memory) for n in node.all_input_nodes
    )


def _apart(a: Any, b: Node) -> bool:
    """Are two views of one storage different parts of it: the caches of two layers? Inputs may be others in a later call."""
    if not isinstance(a, Node) or "placeholder" in (a.op, b.op):
        return False
    ours, theirs = _extent(a), _extent(b)
    if ours is None or theirs is None:
        return False
    return ours.stop <= theirs.start or theirs.stop <= ours.start


def _aliases(node: Node) -> Iterator[Node]:
    """A read and the views of it."""
    yield node
    for user in node.users:
        if storage_of(user) and set(storage_of(user)) <= set(storage_of(node)):
            yield from _aliases(user)


def _extent(node: Node) -> range | None:
    """The elements of its storage from a tensor's first one to its last; None if sizes are symbols."""
    value = fake_value(node)
    if not is_tensor(node) or value.layout != torch.strided:
        return None
    numbers = [*value.shape, *value.stride(), value.storage_offset()]
    if not all(isinstance(n, int) for n in numbers):
        return None
    steps = zip(value.shape, value.stride(), strict=True)
    start = value.storage_offset()
    return range(start, start + sum((size - 1) * stride for size, stride in steps) + 1)


def _last_part(node: Node, write: Node) -> _Read | None:
    """Where the write covers the end of what is read, along one dimension, and all of the others."""
    memory, index, value = write.args
    sizes = sizes_of(memory)
    regions = [written_region(i, sizes) for i in (node.args[1], index)]
    items = [index_items(i, len(sizes)) for i in (node.args[1], index)]
    if None in regions or not isinstance(value, Node) or not is_tensor(value):
        return None
    read, written = (list(region or ()) for region in regions)
    if not all(kept for _, _, kept in (*read, *written)):
        return None
    differ = [
        dim
        for dim, (a, b) in enumerate(zip(read, written, strict=True))
        if not (same_size(a[0], b[0]) and same_size(a[1], b[1]))
    ]
    lengths = [stop - start for start, stop, _ in written]
    ours, theirs = fake_value(value), fake_value(memory)
    same = (ours.dtype, ours.device) == (theirs.dtype, theirs.device)
    if not same or len(sizes_of(value)) != len(lengths):
        return None
    if not all(map(same_size, sizes_of(value), lengths)) or set(storage_of(value)) & set(
        storage_of(memory)  # type: ignore[arg-type]
    ):
        return None
    if not differ:
        return _Read(node, value, 0, None, None, True)
    (dim, *others) = differ
    if others or not same_size(read[dim][1], written[dim][1]) or not same_size(read[dim][0], 0):
        return None
    first, start = ((each or [])[dim] for each in items)
    return _Read(node, value, dim, first.start, start.start, False)


def _replace(graph: Graph, read: _Read) -> None:
    node, new = read.node, read.value
    if not read.whole:
        index = (*[slice(None)] * read.dim, slice(read.first, read.start))
        with graph.inserting_before(node):
            before = add_call(graph, "call_function", node.target, (node.args[0], index), like=node)
            parts = ([before, read.value], read.dim)
            new = add_call(graph, "call_function", torch.cat, parts, like=node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
