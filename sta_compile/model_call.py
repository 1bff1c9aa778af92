"""What is known during one call of a model that `sta_compile.compile` has compiled.

Dynamo compiles a frame at a time, and a frame may be one block, which shows neither the grid nor the timestep. So the
outermost call keeps both where the graphs inside it find them:

    with calling(model, noise source, args, kwargs) as call:
        first graph runs      -> call.state_leaving(...)                  this tensor's 1440 tokens are (9, 16, 10)
        a block's guard asks  -> call.told(its inputs)                    as at the time of its compile, or compile again
        a block's graph runs  -> call.dense(settings, batch, device)      bool [batch], from the model's own timestep

Nothing outlives the call but the convention, which is kept with the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from . import _torch
from .analysis.first_call import largest_value
from .analysis.hints import DECLARE, TELL
from .call_grids import given_video, sequences_given
from .ir.known_tokens import (
    Doubt,
    Known,
    Leaving,
    OtherSequence,
    PassedTokens,
    Segments,
    Told,
    agreed,
    by_number,
)
from .ir.noise_level import Convention
from .planning.scheduler_convention import convention_of_schedule
from .prefix import Prefix
from .report import Report
from .seen_tokens import SeenTokens, may_be_table, may_be_tokens, may_be_video
from .settings import Settings

_current: ContextVar[ModelCall | None] = ContextVar("sta_compile.model_call", default=None)


def current() -> ModelCall | None:
    """The call that is running in this thread, if its model was compiled by `sta_compile.compile`."""
    return _current.get()


def root_module() -> torch.nn.Module | None:
    """The model that this compile or this call is of."""
    call = _current.get()
    return call.model if call is not None else _torch.root_module()


def told(tensors: Sequence[Any], declared: int = 0) -> tuple[Told, ...] | None:
    """As `ModelCall.told`, of the current call; None outside of one."""
    call = _current.get()
    return None if call is None else call.told(tensors, declared)


class ModelCall:
    """One forward of a model. scheduler: of its pipeline, or None. prefix: what is known before its blocks."""

    def __init__(
        self,
        model: torch.nn.Module,
        scheduler: Any,
        prefix: Prefix,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.scheduler = scheduler
        self._prefix = prefix
        self._args, self._kwargs = args, kwargs
        self._grids: dict[int, Segments | Doubt] = {}
        self._first: Known = {}  # of what the first block gets
        self._attended: set[int] = set()  # numbers of tokens of the attentions that have run
        self.seen = SeenTokens()
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, torch.Tensor):
                self.seen.state_given(given)
        self._of_video = given_video(args, kwargs)
        self.beside = sequences_given(args, kwargs)  # numbers of tokens of what is no video
        self._dense: dict[Any, torch.Tensor] = {}
        self.compiles = 0  # graphs that were compiled in this call
        self.graphs = 0  # and how many have run
        self.hidden: list[torch.nn.Module] = []  # blocks that ran without any
        self.replaces = False  # has a graph that was compiled replaced attention?
        self.breaks_inside = False  # and one attention whose queries are made in others?
        self.last_break = ""  # of the graphs that were compiled: why, and where
        self.exact: list[Any] = []  # modules that a checkpoint runs in Python
        self.may_train = torch.is_grad_enabled()
        self.in_regions = False  # are blocks nested regions, which may be given up?
        self.numbers: dict[str, float] = {}  # that these hold, in all calls so far
        self.broken = ""  # why Dynamo can't see what comes before the blocks
        self.may_watch = False  # may that be noted while it runs, in later calls?
        self.watched = False  # is it, in this one?
        self.lacks_grid = False
        self.in_parts = False  # does Python run between its graphs, and keep what they return?

    def _unseen(self, tensor: torch.Tensor) -> Doubt:
        """Of tokens of which nothing is known: did they come from a graph that knew nothing either, as it returned them?"""
        if not self.may_watch:
            return Doubt.UNWATCHED
        return Doubt.UNSHOWN if self.seen.is_returned(tensor) else Doubt.UNSEEN

    def grids(self, declared: int = 0) -> dict[int, Segments | Doubt]:
        """What the graphs so far have said, by the number of tokens.

        declared: tokens of a grid that an option declares; it is among these if another sequence has as many.
        """
        grids = {n: self._known(n) for n in self._grids}
        if declared in self.beside:
            grids[declared] = Doubt.SEVERAL
        return grids

    def _known(self, tokens: int) -> Segments | Doubt:
        """What else is known of this call: an image of a video's model may be any frame of it, beside its others."""
        known = self._grids[tokens]
        alone = known[0][1] if isinstance(known, tuple) and len(known) == 1 else None
        frame = self._of_video and alone is not None and alone[0] == 1
        if known is Doubt.PARTS or frame or tokens in self._prefix.parts:
            return Doubt.PARTS
        return Doubt.SEVERAL if tokens in self.beside else known

    def told(self, tensors: Sequence[Any], declared: int = 0) -> tuple[Told, ...]:
        """What is known of the tokens of each of a graph's inputs. declared: as for `grids`.

        That is known of the tensor; and of the numbers of tokens of what the first block gets, by the part of the model
        before that. If another input may hold as many tokens, and where they come from is not known, none is believed but
        tables of positions, which say themselves which row is where.
        """
        known = self.grids(declared)
        first = {n: k for n, k in self._first.items() if n not in self._attended}
        seen = [self.seen.of(x) if isinstance(x, torch.Tensor) else {} for x in tensors]
        unseen = {
            int(n)
            for x, dims in zip(tensors, seen, strict=True)
            if isinstance(x, torch.Tensor) and may_be_tokens(x)
            for dim, n in enumerate(x.shape[:-1])
            if dim not in dims and n in known and n not in first
        }

        def of(x: torch.Tensor, dims: Mapping[int, Segments | Doubt]) -> Iterator[tuple[int, Any]]:
            for dim, size in enumerate(x.shape):
                n = int(size)
                tokens = may_be_tokens(x) and dim < 2
                parts = known.get(n) is Doubt.PARTS and may_be_video(x) and dim < x.dim() - 1
                if dim not in dims and not parts and not (tokens and n in known):
                    continue
                if known.get(n) in (Doubt.SEVERAL, Doubt.PARTS):
                    if not self.seen.knows(x):  # tables of positions may tell which sequence it is
                        yield dim, self._unseen(x)
                    yield dim, known[n]
                elif n in unseen and not (dim in dims and may_be_table(x, dim)):
                    yield dim, known[n] if isinstance(known.get(n), Doubt) else self._unseen(x)
                else:
                    yield dim, dims[dim] if dim in dims else first[n]

        pairs = zip(tensors, seen, strict=True)
        return tuple(tuple(of(x, d)) if isinstance(x, torch.Tensor) else () for x, d in pairs)

    def state_leaving(
        self, leaving: Leaving, known: Sequence[bool], outputs: Sequence[Any]
    ) -> None:
        """A graph that has just run returns these. known: which of its inputs are, see `SeenTokens.knows`."""
        for tokens in leaving.tokens:
            tensor = outputs[tokens.output]
            n = int(tensor.shape[tokens.dim])
            if all(known[i] for i in tokens.inputs):
                self.seen.state(tensor, tokens.dim, tokens.of(n))
            self._state(dict(by_number(n, tokens.of(n))))
        self._state(dict.fromkeys(leaving.parts, Doubt.PARTS))

    def state_returned(self, leaving: Leaving, args: Sequence[Any], outputs: Iterable[Any]) -> None:
        """A graph that has just run with these shows nothing else of what it returns."""
        given = [x for i in leaving.given if isinstance(x := args[i], torch.Tensor)]
        tokens = [x for x in given if may_be_video(x)]
        lost = leaving.passes and any(self.seen.of(x) for x in tokens)
        if lost or not all(self.seen.knows(x) or self.seen.is_returned(x) for x in tokens):
            return
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor):
                self.seen.state_returned(tensor)

    def passing(
        self, passed: Iterable[PassedTokens], args: Sequence[Any]
    ) -> list[tuple[PassedTokens, Segments | Doubt]]:
        """A graph without attention runs with these: what is known of tokens that leave it as they came in."""
        passed = tuple(passed)
        given = list(dict.fromkeys(i for each in passed for i, _ in each.inputs))
        told = dict(zip(given, map(dict, self.told([args[i] for i in given])), strict=True))
        found = []
        for each in passed:
            first, *others = (told[i].get(dim) for i, dim in each.inputs)
            in_order = first is not None and not isinstance(first, Doubt)
            if any(other != first for other in others):
                continue
            if first is not None and (in_order or first in (Doubt.MOVED, Doubt.ORDER)):
                found.append((each, first))
                for i, dim in each.inputs:
                    self.seen.state(args[i], dim, first)
        return found

    def _state(self, grids: Known) -> None:
        for tokens, known in grids.items():
            self._grids[tokens] = agreed(self._grids.get(tokens, known), known)
            if known is Doubt.PARTS:  # so are those of the next call, before a graph says so
                self._prefix.parts.add(tokens)

    def knows(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and self.seen.knows(value)

    def believe(self, tensors: Sequence[Any]) -> None:
        """A graph with attention runs with these: what is known of a number of tokens is known of these tensors."""
        for tensor, told in zip(tensors, self.told(tensors), strict=True):
            for dim, known in told:
                if not isinstance(known, Doubt):
                    self.seen.state(tensor, dim, known)
            self._attended |= {int(tensor.shape[dim]) for dim, _ in told}

    def state_others(
        self, sequences: Iterable[OtherSequence], args: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        """A graph that has just run returns sequences that are no grids."""
        counts = (s.tokens(args, outputs, self._grids) for s in sequences)
        self.beside |= frozenset(n for n in counts if n is not None)

    def ask_prefix(self) -> bool:
        """Some graph needs a grid that it does not show; False if the part before the blocks shows none either."""
        self._prefix.needed = True
        before = self._prefix.before_blocks(self._args, self._kwargs)
        self.broken = before.broken
        self._first = before.grids
        self._state(before.grids)
        return bool(before.grids)

    def why_no_grid(self) -> tuple[str, str]:
        """Why the parts outside of the blocks give no grid, and what to do about it."""
        if self.watched:
            return (
                "what ran before the blocks does not show it either",
                TELL,
            )
        cause = f"what comes before the blocks can't be captured ({self.broken})"
        cause = cause if self.broken else ""
        if self.may_watch:
            return (
                cause,
                "nothing to do where blocks are called as modules: it is noted while it runs, from the next call on",
            )
        return (
            cause,
            f"move what breaks the graph out of forward, or behind the blocks; or {DECLARE}",
        )

    def settle_noise(self, option: str) -> None:
        """Asks the scheduler for the noise convention while it is not known; option: what option `timestep` says.

        Known before the first compile, it lets models of one class share their compiled code.
        """
        from .noise_plan import conventions

        known = conventions.recall(self.model, option)
        if self.scheduler is None or isinstance(known, Convention):
            return
        value = largest_value(self.argument(option))
        found = None if value is None else convention_of_schedule(self.scheduler, value)
        if found is not None:
            conventions.settle(self.model, found, option)

    def dense(self, settings: Settings, batch: int, device: torch.device) -> torch.Tensor:
        """Which samples of a block's batch take the full window: bool [batch], computed once per call."""
        from .noise_plan import flags_of_call

        key = (settings, batch, device)
        if key not in self._dense:
            self._dense[key] = flags_of_call(self, settings, batch, device)
        return self._dense[key]

    def argument(self, name: str) -> torch.Tensor | None:
        """The tensor that the model's forward was given under this name; "auto": as `timestep`."""
        given = self._arguments()
        if name == "auto":
            named = [n for n in given if "timestep" in n]
            name = "timestep" if "timestep" in given else named[0] if len(named) == 1 else ""
        value = given.get(name)
        return value if isinstance(value, torch.Tensor) else None

    def _arguments(self) -> dict[str, Any]:
        if not self._args:
            return dict(self._kwargs)
        try:
            bound = inspect.signature(type(self.model).forward).bind(
                self.model, *self._args, **self._kwargs
            )
        except TypeError:
            return dict(self._kwargs)
        return dict(bound.arguments) | dict(self._kwargs)


@contextmanager
def calling(
    model: torch.nn.Module,
    scheduler: Any,
    prefix: Prefix,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Iterator[ModelCall]:
    """Makes a call of `model` the current one."""
    call = ModelCall(model, scheduler, prefix, args, kwargs)
    if prefix.needed:
        call.ask_prefix()
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)


class GraphInCall:
    """A compiled graph that was compiled inside a call, and takes part in every call that it runs in.

    It states the grids that it proves, passes the dense flags that its operators need, and is told of for each model.

    overwrites: a replay of its CUDA graph writes where the one before wrote. A cache over steps keeps what a block returns:
    Python between graphs gets copies.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        report: Report,
        settings: Settings,
        flags: torch.Tensor | None,
        overwrites: bool = False,
    ) -> None:
        self.overwrites = overwrites
        self.compiled, self.report, self.settings = compiled, report, settings
        self.flags_of = None if flags is None else (flags.shape[0], flags.device)

    def __call__(self, *args: Any) -> Any:
        from . import warn_once

        call = _current.get()
        if call is not None:
            call.graphs += 1
            call.believe([args[i] for i in self.report.asked])
            warn_once.say_for_another(self.report, call.model)
        known = [] if call is None else [call.knows(x) for x in args]
        passed = [] if call is None else call.passing(self.report.leaving.passed, args)
        out = self.compiled(*args, *self._flags(call))
        if call is None:
            return out
        if self.overwrites and call.in_parts:
            out = tree_map_only(torch.Tensor, torch.clone, out)
        call.state_others(self.report.beside, args, out)
        call.state_leaving(self.report.leaving, known, out)
        for tokens, segments in passed:
            call.seen.state(out[tokens.output], tokens.dim, segments)
        call.state_returned(self.report.leaving, args, out)
        return out

    def _flags(self, call: ModelCall | None) -> tuple[torch.Tensor, ...]:
        if self.flags_of is None:
            return ()
        batch, device = self.flags_of
        if call is None:
            return (torch.ones(batch, dtype=torch.bool, device=device),)
        return (call.dense(self.settings, batch, device),)
