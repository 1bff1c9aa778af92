"""Which tokens does an attention read? Walks from its q, k and v back to what they are made of.

Two axes may be one by their positions and yet not hold the same tokens: keys of another video of the same grid, or text of
as many tokens as the video that shares its table of positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.fx

from .attention_calls import operands_of
from .attention_names import MULTIHEAD
from .attention_site import AttentionSite
from .axes import Axis, atoms_of, axis_size, resolve, same_size, segments_of
from .graph_view import argument, canonical_name, is_parameter, is_pointwise, is_tensor
from .trace_dims import DimTrace
from .trace_index import rows_by_index

MIXING = (
    "linear",
    "int8_mixed_scaled_mm",
    "matmul",
    "bmm",
    "mm",
    "addmm",
    "baddbmm",
    "einsum",
    "conv1d",
    "conv2d",
    "conv3d",
)
_SUMS = ("sum", "mean", "amax", "amin", "logsumexp")


class TokenStreams:
    """Answers for the attention sites of one graph."""

    def __init__(self, trace: DimTrace) -> None:
        self.trace = trace
        self._of_latent: dict[Axis, set[torch.fx.Node]] = {}
        self._of_inputs: set[torch.fx.Node] | None = None

    def same_stream(self, site: AttentionSite, axis: Axis) -> bool:
        """Are q, k and v projected from one token stream? Compares the values before their projections."""
        sources = [self.source(site, n, axis) for n in (site.q, site.k, site.v)]
        return bool(sources[0] & sources[1] & sources[2])

    def source(self, site: AttentionSite, operand: torch.fx.Node, axis: Axis) -> set[torch.fx.Node]:
        """Where the tokens of an operand of a site are projected from; a site may do so by itself."""
        return (
            {self._tokens(operand, axis)}
            if site.projections is not None
            else self.stream(operand, axis)
        )

    def all_given(self, site: AttentionSite, axes: Sequence[Axis | None]) -> bool:
        """Are as many queries, keys and values different inputs of the graph, so that nothing tells where they come from?

        axes: the tokens of each.
        """
        first, view, sources = axes[0], self.trace.view, []
        for (node, *_), axis in zip(site.operands, axes, strict=True):
            if first is None or axis is None or not same_size(axis_size(first), axis_size(axis)):
                return False
            sources.append(self.stream(node, axis))
        given = (n for found in sources for n in found)
        return not set.intersection(*sources) and all(
            view.is_root_input(n) and not is_parameter(n) for n in given
        )

    def stream(self, start: torch.fx.Node, axis: Axis) -> set[torch.fx.Node]:
        """Walks back over values that hold `axis` to the inputs of the first projections."""
        found: set[torch.fx.Node] = set()
        seen = {start}
        stack = [start]
        while stack:
            node = stack.pop()
            picked = self.trace.view.picks(node)
            sources = [picked] if picked is not None else self.trace.view.producers(node)
            carriers = [s for s in sources if self.holds(s, axis)]
            if self.reorders(node, axis):
                found.add(node)
                continue
            if canonical_name(node) in MIXING:
                found.update(self._tokens(c, axis) for c in carriers)
                continue
            if not carriers:
                found.add(node)
            for carrier in carriers:
                if carrier not in seen:
                    seen.add(carrier)
                    stack.append(carrier)
        return found

    def _tokens(self, node: torch.fx.Node, axis: Axis) -> torch.fx.Node:
        """The tokens before what they are given for one projection only: a cast, or positions that are added."""
        while True:
            node = before_casts(node)
            operands = [n for n in node.all_input_nodes if is_tensor(n)]
            data = [n for n in operands if n in self._from_inputs()]
            name = canonical_name(node)
            passes = is_pointwise(name) or name in ("transpose", "permute", "movedim", "mT")
            if not passes or len(data) != 1 or not self.holds(data[0], axis):
                return node
            (node,) = data

    def _from_inputs(self) -> set[torch.fx.Node]:
        """Values that depend on what the model is called with, weights apart."""
        if self._of_inputs is None:
            view = self.trace.view
            found = {n for n in view.nodes if view.is_root_input(n) and not is_parameter(n)}
            for node in view.nodes:
                picked = view.picks(node)
                sources = [picked] if picked is not None else view.producers(node)
                if not found.isdisjoint(sources):
                    found.add(node)
            self._of_inputs = found
        return self._of_inputs

    def embedded(self) -> set[torch.fx.Node]:
        """Values made of what the model is called with by a product with weights: no latents any more."""
        view, data = self.trace.view, self._from_inputs()
        found: set[torch.fx.Node] = set()
        for node in view.nodes:
            picked = view.picks(node)
            sources = [picked] if picked is not None else view.producers(node)
            made = canonical_name(node) in MIXING and node in data
            if made or not found.isdisjoint(sources):
                found.add(node)
        return found

    def reorders(self, node: torch.fx.Node, axis: Axis) -> bool:
        """Did an operation make an axis of its own, whose order is that of its input only as far as sizes tell, or pick
        rows?"""
        rows = rows_by_index(self.trace, node)
        if rows is not None and not set(atoms_of(resolve(rows))).isdisjoint(atoms_of(axis)):
            return True
        made = self.trace.invented.get(node, set())
        own = {a for atom in made for a in atoms_of(resolve((atom,)))}
        return node in self.trace.opaque or not own.isdisjoint(atoms_of(axis))

    def holds(self, node: torch.fx.Node, axis: Axis) -> bool:
        """Has a value the tokens of an axis, as one axis, beside others, or cut up over neighbouring axes?"""
        wanted = resolve(axis)
        return self._has_axis(node, wanted) or any(
            _contains(tuple(factor for dim in dims for factor in dim), wanted)
            for dims in self.trace.tensors(node)
        )

    def _has_axis(self, node: torch.fx.Node, wanted: Axis) -> bool:
        return any(
            any(resolve(part) == wanted for part in segments_of(dim)) or _contains(dim, wanted)
            for dims in self.trace.tensors(node)
            for dim in dims
        )

    def _becomes_tokens(self, source: torch.fx.Node, node: torch.fx.Node, part: Axis) -> bool:
        """Does an operation cut a value into the grid's tokens? A convolution does, and a reshape that joins axes."""
        if any(atom.origin for atom in self.trace.invented.get(node, ())):
            return True
        atoms = set(atoms_of(resolve(part)))
        return not atoms.isdisjoint(self.trace.atoms(source)) and not self.holds(source, part)

    def _is_cut_up(self, node: torch.fx.Node, part: Axis) -> bool:
        return self.holds(node, part) and not self._has_axis(node, resolve(part))

    def joined(self, site: AttentionSite, part: Axis) -> bool:
        """Does a call of a body around the site bring tokens that only the body makes the grid's?"""
        view, atoms = self.trace.view, set(atoms_of(resolve(part)))
        owners, stack = {view.owner[site.node]}, [view.owner[site.node]]
        while stack:
            for call in view.calls.get(stack.pop(), ()):
                if any(atoms & set(atoms_of(resolve(a))) for a in self.trace.joined.get(call, ())):
                    return True
                if view.owner[call] not in owners:
                    owners.add(view.owner[call])
                    stack.append(view.owner[call])
        return False

    def made_of(self, node: torch.fx.Node, axis: Axis) -> bool:
        """Was a value made of tokens that have an axis, token by token, in whatever order?"""
        wanted = resolve(axis)
        return any(self.holds(value, wanted) for value in self.behind(node, apart_from=wanted))

    def inputs_of(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The inputs of the graph, weights apart, whose tokens a value was made of, token by token."""
        given = (n for n in self.behind(node) if self.trace.view.is_root_input(n))
        return [n for n in given if is_tensor(n) and not is_parameter(n)]

    def behind(self, node: torch.fx.Node, apart_from: Axis = ()) -> Iterator[torch.fx.Node]:
        """Values that one was made of, token by token.

        apart_from: not those of which it takes other tokens only, as the text of a sequence.
        """
        view = self.trace.view
        seen, stack = {node}, [node]
        while stack:
            value = stack.pop()
            yield value
            picked = view.picks(value)
            sources = [picked] if picked is not None else view.producers(value)
            for source in passed_on(value, sources):
                if source not in seen and not self._leaves_out(value, source, apart_from):
                    seen.add(source)
                    stack.append(source)

    def _leaves_out(self, value: torch.fx.Node, source: torch.fx.Node, axis: Axis) -> bool:
        """Does a value take other tokens of its source than these, and is that known?"""
        if not axis or value in self.trace.opaque or self.trace.invented.get(value):
            return False
        atoms = set(atoms_of(axis))
        return self.holds(source, axis) and atoms.isdisjoint(self.trace.atoms(value))

    def tokens_of_latent(self, part: Axis) -> set[torch.fx.Node]:
        """Values that a latent cut into the grid's tokens becomes, token by token, whoever attends to them."""
        if part not in self._of_latent:
            view = self.trace.view
            from_input = self._from_inputs()
            # A latent may be padded, resized or flipped first, by which its axes become new ones.
            latents = (n for n in from_input if view.is_root_input(n) or n in self.trace.opaque)
            found = {n for n in latents if self._is_cut_up(n, part)}
            for node in view.nodes:
                picked = view.picks(node)
                sources = [picked] if picked is not None else view.producers(node)
                if not found.isdisjoint(passed_on(node, sources)) or (
                    self.holds(node, part)
                    and any(
                        s in from_input and self._becomes_tokens(s, node, part) for s in sources
                    )
                ):
                    found.add(node)
            self._of_latent[part] = found
        return self._of_latent[part]


def passed_on(node: torch.fx.Node, sources: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """The operands whose tokens are those of a node: queries, the left side of products, no sums over tokens."""
    name = canonical_name(node)
    if name in _SUMS:
        return []
    if name == MULTIHEAD:
        return [argument(node, 0, "query")]
    operands = operands_of(node)
    if operands is not None:
        return [operands.q]
    first = {"matmul": 0, "bmm": 0, "mm": 0, "baddbmm": 1, "addmm": 1, "einsum": 1}.get(name)
    if first is None or len(node.args) <= first:
        return sources
    left: Any = node.args[first]
    if isinstance(left, torch.fx.Node) and is_parameter(before_casts(left)):  # weights on the left
        return [source for source in sources if source is not left]
    return [left]


def _contains(axis: Axis, wanted: Axis) -> bool:
    n = len(wanted)
    return n > 0 and any(axis[i : i + n] == wanted for i in range(len(axis) - n + 1))


# The same tokens in another type, shape or memory.
_COPIES = (
    "to", "float", "type_as", "contiguous", "clone", "dropout", "half", "double", "bfloat16",
    "view", "reshape", "flatten", "unflatten",
)  # fmt: skip


def before_casts(node: torch.fx.Node) -> torch.fx.Node:
    """The value before casts, copies and views, which several projections may each make of their own."""
    while True:
        source = node.args[0] if node.args else None
        if not isinstance(source, torch.fx.Node):
            return node
        if canonical_name(node) == "getitem" and canonical_name(source) == "int8_vectorwise_quant":
            source = source.args[0]
            assert isinstance(source, torch.fx.Node)
        elif canonical_name(node) not in _COPIES or not is_tensor(source):
            return node
        node = source
