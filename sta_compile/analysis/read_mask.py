"""Reads what the graph says of a part of a mask: for which queries and keys it is true, whatever the data.

`F.pad(valid, (60, 0), value=True)[:, None, None]`, keys 0..60: true everywhere; keys 60..67: data. Additive masks are read
as well: 0 shows a key, -1e4 or less hides it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.fx

from .axes import Size, size_of
from .graph_view import GraphView, argument, canonical_name, fake_value, is_inplace, is_tensor
from .known_values import Constants
from .lower_bound import EXACT, lower_bound, outside
from .mask_facts import (
    ALL,
    DATA,
    FALSE,
    NOTHING,
    TRUE,
    TRUTH,
    Below,
    Fact,
    Seen,
    Test,
    along,
    chosen,
    conjunction,
    disjunction,
    either_of,
)
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
        if is_tensor(source) and not is_inplace(node) and storages & set(storage_of(source)):  # type: ignore[arg-type]
            through = moved(node, spans)
            if through is None or fake_value(source).dtype != fake_value(node).dtype:
                return None
            return self.read(source, through, test, before)
        writes = [w for s in storages for w in self._written.get(s, ())]
        writes = [w for w in writes if self.view.position.get(w, before) < before]
        if writes and writes[-1] is not node:
            return self._after(writes[-1], node, spans, test)
        found = self._computed(node, spans, test, self.view.position[node])
        if writes or found in (ALL, NOTHING):
            return found
        constant = self._constant(node, spans, test)
        return constant or (_leaf(node, spans, test) if found is None else found)

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
        seen = (self._of(x, spans, TRUTH, at) for x in (a, b))
        return test.of_truth((conjunction if name == "logical_and" else disjunction)(*seen))

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
            found = self._index(left, self._of_value(left, spans)) if is_tensor(left) else None
            if found is not None:
                label, first, stop = found
                fact = self._below(first, stop, right, spans, how)
                return None if fact is None else test.of_truth(along(label, fact))
        for left, right, how in ((a, b, name), (b, a, _TURNED[name])):
            number = fake_value(right)
            if is_tensor(left) and isinstance(number, (bool, int, float)):
                return self._of(left, spans, test.before(how, float(number)), at)
        return None

    def _index(self, node: Any, spans: Spans) -> tuple[str, Size, Size] | None:
        """(label, first, stop) of a part that holds the positions along one dimension."""
        node = outside(self.view, node)
        if not is_tensor(node) or fake_value(node).dtype not in EXACT or self.is_written(node):
            return None
        name = canonical_name(node)
        if name == "arange":
            plain = len(node.args) == 1 or (len(node.args) == 2 and node.args[0] == 0)
            if not plain or node.kwargs.get("step", 1) != 1 or node.kwargs.get("start", 0) != 0:
                return None
            (span,) = spans
            return span.label, span.start, span.stop
        if name in ("add", "sub") and node.kwargs.get("alpha", 1) == 1:
            by = fake_value(argument(node, 1, "other"))
            found = self._index(node.args[0], spans)
            if found is None or not isinstance(by, (int, torch.SymInt)):
                return None
            shift = size_of(by) if name == "add" else -size_of(by)
            return found[0], found[1] + shift, found[2] + shift
        through = moved(node, spans)
        return None if through is None or name == "neg" else self._index(node.args[0], through)

    def _below(self, first: Size, stop: Size, limit: Any, spans: Spans, how: str) -> Fact | None:
        """What `position <how> limit` says of positions first .. stop."""
        if how not in ("lt", "le", "gt", "ge"):
            return None
        negated = how in ("gt", "ge")  # position > limit: not position < limit + 1
        more = how in ("gt", "le")
        value = fake_value(limit)
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            end = size_of(value) + (1 if more else 0)
            fact: Fact = TRUE if at_most(stop, end) else FALSE if at_most(end, first) else DATA
        elif is_tensor(limit) and labels(limit, of_operand(limit, spans)) <= {"b"}:
            bound = lower_bound(self.view, limit)
            if bound is not None and at_most(stop, bound + (1 if more else 0)):
                fact = TRUE
            else:
                fact = DATA if more else Below(outside(self.view, limit), first)
        else:
            return None
        if not negated or fact == DATA:
            return fact
        if isinstance(fact, Below):
            return Below(fact.limit, fact.start, True)
        return FALSE if fact == TRUE else TRUE


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
