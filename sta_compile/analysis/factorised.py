"""Does an attention take the video in parts: within each frame, along time at each place, row by row?

Latte puts the frames of [batch, frames, rows * cols, channels] into the batch axis; others put them beside the heads, or
write a loop over `y.unbind(1)`. The tokens of one such call are a grid of rows and columns, and still no image:

    conv3d [b, c, t3, h4, w5] -> tokens [b, t3, (h4 w5), c] -> y[:, 0] [b, (h4 w5), c]      one of three frames
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch.fx

from .attention_site import AttentionSite, Problem
from .axes import Atom, Axis, Dims, atoms_of, resolve, segments_of
from .folded_axes import FoldedAxes
from .graph_view import argument, canonical_name, is_tensor
from .mask_spans import index_items
from .token_streams import TokenStreams, passed_on
from .video_places import VideoPlaces, roots_of

_SHORT = "nothing to do: such attention is short already"
_IN_BATCH = Problem("factorised attention: frames or positions are in the batch axis", _SHORT)
ELSEWHERE = Problem(
    "factorised attention: frames or positions may be in its batch axis, as other graphs of the model show",
    _SHORT,
)
_IN_HEADS = Problem("factorised attention: frames or positions are in the axis of heads", _SHORT)
_ONE_BY_ONE = Problem(
    "factorised attention: its tokens are a part of the video's, as one of its frames is", _SHORT
)
IN_PIECES = Problem(
    "its sequence is put together of pieces of the video, which nothing shows to be all of it in its order",
    "keep the video's tokens in one tensor: reshape it instead of putting frames together by torch.cat",
)
_CUTS = ("getitem", "select", "narrow")
_PIECES = ("split", "chunk", "tensor_split", "split_with_sizes")


class Factorisation:
    """Answers for the attention sites of one graph. latents: axes of its inputs and outputs, batch first."""

    def __init__(
        self,
        streams: TokenStreams,
        folded: FoldedAxes,
        latents: Sequence[Sequence[Axis]],
        tokens: Iterable[Axis],
    ) -> None:
        self.streams, self.trace, self._folded = streams, streams.trace, folded
        self._latents = latents
        self._places = VideoPlaces(self.trace, folded, latents, tokens)
        self._parts: dict[Axis, set[torch.fx.Node]] = {}
        self._embedded: set[torch.fx.Node] | None = None

    def problem(self, site: AttentionSite, tokens: Axis, parts: Sequence[Axis]) -> Problem | None:
        """Why a site is factorised. tokens: those that ask, in one sample; parts: of them, those that are the video's."""
        order, dims = site.q_order, self.trace.dims(site.q) or ()
        others = (order.heads, order.tokens, order.features)
        batch = [axis for d, axis in enumerate(dims) if d not in others]
        if order.packed:  # the samples stand in the dimension of the tokens
            whole = dims[order.tokens]
            batch.append(whole[: len(whole) - len(resolve(tokens))])
        atoms = {atom for part in parts for atom in atoms_of(resolve(part))}
        features = self._features(site)
        places = self._places.beside(atoms, features)
        if any(not places.isdisjoint(roots_of(axis)) for axis in batch):
            return _IN_BATCH
        heads = () if order.heads is None else dims[order.heads]
        folded = [self._folded.of(part) for part in parts]
        if self._places.certainly(heads) or self._cut_up(heads, atoms):
            return _IN_HEADS
        if any(self._are_frames(heads, part, features) for part in folded):
            return _IN_HEADS
        taken = sum(site.q in self._taken_from_video(part) for part in folded)
        return (None, _ONE_BY_ONE, IN_PIECES)[min(taken, 2)]

    def _features(self, site: AttentionSite) -> set[Atom]:
        """Factors of the channels of one head."""
        known = [(self.trace.dims(node), order.features) for node, order in site.operands]
        return {atom for dims, d in known if dims is not None for atom in atoms_of(dims[d])}

    def _cut_up(self, axis: Axis, tokens: set[Atom]) -> bool:
        """Is an axis of some latent cut into a factor of this axis, and one of the tokens?"""
        atoms = set(atoms_of(axis))
        both = (set(atoms_of(resolve(own))) for latent in self._latents for own in latent)
        return any(not atoms.isdisjoint(own) and not tokens.isdisjoint(own) for own in both)

    def parts_of(self, dims: Dims) -> Iterator[Axis]:
        """Tokens of a tensor, batch first, that are in each sample a part of a video. Its last axis may hold channels."""
        for inner in (dims[1:-1], dims[1:] if len(dims) > 3 else ()):
            places = self._places.beside({atom for axis in inner for atom in atoms_of(axis)})
            if dims and not places.isdisjoint(roots_of(dims[0])):
                held = [axis for axis in inner if not places.isdisjoint(roots_of(axis))]
                whole = tuple(factor for axis in held for factor in axis)
                found = (whole, *(segments_of(whole) if len(held) == 1 else ()))
                # Of one factor nothing shows that it is all of the tokens: [layers, b, tokens, c] has b inside as well.
                sure = self._places.certainly(dims[0])
                yield from (part for part in found if sure or sum(1 for _ in atoms_of(part)) > 1)

    def _are_frames(self, axis: Axis, part: Axis, features: Collection[Atom] = ()) -> bool:
        """Is a factor of an axis one of the video's, of which a part of the tokens has the others?

        Three are asked for: [batch, tokens, channels] has two. features: the channels of heads, which are no frames.
        """
        atoms = {atom for atom in atoms_of(self._folded.of(axis)) if atom not in part}
        around = map(set, self._around(part, features))
        return any(atom.origin for atom in atoms) or any(
            atoms & own and len(atoms & own) + len(part) > 2 for own in around
        )

    def _around(self, part: Axis, features: Collection[Atom]) -> Iterator[list[Atom]]:
        """The axes of each latent that has the factors of a part of the tokens in dimensions of their own, but for one of
        channels: those of a latent without a patch embed are heads, and features of each."""
        for axes in self._latents:
            known = [
                axis for axis in map(resolve, axes[1:]) if set(atoms_of(axis)).isdisjoint(features)
            ]
            outer = [axis[0] for axis in known if axis and isinstance(axis[0], Atom)]
            if part and all(factor in outer for factor in part):
                yield outer

    def _taken_from_video(self, part: Axis) -> set[torch.fx.Node]:
        """Values with a part of tokens that an operation takes out of the video's, and what is made of them."""
        if part in self._parts:
            return self._parts[part]
        if self._embedded is None:
            self._embedded = self.streams.embedded()
        found: set[torch.fx.Node] = set()
        atoms = set(atoms_of(resolve(part)))
        view = self.trace.view
        for node in view.nodes:
            picked = view.picks(node)
            sources = [picked] if picked is not None else view.producers(node)
            comes = bool(found) and not found.isdisjoint(passed_on(node, sources))
            # A part of a latent is the video of what it is embedded for: frames are cropped, or follow a history.
            cuts = canonical_name(node) in _CUTS and not self._embedded.isdisjoint(sources)
            takes = cuts and self._takes(node, part, atoms)
            if (comes or takes) and self.streams.holds(node, part):
                found.add(node)
        self._parts[part] = found
        return found

    def _takes(self, node: torch.fx.Node, part: Axis, atoms: set[Atom]) -> bool:
        """Does a node leave out frames, rows or columns of the video whose tokens it has a part of?"""
        cuts = list(self._cuts(node))
        cut_from = {after: before for before, after in cuts}
        for before, after in cuts:
            if not after:  # of several videos, one is all of it
                if len(part) < 3 and self._are_frames(before, part):
                    return True
                continue
            left = set(atoms_of(after))
            whole = segments_of(before)
            if atoms.isdisjoint(left) or all(piece in whole for piece in segments_of(after)):
                continue
            others = (f for f in map(resolve, ((f,) for f in part)) if left.isdisjoint(atoms_of(f)))
            rest = tuple(factor for other in others for factor in cut_from.get(other, other))
            if any(self._is_video(piece, rest) for piece in whole):
                return True
        return False

    def _is_video(self, piece: Axis, rest: Axis) -> bool:
        """Is an axis proved, or one of several axes of one latent? rest: the others that tokens have."""
        if any(atom.origin for atom in atoms_of(self._folded.of(piece))):
            return True
        atoms = set(atoms_of(resolve((*piece, *rest))))
        own = ({a for axis in axes[1:] for a in atoms_of(resolve(axis))} for axes in self._latents)
        return len(resolve((*piece, *rest))) > 1 and any(atoms <= others for others in own)

    def _cuts(self, node: torch.fx.Node) -> Iterator[tuple[Axis, Axis]]:
        """Of each dimension that a node reads by numbers: its axis, and what is left of that, () for one position."""
        name, source = canonical_name(node), node.args[0] if node.args else None
        dims = self.trace.dims(node)
        if dims is None or not isinstance(source, torch.fx.Node):
            return
        if name == "getitem" and not is_tensor(source):
            name, source = canonical_name(source), argument(source, 0, "input")
            if name not in (*_PIECES, "unbind"):
                return
            at = argument(node.args[0], 1 if name == "unbind" else 2, "dim", 0)  # type: ignore[arg-type]
        else:
            at = argument(node, 1, "dim")
        whole = self.trace.dims(source)
        if whole is None:
            return
        if name in ("unbind", "select"):
            yield whole[at], ()
        elif name in (*_PIECES, "narrow"):
            yield whole[at], dims[at]
        elif name == "getitem":
            left = iter(dims)
            items = index_items(_without_steps(node.args[1]), len(whole))
            axes = iter(whole)
            for item in items or ():
                if item is None:
                    next(left)
                elif isinstance(item, slice):
                    yield next(axes), next(left)
                else:
                    yield next(axes), ()


def _without_steps(index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    return tuple(slice(i.start, i.stop) if isinstance(i, slice) else i for i in items)
