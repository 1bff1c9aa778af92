"""Do the tokens of an attention stand where the video has them, or were they rolled, flipped or picked in another order?

What an operation moves (see `reorderings`) is followed forward through the graph as long as it is not moved back:

    y [b, t3, h4, w5, c] -> roll(1, 2) -> attention        moved: place 0 of the rows is the video's last row
    ... -> roll(-1, 2) -> attention                        back in its place

The sum of values that were moved and of values that were not has the places of the latter: `x + x.roll(1, 1)`. So have
channels of which some were moved, as by a temporal shift, once a product mixes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch.fx

from .attention_site import AttentionSite, Problem
from .axes import Atom, Axis, atoms_of, resolve, same_size
from .graph_view import argument, canonical_name, fake_value, is_inplace, is_parameter, is_tensor
from .joins import joined_dim
from .known_operators import may_move
from .matrix_products import letters_of
from .orders import Named, Turned, both, in_place
from .reorderings import Move, Reordering, Reorderings
from .token_parts import TokenParts
from .token_streams import MIXING, passed_on
from .token_values import CONSTANT, storage_of
from .trace_index import is_index

MOVED = Problem(
    "its tokens are rolled, flipped or picked, or went through an operator that may have moved them: nothing shows them in "
    "the video's order",
    "attend to them in the order of the video; shifted windows are local already",
)
# Their result has the places of those operands that were not moved.
_SUMS = ("add", "sub", "rsub", "addcmul", "addcdiv", "lerp")
_TOKEN_RANK = 2  # of inputs with tokens or latents, [tokens, channels] at least

Moves = tuple[Move, ...]


class Beside(NamedTuple):
    """Along these atoms, channels or samples, stand tokens beside others that were moved along `moved`."""

    along: frozenset[Atom]
    moved: frozenset[Atom]


class Way(NamedTuple):
    """What was done to the tokens of an input of the graph on their way to a value.

    embedded: did they pass a product with weights? Tokens do, tables of positions don't.
    beside: where tokens stand that were moved otherwise. held: axes of the input along which the value has places.
    """

    moves: Moves = ()
    embedded: bool = False
    beside: frozenset[Beside] = frozenset()
    held: frozenset[Atom] = frozenset()


State = Mapping[torch.fx.Node, Way]  # by input of the graph
NOTHING: State = {}


class MovedTokens:
    """Answers for the attention sites of one graph."""

    def __init__(self, parts: TokenParts) -> None:
        self._parts, self.trace, self.view = parts, parts.trace, parts.trace.view
        self._states: dict[torch.fx.Node, State] = {}
        self._reorderings: Reorderings | None = None
        self._learned: set[torch.fx.Node] = set()
        self._in_memory: defaultdict[int, list[torch.fx.Node]] = defaultdict(list)
        self._unknown: set[torch.fx.Node] = set()  # operators that may have moved tokens

    def moved(
        self,
        node: torch.fx.Node,
        part: Axis,
        *,
        picked: bool,
        projected: bool = False,
        declared: bool = False,
    ) -> bool:
        """Are the tokens of a part of a value in other places than the video's?

        picked: count picks by an index, too. projected: what reads the value mixes its channels first. declared: somebody
        says that they are at their places, which operators that nothing describes leave them at then.
        """
        if self._reorderings is None:
            self._reorderings = Reorderings(self._parts)
            self._learned = self._weights()
            for _ in range(1 + bool(self.view.calls)):
                self._follow()  # twice: a body's inputs have states of later calls
        along, state = self._names.atoms(part), self._of(node)
        tokens = {source: way for source, way in state.items() if way.embedded or projected}
        ways = (tokens or state).items()
        # A product that sums over the tokens, as one with a permutation's matrix does, leaves no places.
        if not state:
            return any(self._of(n) for n in self.view.backwards(node))
        placed = any(
            along.isdisjoint(self._of(source)[source].held - way.held) for source, way in ways
        )
        believed = self._unknown if declared else ()
        return not placed or any(
            _counts(way, along, picked, projected, believed) for _, way in ways
        )

    def operands(
        self, site: AttentionSite, part: Axis, *, picked: bool = True, declared: bool = False
    ) -> list[bool]:
        """Are they in q, in k, in v?"""
        own = site.projections is not None
        return [
            self.moved(n, part, picked=picked, projected=own, declared=declared)
            for n, _ in site.operands
        ]

    def _follow(self) -> None:
        for node in self.view.nodes:
            written = canonical_name(node) == "setitem"
            state = self._after_setitem(node) if written else self._state(node)
            if is_inplace(node):
                self._write(node, state)
            self._states[node] = state

    def _state(self, node: torch.fx.Node) -> State:
        reordering = self._found.get(node)
        if self.view.is_root_input(node):
            value = fake_value(node)
            tokens = is_tensor(node) and value.is_floating_point() and value.dim() >= _TOKEN_RANK
            held = self._names.atoms_of_value(node)
            return {node: Way(held=held)} if tokens and not is_parameter(node) else {}
        if reordering is not None:
            return self._moved_by(node, reordering)
        name, picked = canonical_name(node), self.view.picks(node)
        if name in CONSTANT or name.endswith("_like"):
            return {}
        sources = [picked] if picked is not None else self.view.producers(node)
        if name == "copy":
            sources = sources[1:]
        elif name == "to" or name.endswith("_as"):  # the other gives a type, or sizes
            sources = sources[:1]
        read = passed_on(node, sources) or sources
        dim = joined_dim(node)
        across = () if dim is None else self._axis(node, dim)
        state = self._merged(node, read, sums=name in _SUMS, across=across)
        unknown = node in self.trace.opaque and node not in self._names.in_place
        if state and unknown and may_move(node):
            self._unknown.add(node)
            held = _union(map(self._names.atoms_of_value, (node, *read)))
            move = Move(held, Named(node), 0)
            state = {n: way._replace(moves=_after(way.moves, move)) for n, way in state.items()}
        return self._reduced(node, read, state) if state else state

    @property
    def _names(self) -> Reorderings:
        assert self._reorderings is not None
        return self._reorderings

    @property
    def _found(self) -> Mapping[torch.fx.Node, Reordering]:
        return self._names.found

    def _of(self, node: torch.fx.Node) -> State:
        return self._states.get(node, {})

    def _axis(self, node: torch.fx.Node, dim: int) -> Axis:
        dims = self.trace.dims(node)
        return dims[dim] if dims is not None else ()

    def _moved_by(self, node: torch.fx.Node, reordering: Reordering) -> State:
        state = self._merged(node, reordering.sources)
        for move in reordering.moves:
            state = {n: way._replace(moves=_after(way.moves, move)) for n, way in state.items()}
        if reordering.onto is None:
            return state
        return self._merged(node, [reordering.onto], more=state, sums=True)

    def _merged(
        self,
        node: torch.fx.Node,
        operands: Iterable[torch.fx.Node],
        *,
        more: State = NOTHING,
        sums: bool = False,
        across: Axis = (),
    ) -> State:
        """Of a value that is made of others. more: what it is made of beside them. sums: by adding them. across: by putting
        them side by side along an axis."""
        found: dict[torch.fx.Node, list[tuple[torch.fx.Node | None, Way]]] = {}
        for value, state in [*((n, self._of(n)) for n in operands), (None, more)]:
            for source, way in state.items():
                found.setdefault(source, []).append((value, way))
        return {source: self._one(node, ways, sums, across) for source, ways in found.items()}

    def _one(
        self,
        node: torch.fx.Node,
        ways: Sequence[tuple[torch.fx.Node | None, Way]],
        sums: bool,
        across: Axis,
    ) -> Way:
        """Of several ways to a value."""
        moved = _union(move.axis for _, way in ways for move in way.moves)
        # A mean of tokens, or a scale for all of them, has no places.
        kinds = {way.moves for value, way in ways if way.moves or self._has_places(value, moved)}
        one = Way(
            embedded=any(way.embedded for _, way in ways),
            beside=frozenset(each for _, way in ways for each in way.beside),
            held=_union(way.held for _, way in ways),
        )
        if len(kinds) == 1:
            return one._replace(moves=kinds.pop())
        if () in kinds and sums and self._stays(ways):
            return one
        if () in kinds and across and moved.isdisjoint(self._names.atoms(across)):
            side_by_side = Beside(frozenset(atoms_of(resolve(across))), moved)
            return one._replace(beside=one.beside | {side_by_side})
        return one._replace(moves=(Move(moved, Named(node), 0),))

    def _stays(self, ways: Sequence[tuple[torch.fx.Node | None, Way]]) -> bool:
        """Has a value that was not moved places along all axes along which those have that were?"""
        needed = _union(way.held for _, way in ways if way.moves)
        return any(needed <= way.held for _, way in ways if not way.moves)

    def _has_places(self, value: torch.fx.Node | None, axes: frozenset[Atom]) -> bool:
        if value is None or not axes:
            return True
        return not axes.isdisjoint(self._names.atoms_of_value(value))

    def _reduced(self, node: torch.fx.Node, read: Sequence[torch.fx.Node], state: State) -> State:
        """What an operation leaves of moves whose axes it sums over, and of channels that it mixes."""
        name = canonical_name(node)
        product, sums = name in MIXING, not passed_on(node, list(read))
        if (node in self.trace.opaque and name != "einsum") or not (product or sums):
            return state
        given = _union(self.trace.atoms(n) for n in read)
        lost = given - self.trace.atoms(node)
        if name.startswith("conv"):  # it makes all its axes
            lost = frozenset(atoms_of(self._axis(read[0], 1)))
        held, summed = self._names.atoms_of_value(node), self._summed(node, read)
        left = {}
        for source, way in state.items():
            moves = tuple(move for move in way.moves if product or move.axis & held)
            if product and not way.embedded:
                frames = self._frames_of(node)
                moves = tuple(move for move in moves if not _begins_elsewhere(move, frames))
            beside = frozenset(each for each in way.beside if not each.along & lost)
            left[source] = Way(moves, way.embedded or product, beside, way.held - summed)
        if not product:
            return left
        # Tables of positions end here: values that were not embedded, beside tokens that were and have all their places.
        tokens = [left[source].held for source, way in state.items() if way.embedded]
        return {
            source: way
            for source, way in left.items()
            if state[source].embedded or not any(way.held <= places for places in tokens)
        }

    def _summed(self, node: torch.fx.Node, read: Sequence[torch.fx.Node]) -> frozenset[Atom]:
        """The axes that a product sums over, or that a sum leaves out; none where learned weights mix tokens."""
        name = canonical_name(node)
        if name == "einsum":
            summed = _union(map(self._names.atoms, self._summed_letters(node, read[0])))
        elif name not in MIXING:
            lost = _union(self.trace.atoms(n) for n in read) - self.trace.atoms(node)
            summed = _union(self._names.atoms((atom,)) for atom in lost)
        else:
            dims = self.trace.dims(read[0]) or ((),)
            at = 1 if name.startswith("conv") else len(dims) - 1
            summed, *kept = map(self._names.atoms, (dims[at], *dims[:at], *dims[at + 1 :]))
            summed -= _union(kept)  # what is named after several axes is none of them
        return summed if self._learned.isdisjoint(node.all_input_nodes) else frozenset()

    def _summed_letters(self, einsum: torch.fx.Node, left: torch.fx.Node) -> Iterator[Axis]:
        """The axes of the first operand whose letters the result has not."""
        given, _, result = str(einsum.args[0]).replace(" ", "").partition("->")
        if not result or not isinstance(left, torch.fx.Node):
            return
        dims = self.trace.dims(left) or ()
        labels = letters_of(given.split(",")[0], len(dims)) or ()
        for label, axis in zip(labels, dims, strict=False):
            if label[0] not in result:  # "." of those that dots stand for
                yield axis

    def _weights(self) -> set[torch.fx.Node]:
        """Values made of the model's parameters alone."""
        found: set[torch.fx.Node] = set()
        for node in self.view.nodes:
            if self.view.is_root_input(node):
                learned = is_parameter(node) and "_buffers_" not in node.name
            else:
                sources = self.view.producers(node)
                learned = bool(sources) and found.issuperset(sources)
            if learned:
                found.add(node)
        return found

    def _frames_of(self, embed: torch.fx.Node) -> frozenset[Atom]:
        """The axis of frames of a latent [batch, channels, frames, rows, cols] that a convolution embeds."""
        latent = embed.args[0] if canonical_name(embed) == "conv3d" and embed.args else None
        dims = self._parts.trace.dims(latent) if isinstance(latent, torch.fx.Node) else None
        return frozenset() if dims is None else self._names.atoms(dims[2])

    def _after_setitem(self, node: torch.fx.Node) -> State:
        """Of the value that is written to."""
        target, _, value = node.args
        assert isinstance(target, torch.fx.Node)
        if not is_tensor(value):
            return self._of(target)
        assert isinstance(value, torch.fx.Node)
        reordering = self._found.get(node)
        state = self._of(value) if reordering is None else self._moved_by(node, reordering)
        left_out = self._names.left_out(node)
        return self._merged(node, [target], more=state, across=left_out) if left_out else state

    def _write(self, node: torch.fx.Node, state: State) -> None:
        """What is written in place is seen by all values in its memory."""
        target = node.kwargs.get("out", node.args[0] if node.args else argument(node, 0, "input"))
        for each in target if isinstance(target, (list, tuple)) else [target]:
            if isinstance(each, torch.fx.Node) and state != self._of(each):
                self._write_to(each, node, state)

    def _write_to(self, target: torch.fx.Node, node: torch.fx.Node, state: State) -> None:
        whole, left_out = _fills_memory(target), self._names.left_out(node)
        if not self._in_memory:
            for value in self.view.nodes:
                for memory in storage_of(value):
                    self._in_memory[memory].append(value)
        for other in dict.fromkeys(n for m in storage_of(target) for n in self._in_memory[m]):
            if other is not target and self.view.position[other] < self.view.position[node]:
                self._states[other] = (
                    state if whole else self._merged(node, [other], more=state, across=left_out)
                )
        self._states[target] = state


