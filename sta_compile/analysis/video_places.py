"""Which axes count places inside a video, frames, rows, columns or pieces of them, and not samples?

An attention whose batch has such an axis sees a part of the video in each of its calls, as in windows of all frames:

    tokens [b, (t3 h4 w6), c] -> view [b, t3, h2 p2, w3 q2, c] -> batch (b h2 w3), tokens (t3 p2 q2)

The two factors of h4 are places, whichever of them is in the batch; and so is what an operation makes of places that it
pads, cuts up or leaves out, as far as nothing shows what else that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

from .axes import Atom, Axis, Dims, atoms_of, resolve
from .folded_axes import FoldedAxes
from .graph_view import canonical_name
from .trace_dims import DimTrace

# What gives places new axes. Products with weights do not: they make features of pixels.
_RESHAPES = (
    "pad", "unfold", "interpolate", "roll", "flip", "getitem", "index_select", "gather", "narrow",
    "view", "reshape", "flatten", "unflatten", "cat",
    "avg_pool2d", "avg_pool3d", "max_pool2d", "max_pool3d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "pixel_shuffle", "pixel_unshuffle",
)  # fmt: skip


def roots_of(axis: Axis) -> Iterator[Atom]:
    """The atoms of an axis, and those of the axes that they are slices of; none that has one position only."""
    for atom in atoms_of(resolve(axis)):
        if atom.size != 1:
            yield atom
        if atom.slice_of is not None:
            yield from roots_of(atom.slice_of[0])


class VideoPlaces:
    """Answers for one graph. latents: axes of its inputs and outputs, batch first. tokens: of its attentions."""

    def __init__(
        self,
        trace: DimTrace,
        folded: FoldedAxes,
        latents: Sequence[Sequence[Axis]],
        tokens: Iterable[Axis],
    ) -> None:
        self._trace = trace
        self._latents = [[set(atoms_of(resolve(axis))) for axis in latent] for latent in latents]
        proved = {atom for whole in folded.wholes for atom in atoms_of(whole)}
        proved |= {a for node in trace.view.nodes for a in trace.atoms(node) if a.origin}
        certain = proved | {atom for axis in tokens for atom in roots_of(axis)}
        inner = {atom for latent in self._latents for axis in latent[1:] for atom in axis}
        self._certain = certain | self._made_of(certain | inner)

    def certainly(self, axis: Axis) -> bool:
        """Does an axis count places, whatever stands beside it? Heads may be part of the channels of a latent."""
        return not self._certain.isdisjoint(roots_of(axis))

    def beside(self, tokens: Set[Atom], features: Set[Atom] = frozenset()) -> set[Atom]:
        """Atoms that count places in what stands beside the tokens of an attention. features: of its heads."""
        samples: set[Atom] = set()
        places: set[Atom] = set()
        for latent in self._latents:
            holding = [axis for axis in latent if not tokens.isdisjoint(axis)]
            complete = len(holding) > 2 or (len(holding) == 1 and len(tokens & holding[0]) > 2)
            # Of a video that the tokens are all of: [b, c, t, h, w], where [3, b, tokens] are positions.
            if complete and len(latent[0]) == 1:
                samples |= latent[0]
            places |= {a for axis in latent[1:] if axis.isdisjoint(features) for a in axis}
        held = {
            atom
            for latent in self._latents
            for axis in latent[1:]
            if not tokens.isdisjoint(axis)
            for atom in axis
        }
        return self._certain | held | (places - samples)

    def _made_of(self, places: Set[Atom]) -> set[Atom]:
        """Axes that operations make of places, of which nothing else is known."""
        trace, found = self._trace, set[Atom]()
        known = {atom for latent in self._latents for axis in latent for atom in axis}
        for node in trace.view.nodes:
            if canonical_name(node) not in _RESHAPES:
                continue
            made = trace.atoms(node) if node in trace.opaque else trace.invented.get(node, set())
            made = {atom for atom in made if atom.bound is None} - known
            sources = [dims for n in trace.view.producers(node) for dims in trace.tensors(n)]
            for dims in trace.tensors(node) if made else ():
                for place, axis in enumerate(dims):
                    new = made.intersection(atoms_of(axis))
                    before = (atom for source in sources for atom in _lost(source, dims, place))
                    if new and any(atom in places or atom in found for atom in before):
                        found |= new
        return found


def _lost(before: Dims, after: Dims, place: int) -> Iterator[Atom]:
    """The atoms of a value that may have become the axis at a place of what was made of it."""
    if len(before) == len(after):
        yield from roots_of(before[place])
        return
    left = {atom for axis in after for atom in atoms_of(axis)}
    yield from (atom for axis in before for atom in roots_of(axis) if atom not in left)
