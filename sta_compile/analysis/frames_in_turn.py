"""Frames of a latent that are embedded one by one and put one behind the other are the tokens of one video.

torch.cat([embed(x[:, :, i]).flatten(2).mT for i in range(t)], 1)         (t h w)
torch.cat([embed(x[:, :, :1]), embed(x[:, :, 1:])], 2)                    (t h w) once it is flattened before
torch.cat([embed(x[:, :, 2]), embed(x[:, :, 0])], 1)                      `trace.shuffled`: nothing is known of their order

Each piece has rows and columns of its own, and would be taken for the video with the others beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch.fx

from .axes import Atom, Axis, Size, atoms_of, axis_size, fresh, resolve, same_size, size_of
from .graph_view import argument, canonical_name, fake_value, is_tensor
from .mask_spans import index_items, position_of
from .trace_dims import DimTrace, shape_of
from .trace_index import SPLIT_DIMS, split_dim

_MOST_STEPS = 200  # from a piece's tokens back to the latent
_VIEWS = (
    "squeeze", "unsqueeze", "contiguous", "clone", "to", "float", "view", "reshape", "flatten", "permute", "transpose",
    "movedim",
)  # fmt: skip
_SPLITS = ("split", "chunk", "tensor_split", "split_with_sizes", *SPLIT_DIMS)


class _Cut(NamedTuple):
    """Positions of a value along a dimension."""

    source: torch.fx.Node
    dim: int
    start: Size
    size: Size


class _Piece(NamedTuple):
    """A part of a latent. conv: what embeds it, if a convolution does."""

    cut: _Cut
    conv: torch.fx.Node | None


def joined_pieces(
    trace: DimTrace, node: torch.fx.Node, tensors: Sequence[torch.fx.Node], axes: Sequence[Axis]
) -> list[Axis]:
    """The axes along which `node` puts tensors one behind the other, pieces of one video as one axis."""
    known = [resolve(axis) for axis in axes]
    if sum(len(axis) > 1 for axis in known) < 2:
        return list(axes)
    pieces = [
        _piece(trace, tensor, axis) if len(axis) > 1 else None
        for tensor, axis in zip(tensors, known, strict=True)
    ]
    out: list[Axis] = []
    for video, group in groupby(range(len(axes)), lambda i: _video(pieces[i])):
        where = list(group)
        own = [piece for i in where if (piece := pieces[i]) is not None]
        whole = None
        if video is not None and len(where) > 1:
            whole = _whole(trace, node, own, [known[i] for i in where])
        out += [axes[i] for i in where] if whole is None else [whole]
    return out


def _video(piece: _Piece | None) -> tuple[Any, ...] | None:
    """What it is a piece of: of which value along which dimension, embedded by which weights."""
    if piece is None:
        return None
    weight = None if piece.conv is None else argument(piece.conv, 1, "weight")
    return piece.cut.source, piece.cut.dim, weight


def _whole(
    trace: DimTrace, node: torch.fx.Node, pieces: Sequence[_Piece], axes: Sequence[Axis]
) -> Axis | None:
    """The axis of all frames that the pieces are; a new one where they are not all frames in turn, and None for videos."""
    source, dim, *_ = pieces[0].cut
    frames = trace.axis(source, dim)
    insides = [_inside(trace, *pair, frames) for pair in zip(pieces, axes, strict=True)]
    known = [inside for inside in insides if inside is not None]
    if any(len(inside) > 2 for inside in known):
        return None
    place: Size = 0
    in_turn = len(known) == len(insides)
    for piece in pieces:
        in_turn &= same_size(piece.cut.start, place)
        place = place + piece.cut.size
    in_turn &= same_size(place, axis_size(frames))
    if not in_turn or not all(trace.relate(node, known[0], other) for other in known[1:]):
        trace.shuffled.add(node)
        return fresh(sum(map(axis_size, axes)))
    inner = resolve(known[0])
    count = sum(map(axis_size, axes)) // axis_size(inner)
    if same_size(count, place):
        return (*frames, *inner)
    origin = next((a.origin for a in inner if isinstance(a, Atom)), "")
    return (*fresh(count, origin=origin), *inner)


def _inside(trace: DimTrace, piece: _Piece, axis: Axis, frames: Axis) -> Axis | None:
    """The rows and columns of each frame of a piece; None where its tokens are not frames of rows and columns."""
    if piece.conv is None:
        return axis
    spatial = (trace.dims(piece.conv) or ())[2:]
    inside = tuple(factor for each in spatial[-2:] for factor in each)
    outside = axis[: len(axis) - len(inside)]
    if (*outside, *inside) != axis:
        return None
    if len(spatial) < 3:
        return inside if _is_cut_of(outside, frames) else None
    given = trace.dims(argument(piece.conv, 0, "input"))
    whole = given is not None and _is_cut_of(given[2], frames)
    return inside if whole and outside == spatial[0] else None


def _is_cut_of(axis: Axis, frames: Axis) -> bool:
    """Is an axis a slice of another one, or of one position?"""
    if not axis:
        return True
    sliced = axis[0].slice_of if len(axis) == 1 and isinstance(axis[0], Atom) else None
    return sliced is not None and resolve(sliced[0]) == frames


def _piece(trace: DimTrace, tensor: torch.fx.Node, axis: Axis) -> _Piece | None:
    """The part of a latent that tokens are made of; None if they are made of several, or of a whole one."""
    atoms, found = set(atoms_of(axis)), set()
    seen, stack = {tensor}, [tensor]
    while stack and len(seen) < _MOST_STEPS:
        value = stack.pop()
        made = (trace.dims(value) or ())[2:] if canonical_name(value).startswith("conv") else ()
        embeds = any(atom.origin for each in made for atom in atoms_of(each))
        cut = _cut(_before_views(argument(value, 0, "input") if embeds else value))
        if cut is not None and (embeds or same_size(cut.size, 1)):
            found.add(_Piece(cut, value if embeds else None))
        else:
            carriers = (n for n in trace.view.producers(value) if atoms <= trace.atoms(n))
            new = [n for n in carriers if n not in seen]
            seen.update(new)
            stack += new
    return found.pop() if len(found) == 1 and not stack else None


def _before_views(node: Any) -> Any:
    """The value before views of all of it, such as a frame of one frame."""
    while isinstance(node, torch.fx.Node):
        cut = _cut(node)
        all_of = cut is not None and same_size(shape_of(cut.source)[cut.dim], cut.size)
        if not all_of and canonical_name(node) not in _VIEWS:
            break
        node = argument(node, 0, "input")
    return node


def _cut(node: Any) -> _Cut | None:
    """What a slice, a position or a piece of a split is of its source; None for anything else."""
    if not isinstance(node, torch.fx.Node):
        return None
    name, source = canonical_name(node), argument(node, 0, "input")
    if name in ("narrow", "select") and is_tensor(source):
        dim = argument(node, 1, "dim") % fake_value(source).dim()
        start = argument(node, 2, "start" if name == "narrow" else "index")
        size: Size = size_of(fake_value(argument(node, 3, "length"))) if name == "narrow" else 1
        return _Cut(source, dim, position_of(start, shape_of(source)[dim]), size)
    if name != "getitem":
        return None
    if is_tensor(source):
        return _indexed(source, node.args[1])
    made, index = canonical_name(source), node.args[1]
    whole = argument(source, 0, "input")
    if not isinstance(index, int) or not is_tensor(whole):
        return None
    if made == "unbind":
        dim = argument(source, 1, "dim", 0) % fake_value(whole).dim()
        return _Cut(whole, dim, index % len(fake_value(source)), 1)
    if made not in _SPLITS:
        return None
    dim = split_dim(source)
    sizes = [size_of(piece.shape[dim]) for piece in fake_value(source)]
    index %= len(sizes)
    start = 0
    for size in sizes[:index]:
        start = start + size
    return _Cut(whole, dim, start, sizes[index])


def _indexed(source: torch.fx.Node, index: Any) -> _Cut | None:
    sizes = shape_of(source)
    items = index_items(index, len(sizes))
    items = None if items is None else [item for item in items if item is not None]
    cuts = [d for d, item in enumerate(items or ()) if item != slice(None)]
    if items is None or len(cuts) != 1:
        return None
    (dim,) = cuts
    item = items[dim]
    if not isinstance(item, slice):
        return _Cut(source, dim, position_of(item, sizes[dim]), 1)
    start = 0 if item.start is None else position_of(item.start, sizes[dim])
    stop = sizes[dim] if item.stop is None else position_of(item.stop, sizes[dim])
    return _Cut(source, dim, start, stop - start)
