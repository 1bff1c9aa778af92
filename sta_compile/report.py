"""What happened to a graph: which attentions were replaced, which were not and why, what is known of the noise level.

    Report(name="WanTransformer3DModel", replaced=[40 sites], refused=[40 cross-attentions], conversions=3, ...)
    .summary()   sta: 40 of 40 self-attentions over 21x45x80 tokens keep 42 % of pairs; dense above noise 0.95; ...
    print(report)   a table in which equal sites are one row: blocks.0-39.attn1

A report holds names and numbers only, no tensor, so that keeping it keeps no memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .ir.attention_spec import Triple
from .ir.known_tokens import Leaving, OtherSequence

MAX_REPORTS = 256


@dataclass(frozen=True)
class ReplacedSite:
    """An attention that became `sta::attention`. Triples are (frames, rows, cols); None: known only at run time."""

    name: str  # module path: "blocks.0.attn1"
    grid: Triple | None  # tokens per axis, (frames, rows, cols) as all triples here
    segments: tuple[tuple[str, int | None], ...]  # ("video" | "context", tokens) in sequence order
    tiles: Triple | None  # tiles per axis
    tile: Triple | None  # nominal extents of a tile, in tokens
    window: Triple | None  # in tiles; the widest, where heads have several
    kept: float | None  # share of the video's (query, key) pairs that is computed, 0..1
    kernel: str
    evidence: str = ""  # how the grid is known: "proved by conv3d patch embed"
    windows: int = 1  # different ones among its heads
    calls: int = 1  # attentions of the model that it stands for: a nested region is called once for each layer
    order: str = (
        ""  # of the tokens, where it is not frames, rows, cols, or nothing says which is which
    )
    why_exact: str = ""  # where nobody asked for a full window, and it is one
    precision: str = "native"  # as the option of that name
    why_native: str = ""  # where another precision was asked for

    @property
    def exact(self) -> bool:
        return self.kept is not None and self.kept >= 1.0 and self.precision != "tiered"


@dataclass(frozen=True)
class RefusedSite:
    """An attention that was left as it was."""

    name: str
    reason: str
    hint: str
    self_attention: bool = (
        True  # False: cross-attention and the like, which STA leaves alone by design
    )
    grid_known: bool = True  # False: nothing shows that its tokens are video at all
    by_request: bool = False  # an option keeps it exact: `min_tokens`
    calls: int = 1

    @property
    def breaks_strict(self) -> bool:
        """Is this what `strict` forbids: self-attention over a known grid that could not be replaced?"""
        return self.self_attention and self.grid_known and not self.by_request


@dataclass(frozen=True)
class NoiseReport:
    """Where the noise level comes from; convention None is unknown, and then every step is dense."""

    input: str | None = None  # the timestep's input name
    convention: str | None = None  # as option `noise` takes it
    evidence: str = ""
    needed: bool = True  # False: no step can be dense, so nothing depends on the level

    @property
    def unknown(self) -> bool:
        return self.needed and self.convention is None


@dataclass
class Report:
    """One graph. `reason` and `hint` are set where the whole graph was left to inductor, whatever is in it."""

    name: str
    replaced: list[ReplacedSite] = field(default_factory=list)
    refused: list[RefusedSite] = field(default_factory=list)
    conversions: int = 0  # logical changes between raster and tile order
    noise: NoiseReport = field(default_factory=NoiseReport)
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    settings: dict[str, Any] = field(default_factory=dict)  # Settings.to_dict()
    reason: str = ""
    hint: str = ""
    unfit_grid: str = ""  # what there is to say of a declared grid that is not used
    # For later graphs.
    leaving: Leaving = field(default_factory=Leaving)
    beside: tuple[OtherSequence, ...] = ()
    read: dict[int, Any] = field(default_factory=dict)  # Positions, by the input that showed them
    empty: dict[int, Any] = field(
        default_factory=dict
    )  # Rows of inputs that show no grid, by input
    asked: tuple[
        int, ...
    ] = ()  # inputs of which earlier graphs were asked, where there is attention
    measured: tuple[str, ...] = ()  # the fastest kernels and their times, under mode="max-autotune"

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the seconds of the block to `seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.seconds[name] = spent

    def name_kernels(self, texts: Iterable[str]) -> None:
        """Says what "auto" has chosen; texts: of the kernels that were built for this graph (`KernelSpec.text`)."""
        emitters = " or ".join(dict.fromkeys(text.split()[0] for text in texts))
        self.replaced = [
            replace(site, kernel=emitters) if emitters and site.kernel == "auto" else site
            for site in self.replaced
        ]

    def say_native(self, why: str) -> None:
        """Where kernels are native though another precision was asked for; why: "" if none is."""
        self.replaced = [
            site
            if not why or site.precision == "native"
            else replace(
                site,
                precision="native",
                why_native=f"precision={site.precision!r} runs as 'native': {why}",
            )
            for site in self.replaced
        ]

    def say_of_gradients(self) -> None:
        """Of a program whose attention runs in the precision that was asked for only where no gradients are recorded."""
        self.replaced = [
            site
            if site.precision == "native"
            else replace(
                site,
                why_native=f"precision={site.precision!r} runs as 'native' where gradients are recorded",
            )
            for site in self.replaced
        ]

    def say_why(self, sites: Collection[RefusedSite], cause: str, hint: str) -> None:
        """Adds what causes the reason of refused sites, if anything is known to; hint: what to do about it."""

        def said(reason: str) -> str:
            return f"{reason}; {cause}" if cause else reason

        if self.reason in [site.reason for site in sites]:
            self.reason, self.hint = said(self.reason), hint
        self.refused = [
            replace(site, reason=said(site.reason), hint=hint) if site in sites else site
            for site in self.refused
        ]

    def advise(self, hint: str, instead_of: str) -> None:
        """Gives another hint where one is of no use."""
        self.hint = hint if self.hint == instead_of else self.hint
        self.refused = [
            replace(site, hint=hint) if site.hint == instead_of else site for site in self.refused
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: lists, dicts, text and numbers."""
        values: dict[str, Any] = _plain(asdict(self))
        return values | {"summary": self.summary()}

    @property
    def self_attentions(self) -> int:
        """How many self-attentions of the model were found, replaced or not."""
        return self.replacements + sum(site.calls for site in self.refused if site.self_attention)

    @property
    def replacements(self) -> int:
        """How many attentions of the model were replaced."""
        return sum(site.calls for site in self.replaced)

    @property
    def lacks_grid(self) -> bool:
        """Does it hold attention over tokens whose grid this graph alone does not show, and none whose grid it does?"""
        return not self.replaced and any(not site.grid_known for site in self.refused)

    def summary(self, *, part: bool = False) -> str:
        """The one line that is said aloud: what became approximate, or that nothing did, why and what to do.

        part: of a model of which other graphs have said something.
        """
        from .report_text import summarize

        return summarize(self, part)

    def __str__(self) -> str:
        from .report_text import as_text

        return as_text(self)

    def __rich__(self) -> Any:
        from .report_text import as_table

        return as_table(self)


