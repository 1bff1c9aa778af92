"""Grids that nothing in the graph shows, read from the values of its inputs: ids, coordinates, rope tables.

FLUX and LTX get their tokens packed, [batch, tokens, channels], beside a tensor of positions. While compiling the example
inputs have values, so the grid can be read there. It is stated of the token axes of all inputs, and the graph is traced
again: everything downstream is then as if it were proved. Values are guarded only where that costs little, so whatever
becomes sparse by a hint needs a check on the device, which makes a call dense whose positions are others
(`position_values.matches_grid`).

    img_ids [4096, 3], values (0, 0, 0) (0, 0, 1) ... (0, 63, 63)     ->  its token axis is (64, 64)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from .. import _torch
from .._sizes import simplified
from .attention_site import AttentionSite
from .axes import Atom, Axis, Dims, axis_size, fresh, segments_of, size_of
from .find_timestep import readable_name
from .graph_view import fake_value, is_parameter
from .hints import DECLARE, Doubt, Hint, Hints
from .infer_grid import GridInference
from .joined_axes import concat
from .position_values import (
    Block,
    Rows,
    Triple,
    block_in,
    find_positions,
    may_be_ids,
    may_hold_positions,
)
from .told_axes import ToldAxes
from .trace_dims import DimTrace, trace_dims

_NOTHING_TOLD = ToldAxes()


def infer_grids(
    trace: DimTrace,
    sites: Sequence[AttentionSite],
    declared: Triple | None,
    example_inputs: Sequence[Any],
    told: ToldAxes = _NOTHING_TOLD,
) -> tuple[DimTrace, GridInference]:
    """Trace and grids of a graph, with what the values of its inputs say where the graph and the options say nothing.

    example_inputs: in the order of the graph's placeholders; those that are fake or on meta have no values to read.
    told: as for GridInference; the trace has the dims.
    """
    inference = GridInference(trace, declared, told=told, sites=sites)
    unknown = dict.fromkeys(p for site in sites for p in _unknown_parts(inference, site))
    reader = _Reader(trace, example_inputs, told)
    for part in unknown:
        reader.read(part)
    hints = Hints(reader.by_atom, tuple(reader.doubts), reader.known_values(), reader.empty)
    if reader.known:
        trace = trace_dims(trace.view, reader.restated())
    return trace, GridInference(trace, declared, hints, told, sites)


def _unknown_parts(inference: GridInference, site: AttentionSite) -> list[Axis]:
    """The segments of a site's queries, if none of them is a grid."""
    axis = None if site.opaque else inference.token_axis(site, site.q, site.q_order)
    if axis is None:
        return []
    parts = segments_of(axis)
    known = any(inference.grids.grid_of(part) is not None for part in parts)
    return [] if known else [whole for part in parts for whole in _sliced_from(part) if whole]


def _sliced_from(part: Axis) -> tuple[Axis, ...]:
    """The segments of the axis that a segment is a slice of: [text, video] of which the video is cut off by a number."""
    while len(part) == 1 and isinstance(part[0], Atom) and part[0].slice_of is not None:
        parts = segments_of(part[0].slice_of[0])
        if len(parts) > 1:
            return parts
        part = parts[0]
    return (part,)


@dataclass(frozen=True, eq=False)
class _Source:
    """An input that has an unexplained token axis as a segment of its dimension `dim`."""

    node: torch.fx.Node
    value: Any
    dim: int
    segment: int

    @property
    def name(self) -> str:
        return readable_name(self.node)

    @property
    def columns(self) -> int:
        return int(self.value.numel()) // max(1, int(self.value.shape[self.dim]))


