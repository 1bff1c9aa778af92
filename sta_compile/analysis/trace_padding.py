"""Axes of values that are filled up: `F.pad`, and samples of several lengths as one batch."""

from __future__ import annotations

import torch.fx

from .axes import Axis, Size, axis_size, fresh, same_size, segments_of, size_of
from .graph_view import argument, fake_value
from .joined_axes import concat, filled
from .trace_dims import DimTrace, Traced, operand, shape_of


def pad_sequence(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    """Samples with their tokens first become one batch, each filled up behind: what all of them begin with stays whole."""
    known = [trace.dims(t) for t in argument(node, 0, "sequences")]
    samples = [dims for dims in known if dims is not None]
    if len(samples) < len(known) or argument(node, 3, "padding_side", "right") != "right":
        return None
    at = 1 if argument(node, 1, "batch_first", False) else 0
    rest = list(samples[0][1:])
    for dims in samples[1:]:
        for axis, other in zip(rest, dims[1:], strict=True):
            trace.relate(node, axis, other)
    common: list[Axis] = []
    for parts in zip(*(segments_of(dims[0]) for dims in samples), strict=False):
        sizes = [axis_size(part) for part in parts]
        if not all(same_size(size, sizes[0]) for size in sizes):
            break
        if not all(trace.relate(node, parts[0], other) for other in parts[1:]):
            return None
        common.append(parts[0])
    left = shape_of(node)[at] - sum(map(axis_size, common))
    tokens = concat([*common, *([] if same_size(left, 0) else [fresh(left)])])
    batch = fresh(len(samples))
    return (batch, tokens, *rest) if at else (tokens, batch, *rest)


def pad(trace: DimTrace, node: torch.fx.Node) -> Traced | None:
    dims, amounts = operand(trace, node), argument(node, 1, "pad")
    if dims is None or argument(node, 2, "mode", "constant") != "constant":
        return None
    out = list(dims)
    shape = shape_of(node)
    for i in range(len(amounts) // 2):
        before, after = (size_of(fake_value(a)) for a in amounts[2 * i : 2 * i + 2])
        if _adds(before) and _adds(after):
            parts = [fresh(before)] if before != 0 else []
            parts += [out[-1 - i]]
            parts += [fresh(after)] if after != 0 else []
            out[-1 - i] = filled(out[-1 - i], before, after) or concat(parts)
        elif before == 0 and not isinstance(after, int):
            out[-1 - i] = _end_moved(out[-1 - i], shape[-1 - i])
        else:
            return None
    return tuple(out)


def _adds(amount: Size) -> bool:
    """Is it known to crop nothing? -tokens % 8 is, as an expression."""
    return amount >= 0 if isinstance(amount, int) else bool(amount.is_nonnegative)


def _end_moved(axis: Axis, size: Size) -> Axis:
    """An axis padded or cropped at its end by an unknown amount: its first segment is whole if it fits."""
    first, *rest = segments_of(axis)
    length = axis_size(first)
    if rest and isinstance(length, int) and isinstance(size, int) and length < size:
        return concat([first, fresh(size - length)])
    return fresh(size)
