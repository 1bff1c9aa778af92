"""The stages of the compiler, in order. This is the page to read first.

    graph view -> dimension trace -> attention sites -> token grids -> tilings and windows -> layout -> noise level
    ---- facts above, edits below; a refusal above drops a site, never the model ----
    (the facts of a graph are found again if work on slices of a grid could be joined, or keys that were written into memory
    are read from where they came from)
    -> dense flags -> conversions -> attention operators -> verify

`rewrite` takes a Dynamo graph and edits it in place. If a stage fails the graph is as it was, and the report says why.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from . import _torch
from ._sizes import known_as_products, suppose
from .analysis.axes import Size, axis_size, same_size
from .analysis.find_attention import find_attention
from .analysis.graph_view import GraphView, is_parameter
from .analysis.hint_grid import infer_grids
from .analysis.infer_grid import GridInference, Refusal, VideoAttention
from .analysis.told_axes import told_axes
from .analysis.trace_dims import DimTrace, trace_dims
from .analysis.written_keys import WRITTEN
from .apply_plan import apply_plan
from .call_grids import (
    declared_tokens,
    leaving_of,
    other_sequences,
    specialise_inputs,
)
from .checkpoints import HINT, REASON, computed_anew
from .errors import StaError, StrictError
from .grid_plan import crossing_axes, plan_grids, stays_symbolic, unfit_grid
from .ir.known_tokens import UNKNOWN, Told
from .model_call import ModelCall, root_module
from .noise_plan import plan_noise
from .report import RefusedSite, ReplacedSite, Report
from .rewriting.forward_writes import forward_writes
from .rewriting.join_slices import join_slices
from .rewriting.repair_calls import repair_calls
from .rewriting.repair_outputs import repair_outputs
from .rewriting.repair_views import repair_views
from .rewriting.unread import drop_unread_attributes
from .rewriting.verify import record, verify
from .settings import Settings

log = logging.getLogger(__name__)

# What may be said of a graph without sites, first where it has other attention.
NOTHING_FOUND = (
    "its attention is not self-attention over video tokens",
    "it has no attention in this graph",
)
OTHER_STRIDES = (
    "the graph returns slices of tokens, whose strides would be others in tile order",
    "return them as .contiguous()",
)
CALL_SDPA = "call attention through torch.nn.functional.scaled_dot_product_attention"


def rewrite(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    *,
    kernel: str = "",
    remember: bool = True,
    call: ModelCall | None = None,
) -> tuple[torch.fx.GraphModule, Report]:
    """Replaces what can be replaced in a Dynamo graph, in place, and reports.

    kernel: name of what will run the attention, for the report. remember: keep what the first timestep says of the model's
    noise convention; an explanation leaves no trace. call: the call of a model that this compile is in, for what its earlier
    graphs proved. Raises StaError for a user's mistake in the settings, and
    StrictError if `strict` is set and an attention over a known grid stays as it is.
    """
    root = root_module()
    report = Report(name=_name(gm, root), settings=settings.to_dict())
    saved = _Saved(gm)
    try:
        _rewrite(gm, example_inputs, settings, report, root, kernel, remember, call, saved)
    except StaError:
        saved.restore()
        raise
    except Exception as error:
        # A model that we can't improve never raises: it runs as plain inductor would.
        if settings.strict:
            saved.restore()
            raise StrictError(
                f"rewriting {report.name} failed ({error}); please report this model, or pass strict=False"
            ) from error
        log.exception("rewriting %s failed; it runs unchanged", report.name)
        saved.restore()
        _give_up(report, f"an internal error: {type(error).__name__}: {error}")
    broken = next((site for site in report.refused if site.breaks_strict), None)
    if settings.strict and broken is not None:
        saved.restore()
        raise StrictError(f"{broken.name} can't be replaced: {broken.reason}. {broken.hint}")
    _save_artifact(report)
    return gm, report


def _rewrite(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    report: Report,
    root: torch.nn.Module | None,
    kernel: str,
    remember: bool,
    call: ModelCall | None,
    saved: _Saved,
) -> None:
    told = _told_by_call(gm, example_inputs, settings, report, call)
    drop_unread_attributes(gm)
    facts = _analyse(gm, example_inputs, settings, report, told)
    hinted = any(attention.grid.hint is not None for attention in facts.found)
    if hinted and call is not None and not _torch.is_whole_forward() and call.ask_prefix():
        # What is proved comes before what values say.
        told = _told_by_call(gm, example_inputs, settings, report, call)
        facts = _analyse(gm, example_inputs, settings, report, told)
    forwarded = any(r.reason == WRITTEN.reason for r in facts.refused) and bool(
        forward_writes(facts.trace.view)
    )
    if forwarded:
        facts = _analyse(gm, example_inputs, settings, report, told)
    before = record(gm)
    grids = [attention.grid.axis for attention in facts.found]
    may_join = settings.layout == "graph" and not crossing_axes(grids, settings.min_tokens)
    joined = may_join and bool(grids) and bool(join_slices(facts.trace, grids))
    if joined:
        facts = _analyse(gm, example_inputs, settings, report, told)
    trace, found, refused = facts.trace, facts.found, facts.refused
    if computed_anew():
        refused += [Refusal(attention.site.name, REASON, HINT) for attention in found]
        found = []
    with report.stage("plan"):
        planned, dropped = plan_grids(trace, found, settings)
        refused += dropped
    with report.stage("find noise level"):
        noise = plan_noise(trace.view, settings, example_inputs, root, remember=remember, call=call)
    if call is not None:
        report.leaving = leaving_of(gm, facts.inference, told=bool(report.asked))
        report.beside = other_sequences(facts.inference)
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    hints = [hint for plan in planned if (hint := plan.checked_hint) is not None]
    report.read = {inputs.index(hint.node): hint.positions for hint in hints}
    report.empty = {inputs.index(n): rows for n, rows in facts.inference.hints.empty.items()}
    report.refused += [
        RefusedSite(
            r.name,
            r.reason,
            r.hint,
            grid_known=r.over_grid,
            by_request=r.by_request,
            calls=facts.calls.get(r.name, 1),
        )
        for r in refused
    ]
    if not planned:
        if joined or forwarded:
            saved.restore()
        report.reason, report.hint = _nothing(len(facts.calls), refused)
        return
    report.noise = noise.report()
    with report.stage("rewrite"):
        apply_plan(trace.view, trace, planned, noise, settings)
    with report.stage("verify"):
        violations = repair_calls(verify(gm, before), before)
        violations = repair_views(violations, before)
        violations = repair_outputs(gm, violations, before)
        if violations and all(v.kind == "strides" for v in violations):
            saved.restore()
            _refuse(report, [site for plan in planned for site in plan.report(kernel)], facts)
            return
        if violations:
            raise RuntimeError("; ".join(v.message for v in violations[:3]))
        _recompile(gm)
    for grid in planned:
        report.replaced += [
            replace(site, calls=facts.calls[site.name]) for site in grid.report(kernel)
        ]
        report.conversions += grid.layout.logical


def _told_by_call(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    report: Report,
    call: ModelCall | None,
) -> Mapping[torch.fx.Node, Told]:
    """What earlier graphs tell of the inputs; sizes of these become numbers, with a guard.

    Of a graph with attention only: others need not be compiled again where something else is known.
    """
    if call is None or not find_attention(GraphView(gm)):
        return {}
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values = dict(zip(inputs, example_inputs, strict=True))
    given = [n for n in inputs if isinstance(values[n], torch.Tensor) and not is_parameter(n)]
    report.asked = tuple(inputs.index(n) for n in given)
    tensors, declared = [values[n] for n in given], declared_tokens(settings)
    known = call.told(tensors, declared)
    if any(doubt in UNKNOWN for each in known for _, doubt in each) and call.ask_prefix():
        known = call.told(tensors, declared)
    told = {node: each for node, each in zip(given, known, strict=True) if each}
    specialise_inputs(gm, {node: [dim for dim, _ in each] for node, each in told.items()})
    return told


@dataclass(frozen=True, eq=False)
class _Facts:
    """What is known of a graph: its axes, which of its attentions are over a grid, and how often each of all runs."""

    trace: DimTrace
    inference: GridInference
    calls: dict[str, int]
    found: list[VideoAttention]
    refused: list[Refusal]


def _analyse(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    report: Report,
    told: Mapping[torch.fx.Node, Told],
) -> _Facts:
    """The facts of a graph. Rows and columns of which guards know only how many tokens they make are numbers, each with a
    guard, where that shows a grid: a call has as many tokens as the last, in another shape."""
    env = _torch.shape_env_of(gm)
    symbols = set() if env is None else known_as_products(env)
    values = {s: n for s in symbols if (n := _torch.known_value(s, env)) is not None}
    if not values:
        return _facts(gm, example_inputs, settings, report, told)
    take_back = suppose(values, env)
    numbered = _facts(gm, example_inputs, settings, report, told)
    dynamic = any(_torch.must_stay_dynamic(symbol, env) for symbol in values)
    if numbered.found and not dynamic and not _torch.last_compile_of_frame():
        for symbol in values:
            _torch.specialise(symbol, env)
        return numbered
    take_back()
    facts = _facts(gm, example_inputs, settings, report, told)
    lost = {a.site.name for a in numbered.found} - {a.site.name for a in facts.found}
    others = [refusal for refusal in facts.refused if refusal.name not in lost]
    return replace(facts, refused=[*others, *(stays_symbolic(n, dynamic) for n in sorted(lost))])


def _facts(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    report: Report,
    told: Mapping[torch.fx.Node, Told],
    *,
    again: bool = True,
) -> _Facts:
    """again: once more, if it would help that some lengths are the same, which are in this call: each gets a guard."""
    with report.stage("view graph"):
        view = GraphView(gm)
    with report.stage("trace dimensions"):
        axes = told_axes(told)
        trace = trace_dims(view, axes.dims)
    with report.stage("find attention"):
        sites = find_attention(view)
    with report.stage("infer grid"):
        trace, inference = infer_grids(trace, sites, settings.grid, example_inputs, axes)
        answers = [inference.classify(site) for site in sites]
        found = [a for a in answers if isinstance(a, VideoAttention)]
        report.unfit_grid = unfit_grid(settings.grid, inference.lengths(sites), found)
        grids = [axis_size(attention.grid.axis) for attention in found]
        refused = [
            answer
            for site, answer in zip(sites, answers, strict=True)
            if isinstance(answer, Refusal)
            and (answer.over_grid or not found or _has_one_of(inference.lengths([site]), grids))
        ]
    if again and inference.equal_lengths and not _torch.last_compile_of_frame():
        for left, right in inference.equal_lengths.items():
            _torch.equate(left, right, _torch.shape_env_of(gm))
        return _facts(gm, example_inputs, settings, report, told, again=False)
    calls = {site.name: view.times(site.node) for site in sites}
    return _Facts(trace, inference, calls, found, refused)


def _has_one_of(lengths: Collection[Size], grids: Sequence[Size]) -> bool:
    """Is an attention without a grid over as many tokens as a video beside it? Others are over text there."""
    return any(same_size(length, grid) for length in lengths for grid in grids)


def _nothing(sites: int, refused: Sequence[Refusal]) -> tuple[str, str]:
    """Why a graph was left to inductor, and what to do."""
    if refused:
        return refused[0].reason, refused[0].hint
    if sites:
        return NOTHING_FOUND[0], "nothing to do"
    return (
        NOTHING_FOUND[1],
        "if the model has attention, a graph break or a custom operator hides it: compile by sta_compile.compile(model), "
        f"and {CALL_SDPA}",
    )


def _refuse(report: Report, sites: Sequence[ReplacedSite], facts: _Facts) -> None:
    """Says that the graph's outputs would have other strides, which the caller may rely on."""
    report.reason, report.hint = OTHER_STRIDES
    report.refused += [
        RefusedSite(site.name, *OTHER_STRIDES, calls=facts.calls[site.name]) for site in sites
    ]


def _give_up(report: Report, reason: str) -> None:
    report.replaced.clear()
    report.conversions = 0
    report.reason, report.hint = reason, "please report this model; it runs as with inductor"


def _name(gm: torch.fx.GraphModule, root: torch.nn.Module | None) -> str:
    return type(root).__name__ if root is not None else type(gm).__name__


def _recompile(gm: torch.fx.GraphModule) -> None:
    for module in _torch.graph_modules(gm):
        module.recompile()


class _Saved:
    """The graphs of a module and its bodies, to be put back if a stage fails."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.graphs = [
            (module, _torch.copy_graph(module.graph)) for module in _torch.graph_modules(gm)
        ]

    def restore(self) -> None:
        for module, graph in self.graphs:
            module.graph = graph


def _save_artifact(report: Report) -> None:
    """Under TORCH_TRACE the report stands beside the graphs, for tlparse."""
    _torch.save_artifact("sta_report", lambda: json.dumps(report.to_dict()))