class _Reader:
    """Reads the inputs of one graph.

    known: token axes as the first trace has them, and what they are made of.
    """

    def __init__(self, trace: DimTrace, example_inputs: Sequence[Any], told: ToldAxes) -> None:
        self.trace, self.told = trace, told.dims
        self.env = _torch.shape_env_of(trace.view.gm)
        inputs = [n for n in trace.view.gm.graph.nodes if n.op == "placeholder"]
        self.inputs = [n for n in inputs if trace.dims(n) is not None and not is_parameter(n)]
        self.values = dict(zip(inputs, example_inputs, strict=False))
        self.known: dict[Axis, Axis] = {}
        self.by_atom: dict[Atom, Hint] = {}
        self.doubts: list[Doubt] = []
        self.empty: dict[torch.fx.Node, Rows] = {}

    def known_values(self) -> dict[torch.fx.Node, Any]:
        """Of the inputs that are numbers, or tensors with values."""
        return {
            node: value
            for node, value in self.values.items()
            if _has_values(value) or isinstance(value, (int, float))
        }

    def read(self, part: Axis) -> None:
        """Takes the grid of a token axis from the inputs that have it, or notes why not."""
        sources = sorted(self._sources(part), key=lambda source: source.columns)
        blind = [source for source in sources if not _has_values(source.value)]
        found = [(s, block) for s in sources if (block := self._block(s)) is not None]
        if not found:
            for source in sources:
                rows, value, dim = self._rows(source), source.value, source.dim
                if rows is not None and (may_be_ids(value, dim) or may_hold_positions(value, dim)):
                    self.empty[source.node] = rows
            for source in blind[:1]:
                self._doubt(
                    source,
                    "nothing in this graph gives its frames, rows and columns, and the inputs, whose values "
                    f"might ({source.name}, for example), have none here",
                    f"use tensors that are neither fake nor on meta, or {DECLARE}",
                )
            return
        source, block = found[0]
        start = self._start(source)
        for other, second in found[1:]:
            mine, others = (b.offset - s for b, s in ((block, start), (second, self._start(other))))
            if (mine, block.grid) != (others, second.grid):
                self._doubt(
                    source,
                    f"the values of inputs {source.name} and {other.name} say different grids, "
                    f"{_text(block.grid)} and {_text(second.grid)}",
                    f"give them the positions of one grid, or {DECLARE}",
                )
                return
        self._take(part, source, block, block.offset - start)

    def _take(self, part: Axis, source: _Source, block: Block, offset: int) -> None:
        if block.doubtful:
            self._doubt(
                source,
                f"input {source.name} has the positions of {_text(block.grid)} tokens, which by their numbers may be "
                "frames of a video, or an image and its references",
                f"if they are a video, {DECLARE}",
            )
            return
        positions = find_positions(source.value, source.dim, block)
        if positions is None:
            return
        axis = self.trace.axis(source.node, source.dim)
        sizes = [axis_size(segment) for segment in segments_of(axis)[: source.segment + 1]]
        symbolic = [size for size in sizes if not isinstance(size, int)]
        if symbolic and (
            _torch.last_compile_of_frame()
            or any(_torch.must_stay_dynamic(size, self.env) for size in symbolic)
        ):
            self._doubt(
                source,
                f"input {source.name} has the values of {_text(block.grid)}, but the number of tokens stays symbolic",
                "don't mark it dynamic, so that each number of tokens has a graph of its own",
            )
            return
        for size in symbolic:
            _torch.specialise(size, self.env)
        hint = Hint(source.node, source.name, positions)
        factors = tuple(Atom(n, origin=hint.evidence) for n in block.grid if n > 1)
        self.by_atom.update(dict.fromkeys(factors, hint))
        total = simplified(sizes[-1], self.env)
        before, after = offset, total - offset - block.tokens
        parts = [fresh(before)] if before else []
        parts += [factors]
        parts += [fresh(after)] if after else []
        self.known[part] = concat(parts)

    def restated(self) -> dict[torch.fx.Node, Dims]:
        """Axes of the inputs that have a token axis which is known now, or was told."""
        read = {node: dims for node in self.inputs if (dims := self._restated(node)) is not None}
        return {**read, **self.told}

    def _restated(self, node: torch.fx.Node) -> Dims | None:
        old, shape = self.trace.dims(node), fake_value(node).shape
        assert old is not None
        if not any(part in self.known for axis in old for part in segments_of(axis)):
            return None
        out: list[Axis] = []
        for axis, size in zip(old, shape, strict=True):
            parts = segments_of(axis)
            if not any(part in self.known for part in parts):
                out.append(fresh(size_of(size)))
                continue
            for part in parts:
                if part not in self.known:
                    self.known[part] = fresh(simplified(axis_size(part), self.env))
            out.append(concat([self.known[part] for part in parts]))
        return tuple(out)

    def _sources(self, part: Axis) -> Iterator[_Source]:
        for node in self.inputs:
            value = self.values.get(node)
            if not isinstance(value, torch.Tensor):
                continue
            for dim, axis in enumerate(self.trace.dims(node) or ()):
                for index, segment in enumerate(segments_of(axis)):
                    if segment == part:
                        yield _Source(node, value, dim, index)

    def _block(self, source: _Source) -> Block | None:
        """The grid in a source's rows, counted from the first row of the tensor."""
        rows = self._rows(source)
        return None if rows is None else block_in(source.value, rows)

    def _rows(self, source: _Source) -> Rows | None:
        start, stop = self._start(source), self._start(source, source.segment + 1)
        value, dim = source.value, source.dim
        known = _has_values(value) and 0 <= start < stop <= value.shape[dim]
        return Rows(dim, start, stop) if known else None

    def _start(self, source: _Source, segment: int | None = None) -> int:
        """Where a segment begins, for the example inputs; -1 where that depends on data."""
        parts = segments_of(self.trace.axis(source.node, source.dim))
        parts = parts[: source.segment if segment is None else segment]
        sizes = [_torch.known_value(axis_size(part), self.env) for part in parts]
        return -1 if None in sizes else sum(size for size in sizes if size is not None)

    def _doubt(self, source: _Source, reason: str, hint: str) -> None:
        self.doubts.append(Doubt(source.node, source.dim, reason, hint))


def _has_values(value: Any) -> bool:
    """Is a tensor neither fake nor on meta, nor a wrapper that may hold its numbers in another form?"""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta


def _text(grid: Triple) -> str:
    return "x".join(map(str, grid))