_reports: deque[Report] = deque(maxlen=MAX_REPORTS)
_lock = threading.Lock()


def record(report: Report) -> None:
    """Adds a compiled graph's report to `reports()`."""
    with _lock:
        _reports.append(report)


def reports() -> list[Report]:
    """Every graph compiled since `reset_reports()` or `torch._dynamo.reset()`, oldest first, the last 256 at most."""
    with _lock:
        return list(_reports)


def reset_reports() -> None:
    """Forgets all reports."""
    with _lock:
        _reports.clear()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def numbered(names: list[str]) -> Iterator[tuple[str, list[int]]]:
    """Names that differ in one number become one name: 40 of "blocks.7.attn1" are "blocks.0-39.attn1".

    Yields (name, indices into `names`) in order of first appearance.
    """
    left = dict(enumerate(names))
    while left:
        first = next(iter(left))
        parts = left[first].split(".")
        best, members = -1, {first: 0}
        for place, part in enumerate(parts):
            if part.isdigit():
                alike = {
                    index: int(other.split(".")[place])
                    for index, other in left.items()
                    if _differs_only_at(parts, other.split("."), place)
                }
                if len(alike) > len(members):
                    best, members = place, alike
        if best >= 0:
            parts[best] = _ranges(sorted(set(members.values())))
        yield ".".join(parts), sorted(members)
        for index in members:
            del left[index]


def _differs_only_at(parts: list[str], other: list[str], place: int) -> bool:
    return (
        len(other) == len(parts)
        and other[place].isdigit()
        and other[:place] == parts[:place]
        and other[place + 1 :] == parts[place + 1 :]
    )


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5" """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
