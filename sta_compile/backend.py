"""The Dynamo backend: `torch.compile(model, backend="sta", options={...})`, found by its entry point.

Options become Settings, the pipeline rewrites the graph, and inductor compiles the result with all that it offers:
AOTAutograd, caches, CUDA graphs. What can't be improved goes to inductor as it came. Importing this module is fast:
inductor, triton and networkx are imported when a graph arrives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.fx

if TYPE_CHECKING:
    from .model_call import ModelCall
    from .report import Report
    from .settings import Settings


# Models of which a forward has ended a graph before its end.
_in_parts: WeakSet[torch.nn.Module] = WeakSet()


def sta(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one Dynamo graph.

    mode: as for inductor ("reduce-overhead", ...); "max-autotune" measures attention kernels too. options: sta_compile's
    and inductor's in one dict.
    Raises StaError for a user's mistake in the options, and Dynamo passes it on.
    """
    from ._unwrapped import unwrapped

    with unwrapped():
        return _compile(gm, example_inputs, mode, options)


def _compile(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    from . import _inductor, _torch, _trace, model_call, warn_once
    from ._guards import (
        install_checkpoints_guard,
        install_config_guard,
        install_convention_guard,
        install_no_grid_guards,
        install_positions_guards,
        install_tokens_guard,
        names_of_inputs,
    )
    from .analysis.hints import TELL, how_to_tell
    from .analysis.operator_limits import BREAKS_INSIDE, FROM_OTHER_GRAPHS, ONE_BODY
    from .analysis.told_axes import UNSEEN
    from .call_grids import declared_tokens
    from .checkpoints import REASON
    from .pipeline import CALL_SDPA, NOTHING_FOUND
    from .regions import (
        RegionsHideTokens,
        RegionsLackGradients,
        RegionsTakeNumbers,
        lack_gradients,
    )
    from .report import record
    from .rewriting.add_input import example_of, take_over
    from .rewriting.region_numbers import settle_numbers
    from .settings import OPTIONS, Settings, options_of_mode
    from .tune_kernels import tune_kernels
    from .warm_kernels import warm_kernels, why_native

    settings, patches = Settings.resolve(options)
    patches = {**options_of_mode(mode), **patches}
    install_config_guard(name for name in OPTIONS if name not in (options or {}))
    model, call = model_call.root_module(), model_call.current()
    ends_at, names = _trace.break_after(gm), names_of_inputs(gm)
    numbers = settle_numbers(gm)
    if call is not None:
        call.compiles += 1
        if call.in_regions:
            if numbers is None or any(call.numbers.get(n, x) != x for n, x in numbers.items()):
                raise RegionsTakeNumbers("a number in a block differs from those of others")
            call.numbers.update(numbers)
        if call.in_regions and call.may_train and lack_gradients(gm, example_inputs):
            raise RegionsLackGradients("torch has no gradients of complex values in them")
    gm, report = rewrite_for_device(gm, example_inputs, settings, call=call)
    if call is not None and report.lacks_grid and call.ask_prefix():
        gm, report = rewrite_for_device(gm, example_inputs, settings, call=call)
    inside = [site for site in report.refused if site.reason == FROM_OTHER_GRAPHS.reason]
    unseen = any(site.reason == UNSEEN.reason for site in report.refused)
    if call is not None and report.lacks_grid and (call.broken or unseen):
        call.lacks_grid = True
        lacking = [site for site in report.refused if not site.grid_known and site not in inside]
        report.say_why(lacking, *call.why_no_grid())
    elif call is not None:  # what the blocks are told is told already
        report.advise(TELL, instead_of=how_to_tell())
    if call is not None:
        call.replaces |= bool(report.replaced)
        call.breaks_inside |= bool(inside)
        report.say_why(inside, call.last_break, BREAKS_INSIDE)
        call.last_break = ends_at and f"the one before it ends at: {ends_at}"
    if call is not None and call.in_regions:
        hidden = [site for site in report.refused if site.reason == ONE_BODY.reason]
        if hidden:
            raise RegionsHideTokens(f"{hidden[0].name}: {hidden[0].reason}")
    if report.replaced and _inductor.asks_for_max_autotune(mode, patches):
        with report.stage("measure kernels"):
            report.measured += tune_kernels(gm, _version())
    if report.replaced:
        with report.stage("build kernels"):
            report.name_kernels(warm_kernels(gm))
            report.say_native(why_native(gm))
    if _torch.is_whole_forward() and not _torch.last_compile_of_frame():
        read = {names[i]: positions for i, positions in report.read.items()}
        install_positions_guards(dict(zip(names, example_inputs, strict=False)), read)
    if not _torch.last_compile_of_frame():
        install_no_grid_guards({names[i]: rows for i, rows in report.empty.items()})
    flags = example_of(gm)
    if flags is not None:
        gm = take_over(gm)
    if report.replaced and settings.noise == "auto" and report.noise.needed and flags is None:
        install_convention_guard(settings.timestep)
    if report.replaced or any(site.reason == REASON for site in report.refused):
        install_checkpoints_guard()
    if report.asked:
        asked = {names[i]: example_inputs[i] for i in report.asked}
        install_tokens_guard(asked, declared_tokens(settings))
    if ends_at and model is not None:
        _in_parts.add(model)
    follows = call is None and model in _in_parts  # a graph of the same forward
    if report.reason in NOTHING_FOUND and (follows or not _torch.is_whole_forward()):
        report.reason = "this graph is a part of the model, and has no attention over video tokens"
        report.hint = "compile by sta_compile.compile(model), which keeps the model whole, or tells its parts what they need"
        if call is not None:
            report.hint = "nothing to do"
    elif report.reason in NOTHING_FOUND and call is not None:
        report.hint = (
            f"nothing to do if another graph of the model has it; if none has, {CALL_SDPA}"
        )
    record(report)
    warn_once.say(report, model, silent=bool(ends_at) or call is not None, apart=bool(inside))
    compiled = _torch.compile_with_inductor(
        gm,
        [*example_inputs, *([] if flags is None else [flags])],
        patches=patches,
        tag=_cache_tag(settings.fingerprint()),
    )
    if call is None:
        return compiled
    overwrites = _inductor.asks_for_cudagraphs(patches)
    return model_call.GraphInCall(compiled, report, settings, flags, overwrites)


def _reset() -> None:
    """For `torch._dynamo.reset()`: the next compile is as in a new process."""
    from . import _inductor, read_positions, warn_once
    from .noise_plan import conventions
    from .report import reset_reports

    reset_reports()
    conventions.clear()
    read_positions.forget()
    warn_once.forget()
    _in_parts.clear()
    _inductor.reset_cudagraphs()


sta.reset = _reset  # type: ignore[attr-defined]


def device_of(example_inputs: Sequence[Any]) -> torch.device:
    devices = [x.device for x in example_inputs if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def rewrite_for_device(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    *,
    remember: bool = True,
    call: ModelCall | None = None,
    device: torch.device | None = None,
) -> tuple[torch.fx.GraphModule, Report]:
    """The stages, on a device that we speed up; on any other the graph as it came, and why.

    A CPU runs the reference. Tensors on meta (an explanation) stand for those of a GPU. device: that of the inputs if None.
    """
    from . import _torch
    from .pipeline import rewrite
    from .report import Report
    from .runtime.target import detect

    target = detect(device or device_of(example_inputs))
    if target.unsupported and target.kind not in ("cpu", "meta"):
        model = _torch.root_module()
        return gm, Report(
            name=type(model).__name__ if model is not None else "graph",
            settings=settings.to_dict(),
            reason=target.unsupported,
            hint="use an NVIDIA GPU of compute capability 8.0 or later",
        )
    kernel = settings.kernel
    if kernel == "auto" and target.kind == "cpu":
        kernel = "reference"
    return rewrite(gm, example_inputs, settings, kernel=kernel, remember=remember, call=call)


@lru_cache(maxsize=1)
def _source_hash() -> str:
    """Hash of the package's own sources: compiled artifacts call our operators, so a new version must not find old ones."""
    digest = hashlib.sha256()
    stack = [
        files("sta_compile"),
        files("sta_compile.codegen"),
        files("sta_compile.cutlass_templates"),
    ]
    while stack:
        for entry in sorted(stack.pop().iterdir(), key=lambda e: e.name):
            if entry.is_dir():
                stack.append(entry)
            elif entry.name.endswith((".py", ".jinja", ".hpp", ".cuh")):
                digest.update(entry.name.encode() + entry.read_bytes())
    return digest.hexdigest()


def _cache_tag(fingerprint: str) -> str:
    return f"{_version()} {fingerprint}"


def _version() -> str:
    """Of everything that decides what a compiled graph computes, and how fast."""
    from ._version import __version__

    return f"sta_compile {__version__} {_source_hash()}"
