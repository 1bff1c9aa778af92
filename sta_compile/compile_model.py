"""`sta_compile.compile(pipe_or_model, **options)`: the one call that makes everything work, in place.

    sta_compile.compile(pipe, window=(18, 24, 24), transformer_2={"window": "full"})
    sta_compile.compile(model, scheduler=scheduler)         a denoiser alone
    sta_compile.restore(pipe)

It does what `model.compile(backend="sta", options={...})` does, and besides, for the time of a call only: lets Dynamo
capture sizes that depend on data, makes repeated blocks nested regions, and keeps for graphs that hold a single block what
the whole model knows: its grid and its noise level. What the timestep says about noise is read from the scheduler.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from . import _torch
from .checkpoints import entry, report_of
from .denoisers import denoisers_of, parts_of, unets_of
from .errors import StaError
from .layerwise_casting import cast_inside
from .leaf_offload import move_by_block
from .model_call import ModelCall, calling
from .noise_plan import check_timestep
from .prefix import Prefix
from .python_state import PythonState
from .regions import Regions
from .report import record
from .settings import OPTIONS, Settings, given_options, options_of_mode
from .size_tables import WithTables, small_constants
from .warn_once import say

log = logging.getLogger(__name__)
T = TypeVar("T")
_RECOMPILES = 64


def compile(
    pipe_or_model: T,
    *,
    scheduler: Any = None,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    regions: bool = True,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> T:
    """Compiles a model, or each denoiser of a pipeline, in place, and returns what it was given.

    scheduler: of the model's timesteps; a pipeline has its own. mode, fullgraph, dynamic: as for torch.compile.
    regions: compile blocks that the model repeats once. options and further keywords: options of sta_compile and of
    inductor for all denoisers; a keyword with the name of a part (`transformer_2={...}`) holds options for that part, which
    beat the others, and None leaves the part as it is. Raises StaError for a mistake in them.
    """
    options = given_options(options)
    if isinstance(pipe_or_model, torch.nn.Module):
        parts: dict[str, torch.nn.Module] = {"": pipe_or_model}
        own: dict[str, Any] = {}
    else:
        names = parts_of(pipe_or_model)
        own = {name: more.pop(name) for name in list(more) if name in names}
        for name, given in more.items():
            if isinstance(given, Mapping) and name not in OPTIONS:
                raise StaError(
                    f"{type(pipe_or_model).__name__} has no part {name!r}; its parts are {', '.join(names)}"
                )
        for name in unets_of(pipe_or_model):
            log.warning("%s has no tokens of video in its attention and is left as it is", name)
        parts = denoisers_of(pipe_or_model, own)
    shared = {**options_of_mode(mode), **options, **more}
    planned = {}
    for name in parts:
        given = own.get(name, {})
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise StaError(
                f"{name}={given!r} is no set of options; pass a dict, for example {name}={{'window': 'full'}}, or None "
                "to leave it as it is"
            )
        planned[name] = {**shared, **given}
        settings, _ = Settings.resolve(planned[name])
        check_timestep(parts[name], settings.timestep)
    for name, mine in planned.items():
        _restore(parts[name])  # of an earlier compile
        source = _Scheduler(scheduler, None if name == "" else pipe_or_model)
        run = CompiledModel(parts[name], mine, source, fullgraph, dynamic, regions)
        parts[name]._compiled_call_impl = run
        _torch.forget_skipped(parts[name])
    return pipe_or_model


def restore(pipe_or_model: T) -> T:
    """Undoes `compile`: the model, or each part of the pipeline, runs as it did before."""
    whole = isinstance(pipe_or_model, torch.nn.Module)
    parts: Iterable[Any] = [pipe_or_model] if whole else parts_of(pipe_or_model).values()
    for part in parts:
        _restore(part)
    return pipe_or_model


def _restore(part: torch.nn.Module) -> None:
    run: Any = part._compiled_call_impl
    if isinstance(run, CompiledModel):
        run.undo()
        del part._compiled_call_impl


class CompiledModel:
    """What `model(...)` runs once compiled."""

    def __init__(
        self,
        model: torch.nn.Module,
        options: Mapping[str, Any],
        scheduler: _Scheduler,
        fullgraph: bool,
        dynamic: bool | None,
        regions: bool,
    ) -> None:
        from .backend import sta

        self.model = model
        self.options = dict(options)
        self.scheduler = scheduler
        self.prefix = Prefix(model)
        self.regions = Regions(model, enabled=regions)
        self._undo = [move_by_block(model), cast_inside(model)]
        self._eager: Callable[..., Any] = model._call_impl
        given: dict[str, Any] = {"options": self.options} if options else {}
        backend = _torch.registered(sta, "sta")

        def compile(forward: Callable[..., Any], whole: bool = False) -> Callable[..., Any]:
            compiled: Callable[..., Any] = torch.compile(
                forward, backend=backend, fullgraph=whole, dynamic=dynamic, **given
            )
            return compiled

        self._compiled = WithTables(self._eager, partial(compile, whole=fullgraph))
        self.fullgraph = fullgraph
        self.static = False  # are shapes numbers, since attention breaks where they are not?
        self._may_be_static = dynamic is None
        self._whole = False  # has an earlier call replaced attention without that?
        self.watches = False  # is what comes before the blocks noted in each call?
        self.state = PythonState(model, compile)
        self._exact: set[Any] = set()  # see `_say_exact`

    def undo(self) -> None:
        """Gives the model's hooks back what they did."""
        while self._undo:
            self._undo.pop()()

    @entry
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # part of a whole that is being compiled
            return self._eager(*args, **kwargs)
        scheduler = self.scheduler.now()
        with _capture_sizes(), calling(self.model, scheduler, self.prefix, args, kwargs) as call:
            call.settle_noise(str(self.options.get("timestep", "auto")))
            out = self._run(call, args, kwargs)
            if call.lacks_grid and call.may_watch:
                self.watches = self.state.blocks_alone = True
            if call.hidden and self.prefix.blocks and not self.fullgraph:
                self.state.blocks_alone = True
            if call.breaks_inside and not self.fullgraph:
                self._mend_breaks(call)
            self._whole |= call.replaces and not call.breaks_inside
            if call.exact:
                self._say_exact(call.exact)
            if not self.fullgraph and self.state.count(call.compiles > 0, args, kwargs):
                log.info(
                    "%s is compiled in each call; now its blocks are, alone",
                    type(self.model).__name__,
                )
            return out

    def _say_exact(self, modules: Sequence[Any]) -> None:
        """Once, of modules that checkpoints run in Python."""
        if self._exact.issuperset(modules):
            return
        self._exact.update(modules)
        report = report_of(self.model, self._exact)
        record(report)
        say(report, self.model, silent=False)

    def _run(self, call: ModelCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        hooks = self.state.hooks()
        call.may_watch = (
            bool(self.prefix.blocks) and self.state.inside_blocks(hooks) and not self.fullgraph
        )
        call.in_parts = bool(hooks) or self.state.blocks_alone
        if call.in_parts:
            call.watched = self.watches and call.may_watch
            call.seen.writes_told = call.watched
            seen = self.prefix.watched(call.seen, call.state_leaving)
            watch = seen if call.watched else nullcontext()
            with self.state.apart(hooks), watch:
                if self.state.blocks_alone:
                    return self._eager(*args, **kwargs)
                return self._call(call, args, kwargs)
        if not self.regions.enabled:
            return self._call(call, args, kwargs)
        try:
            call.in_regions, call.numbers = True, self.regions.numbers
            with self.regions.active():
                return self._call(call, args, kwargs)
        except (torch._dynamo.exc.TorchDynamoException, _torch.UnknownSize) as error:
            cause = getattr(error, "inner_exception", None) or error
            if isinstance(cause, StaError):
                raise
            reason = str(cause).strip().partition("\n")[0]
            log.info("blocks can't be nested regions (%s); compiling without them", reason)
            log.debug("the whole error", exc_info=True)
        self.regions.off()
        call.in_regions = False
        return self._call(call, args, kwargs)

    def _call(self, call: ModelCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        timestep = call.argument(str(self.options.get("timestep", "auto")))
        return self._compiled(args, kwargs, apart_from=timestep, static=self.static)

    def _mend_breaks(self, call: ModelCall) -> None:
        """Attention whose queries and keys are made in other graphs, in later calls: sizes that a model reads from a tensor
        are numbers where its shapes are, and in a block that is compiled alone, which is given that tensor."""
        if self._whole and self._may_be_static:
            self.static = True
        elif not call.replaces and self.prefix.blocks:
            self.state.blocks_alone = True


class _Scheduler:
    """The scheduler that is given, or the one that a pipeline has at the time of a call."""

    def __init__(self, given: Any, pipe: Any) -> None:
        self._given = given
        try:
            self._pipe: Any = None if pipe is None else weakref.ref(pipe)
        except TypeError:  # a class that allows none
            self._pipe = lambda: pipe

    def now(self) -> Any:
        if self._given is not None or self._pipe is None:
            return self._given
        return getattr(self._pipe(), "scheduler", None)


@contextmanager
def _capture_sizes() -> Iterator[None]:
    """Sizes that depend on data (valid tokens of a prompt) are captured rather than breaking the graph, and those in small
    tables are numbers.

    Modules that are compiled one by one share the code of `nn.Module.__call__`, each with entries of its own, so the
    limit beyond which Dynamo gives up is higher.
    """
    settings = torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True,
        capture_scalar_outputs=True,
        recompile_limit=max(_RECOMPILES, torch._dynamo.config.recompile_limit),
    )
    with settings, small_constants():
        yield
