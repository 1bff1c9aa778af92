"""Reads what the graph says of a part of a mask: for which queries and keys it is true, whatever the data.

`F.pad(valid, (60, 0), value=True)[:, None, None]`, keys 0..60: true everywhere; keys 60..67: data. Additive masks are read
as well: 0 shows a key, -1e4 or less hides it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.fx

from .axes import Size
from .graph_view import GraphView, argument, canonical_name, fake_value, is_inplace, is_tensor
from .known_values import Constants
from .lower_bound import lower_bound, outside
from .mask_facts import (
    ALL,
    DATA,
    NOTHING,
    TRUE,
    TRUTH,
    Data,
    Seen,
    Test,
    along,
    chosen,
    conjunction,
    disjunction,
    either_of,
    equality,
    with_itself,
)
from .mask_positions import Places, below, on_diagonal, places
from .mask_products import OUTER, outer_product
from .mask_spans import (
    Span,
    Spans,
    at_most,
    concatenated,
    index_items,
    labels,
    moved,
    of_operand,
    padded,
    sizes_of,
    written_region,
)
from .token_values import storage_of, written_storages

_FILLED = {
    "zeros": 0.0,
    "ones": 1.0,
    "new_zeros": 0.0,
    "new_ones": 1.0,
    "zeros_like": 0.0,
    "ones_like": 1.0,
}
_TURNED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class MaskReader:
    """Answers for the masks of one graph."""

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self._written = written_storages(view)
        self._constants = Constants(view)
        self._known: dict[tuple[Any, ...], Seen | None] = {}

    def read(self, node: Any, spans: Spans, test: Test, before: int) -> Seen | None:
        """For which queries and keys `test` holds in a part of a value, as it is before position `before` of the graph.

        None if nothing can be said.
        """
        number = fake_value(node)
        if isinstance(number, (bool, int, float)):
            return test.of_constant(float(number))
        inner, node = node, outside(self.view, node)
        if not is_tensor(node):
            return None
        before = self.view.position[inner] if inner is not node else before
        key = (node, spans, test, before)
        if key not in self._known:
            self._known[key] = None  # until it is known
            self._known[key] = self._read(node, spans, test, before)
        return self._known[key]

    def _read(self, node: torch.fx.Node, spans: Spans, test: Test, before: int) -> Seen | None:
        source = node.args[0] if node.args else None
        storages = set(storage_of(node))
        writes = [w for s in storages for w in self._written.get(s, ())]
        writes = [w for w in writes if self.view.position.get(w, before) < before]
        last = writes[-1] if writes else None
        shares = is_tensor(source) and storages & set(storage_of(source))  # type: ignore[arg-type]
        if shares and not is_inplace(node) and (last is None or last.args[0] is not node):
            through = moved(node, spans)
            if through is None or fake_value(source).dtype != fake_value(node).dtype:
                return None
            return self.read(source, through, test, before)
        if last is not None and last is not node:
            return _named(self._after(last, node, spans, test), (last, test), spans)
        found = self._computed(node, spans, test, self.view.position[node])
        if not writes and found not in (ALL, NOTHING):
            leaf = _leaf(node, spans, test) if found is None else found
            found = self._constant(node, spans, test) or leaf
        return _named(found, (node, test), spans)

    def _constant(self, node: torch.fx.Node, spans: Spans, test: Test) -> Seen | None:
        """Of a part that holds one number in every call: all that is made of numbers is computed here."""
        if not all(isinstance(n, int) for span in spans for n in (span.start, span.stop)):
            return None
        value = self._constants.of(node)
        if value is None:
            return None
        part = value[tuple(slice(span.start, span.stop) for span in spans)].reshape(-1)
        if part.numel() == 0:
            return ALL
        return test.of_constant(float(part[0])) if bool((part == part[0]).all()) else None

    def _after(
        self, write: torch.fx.Node, node: torch.fx.Node, spans: Spans, test: Test
    ) -> Seen | None:
        """Of a value that an operation has written to."""
        position = self.view.position[write]
        if write.args[0] is not node:
            return None
        if canonical_name(write) != "setitem":
            return self.read(write, spans, test, position + 1)
        _, index, value = write.args
        sizes = sizes_of(node)
        region = written_region(index, sizes)
        if region is None:
            return None
        for dim, (span, (start, stop, _)) in enumerate(zip(spans, region, strict=True)):
            cuts = _cuts(span, start, stop) if span.label == "b" else []
            if cuts:  # some of the samples are written
                parts = (Span("b", a, b) for a, b in pairwise([span.start, *cuts, span.stop]))
                facts = [
                    self.read(node, (*spans[:dim], part, *spans[dim + 1 :]), test, position + 1)
                    for part in parts
                ]
                return either_of(facts, {"b"})
        least = self._least_stops(index, region)
        old = self.read(node, spans, test, position)
        apart = [
            at_most(span.stop, start) or at_most(stop, span.start)
            for span, (start, stop, _) in zip(spans, region, strict=True)
        ]
        if any(apart):
            return old
        inside = [
            span.shifted(-start)
            for span, (start, _, kept) in zip(spans, region, strict=True)
            if kept
        ]
        new = self.read(value, self._of_value(value, tuple(inside)), test, position)
        mixed = {
            span.label
            for span, (start, stop, _), sure in zip(spans, region, least, strict=True)
            if not at_most(start, span.start)
            or not (at_most(span.stop, stop) or (sure is not None and at_most(span.stop, sure)))
        }
        return either_of((old, new), mixed) if mixed else new

    def _least_stops(self, index: Any, region: list[tuple[Size, Size, bool]]) -> list[Size | None]:
        """What the ends of a written region are at least, where they are lengths that depend on data."""
        items = index_items(index, len(region)) or []
        return [
            lower_bound(self.view, item.stop) if isinstance(item, slice) else None for item in items
        ]

    def _of_value(self, value: Any, spans: Spans) -> Spans:
        return of_operand(value, spans) if is_tensor(value) else spans

    def _computed(self, node: torch.fx.Node, spans: Spans, test: Test, at: int) -> Seen | None:
        """What the operation that made a value says."""
        name = canonical_name(node)
        first = node.args[0] if node.args else None
        if name in _FILLED:
            return test.of_constant(_FILLED[name])
        if name in ("full", "new_full", "full_like"):
            fill = fake_value(argument(node, 1 if name != "new_full" else 2, "fill_value"))
            return test.of_constant(float(fill)) if isinstance(fill, (bool, int, float)) else None
        if name in _TURNED:
            return self._comparison(node, name, spans, test, at)
        if name in ("fill", "tensor", "scalar_tensor"):
            fill = node.args[1] if name == "fill" else first
            return test.of_constant(float(fill)) if isinstance(fill, (bool, int, float)) else None
        if name == "logical_not":
            if not is_tensor(first) or fake_value(first).dtype != torch.bool:
                return None
            return self._of(first, spans, test.before("eq", 0.0), at)
        if name in ("logical_and", "logical_or"):
            return self._connective(node, name, spans, test, at)
        if name in ("masked_fill", "where"):
            return self._choice(node, name, spans, test, at)
        if name in ("mul", "add", "sub", "rsub", "truediv"):
            return self._arithmetic(node, name, spans, test, at)
        if name in ("cat", "pad", "constant_pad_nd"):
            return self._joined(node, name, spans, test, at)
        if name in OUTER:
            factors = outer_product(node, spans)
            if factors is None or not all(self._is_truth(x) for x, _ in factors):
                return None
            return test.of_truth(conjunction(*(self.read(*f, TRUTH, at) for f in factors)))
        through = moved(node, spans)
        if through is None or not is_tensor(first):
            return None
        made, given = fake_value(node).dtype, fake_value(first).dtype
        if made == torch.bool and given != torch.bool:
            test = test.before("ne", 0.0)
        elif made in _INTEGERS and given.is_floating_point:
            return None
        return self.read(first, through, test, at)

    def _of(self, operand: Any, spans: Spans, test: Test, at: int) -> Seen | None:
        """Of an operand that is broadcast."""
        return self.read(operand, self._of_value(operand, spans), test, at)

    def _connective(
        self, node: torch.fx.Node, name: str, spans: Spans, test: Test, at: int
    ) -> Seen | None:
        a, b = node.args[0], argument(node, 1, "other")
        if not all(is_tensor(x) and fake_value(x).dtype == torch.bool for x in (a, b)):
            return None
        for one, other in ((a, b), (b, a)) if name == "logical_or" else ():
            where = self._on_diagonal(one, self._of_value(one, spans))
            if where is not None:
                rest = self._of(other, spans, TRUTH, at)
                return test.of_truth(with_itself(rest) if where else rest)
        seen = (self._of(x, spans, TRUTH, at) for x in (a, b))
        return test.of_truth((conjunction if name == "logical_and" else disjunction)(*seen))

    def _on_diagonal(self, node: Any, spans: Spans) -> bool | None:
        """Is a part true where a query is its own key, and nowhere else? False if no query of it is."""
        node = outside(self.view, node)
        if not is_tensor(node) or self.is_written(node):
            return None
        name = canonical_name(node)
        if name == "eq":
            sides = (node.args[0], argument(node, 1, "other"))
            return on_diagonal(*(self._places(side, spans) for side in sides))
        if name == "eye":
            return on_diagonal(*((span.label, span.start, span.stop) for span in spans))
        through = moved(node, spans)
        again = through is not None and name not in ("logical_not", "neg")
        return self._on_diagonal(node.args[0], through) if again and through else None

    def _choice(
        self, node: torch.fx.Node, name: str, spans: Spans, test: Test, at: int
    ) -> Seen | None:
        if name == "masked_fill":
            no, condition, yes = node.args[0], argument(node, 1, "mask"), argument(node, 2, "value")
        elif len(node.args) != 3:
            return None
        else:
            condition, yes, no = node.args
            if node.op == "call_method":
                condition, yes = yes, condition
        if not is_tensor(condition):
            return None
        return chosen(
            self._of(condition, spans, TRUTH, at),
            self._of(yes, spans, test, at),
            self._of(no, spans, test, at),
        )

    def _arithmetic(
        self, node: torch.fx.Node, name: str, spans: Spans, test: Test, at: int
    ) -> Seen | None:
        a, b = node.args[0], argument(node, 1, "other")
        if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode") is not None:
            return None
        if name == "rsub":
            name, a, b = "sub", b, a
        numbers = [isinstance(fake_value(x), (bool, int, float)) for x in (a, b)]
        if numbers == [False, True]:
            return self._of(a, spans, test.before(name, float(fake_value(b))), at)
        if numbers == [True, False] and name != "truediv":
            step = "rsub" if name == "sub" else name
            return self._of(b, spans, test.before(step, float(fake_value(a))), at)
        if numbers != [False, False]:
            return None
        if name == "mul" and self._is_truth(a) and self._is_truth(b):
            both = conjunction(*(self._of(x, spans, TRUTH, at) for x in (a, b)))
            return test.of_truth(both)
        if name == "add" and test == Test(True):
            return conjunction(*(self._of(x, spans, test, at) for x in (a, b)))
        return None

    def _is_truth(self, node: Any) -> bool:
        """Is a value 0 or 1 everywhere?"""
        node = outside(self.view, node)
        if not is_tensor(node) or self.is_written(node):
            return False
        if fake_value(node).dtype == torch.bool or canonical_name(node) in _FILLED:
            return True
        name = canonical_name(node)
        if name == "mul":
            return all(map(self._is_truth, node.args[:2]))
        if name in ("sub", "rsub"):
            one, of = node.args[:2] if name == "sub" else node.args[1::-1]
            return isinstance(one, (int, float)) and one == 1 and self._is_truth(of)
        if name == "cat":
            return all(map(self._is_truth, argument(node, 0, "tensors")))
        return moved(
            node, tuple(Span("", 0, n) for n in sizes_of(node))
        ) is not None and self._is_truth(node.args[0])

    def is_written(self, node: torch.fx.Node) -> bool:
        """Is the memory of a value ever written in place?"""
        return any(storage in self._written for storage in storage_of(node))

    def _joined(
        self, node: torch.fx.Node, name: str, spans: Spans, test: Test, at: int
    ) -> Seen | None:
        """Of parts that stand one after the other along one dimension."""
        parts = concatenated(node) if name == "cat" else padded(node)
        if parts is None:
            return None
        dim, operands = parts
        facts: list[Seen | None] = []
        for start, stop, operand in operands:
            span = spans[dim]
            if at_most(span.stop, start) or at_most(stop, span.start):
                continue
            inner = (*spans[:dim], span.shifted(-start), *spans[dim + 1 :])
            facts.append(self._of(operand, inner, test, at))
        return either_of(facts, {spans[dim].label}) if facts else None

    def _comparison(
        self, node: torch.fx.Node, name: str, spans: Spans, test: Test, at: int
    ) -> Seen | None:
        a, b = node.args[0], argument(node, 1, "other")
        for left, right, how in ((a, b, name), (b, a, _TURNED[name])):
            found = self._places(left, spans)
            if found is not None and how not in ("eq", "ne"):
                label, first, stop = found
                fact = below(self.view, first, stop, right, spans, how)
                return None if fact is None else test.of_truth(along(label, fact))
        for left, right, how in ((a, b, name), (b, a, _TURNED[name])):
            number = fake_value(right)
            if is_tensor(left) and isinstance(number, (bool, int, float)):
                return self._of(left, spans, test.before(how, float(number)), at)
        if name == "eq" and self._is_truth(a) and self._is_truth(b):
            return test.of_truth(equality(*(self._of(x, spans, TRUTH, at) for x in (a, b))))
        return None

    def _places(self, node: Any, spans: Spans) -> Places | None:
        return (
            places(self.view, node, self._of_value(node, spans), self.is_written)
            if is_tensor(node)
            else None
        )


def _named(seen: Seen | None, made: Hashable, spans: Spans) -> Seen | None:
    """What is data gets a name: what made it, and where it was read.

    A fact of the queries and one of the keys have the same name if they are of the same rows.
    """
    if seen is None or DATA not in (seen.queries, seen.keys):
        return seen

    def name(label: str) -> Data:
        own = (replace(s, label="*") if s.label == label else s for s in spans)
        return Data((made, tuple(span for span in own if span.label != "b")))

    return replace(
        seen,
        queries=name("q") if seen.queries == DATA else seen.queries,
        keys=name("k") if seen.keys == DATA else seen.keys,
    )


def _cuts(span: Span, start: Size, stop: Size) -> list[int]:
    """Where a span is cut by start .. stop, strictly inside; none if that isn't known."""
    if not all(isinstance(n, int) for n in (span.start, span.stop, start, stop)):
        return []
    return [n for n in (start, stop) if isinstance(n, int) and span.start < n < span.stop]


def _leaf(node: torch.fx.Node, spans: Spans, test: Test) -> Seen | None:
    """Of a value of which only the shape is known."""
    along_what = labels(node, spans)
    seen = None
    if along_what <= {"b", "k"}:
        seen = Seen(TRUE, DATA)
    elif along_what <= {"b", "q"}:
        seen = Seen(DATA, TRUE)
    if fake_value(node).dtype == torch.bool:
        return test.of_truth(seen)
    return seen if test.total else None