def _union(sets: Iterable[Iterable[Atom]]) -> frozenset[Atom]:
    return frozenset[Atom]().union(*sets)


def _begins_elsewhere(move: Move, frames: frozenset[Atom]) -> bool:
    """Is it a roll of the frames? Of a latent that is embedded after it, it says which one is first: the last image."""
    return move.axis == frames and isinstance(move.order, Turned) and move.order.sign == 1


def _counts(
    way: Way,
    along: frozenset[Atom],
    picked: bool,
    projected: bool,
    believed: Collection[torch.fx.Node],
) -> bool:
    """Is a way one of tokens in another order along these axes? believed: operators that moved nothing."""
    moves = [
        move
        for move in way.moves
        if move.axis & along and not (isinstance(move.order, Named) and move.order.by in believed)
    ]
    by_index = [isinstance(m.order, Named) and _is_index(m.order.by) for m in moves]
    return (
        not all(by_index)
        or (picked and bool(moves))
        or (not projected and any(each.moved & along for each in way.beside))
    )


def _fills_memory(node: torch.fx.Node) -> bool:
    value = fake_value(node)
    return bool(value.numel() * value.element_size() == value.untyped_storage().nbytes())


def _is_index(node: torch.fx.Node) -> bool:
    return is_tensor(node) and is_index(node)


def _after(before: Moves, move: Move) -> Moves:
    """Moves with one more; what undoes the last one along its axis takes it away."""
    across = any(m.axis & move.axis and m.axis != move.axis for m in before)
    last = next((m for m in reversed(before) if m.axis == move.axis), None)
    if last is None or across or not same_size(last.length, move.length):
        return (*before, move)
    order = both(last.order, move.order, move.length)
    if order is None:
        return (*before, move)
    rest = tuple(m for m in before if m is not last)
    return rest if in_place(order, move.length) else (*rest, move._replace(order=order))
