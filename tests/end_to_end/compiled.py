"""Models through Dynamo and the stages of the compiler, without inductor: the edited graphs run eagerly.

    variants = compile_variants(case.model, case.inputs, {"sparse": {...options}, "full": {...}})
    variants["sparse"].run(**inputs)        variants["sparse"].report

Dynamo traces a model once (seconds); each variant is a copy of its graph, edited under options of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.fx import GraphModule

from sta_compile._unwrapped import unwrapped
from sta_compile.noise_plan import conventions
from sta_compile.pipeline import rewrite
from sta_compile.report import Report
from sta_compile.settings import Settings

Options = Mapping[str, Any]
# Tests are about small grids, and most of them about the sparse steps.
DEFAULTS: Options = {"min_tokens": 0, "dense_above": None}


def data_dependent_sizes() -> AbstractContextManager[None]:
    """Lets Dynamo capture sizes that depend on data (Mochi drops padded text by its value)."""
    return torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    )


def copy_graph(gm: GraphModule) -> GraphModule:
    """A module whose graph and bodies are copies; nodes keep their fake values."""
    twin = GraphModule(gm, copy.deepcopy(gm.graph))
    for name, child in gm.named_children():
        if isinstance(child, GraphModule):
            setattr(twin, name, copy_graph(child))
    return twin


@dataclass
class Variant:
    """The compiled model under one set of options."""

    report: Report
    gm: GraphModule
    run: Callable[..., Any]


Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def eagerly(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


class RewritingBackend:
    """A backend that edits graphs and gives them to `finish`; `chosen` names the variant that a call takes."""

    def __init__(self, variants: Mapping[str, Options], finish: Compiler = eagerly) -> None:
        self.finish = finish
        self.settings = {
            name: Settings.resolve({**DEFAULTS, **options})[0] for name, options in variants.items()
        }
        self.chosen = next(iter(variants))
        self.reports: dict[str, list[Report]] = {name: [] for name in variants}
        self.graphs: dict[str, list[GraphModule]] = {name: [] for name in variants}

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        callables = {}
        for name, settings in self.settings.items():
            conventions.clear()
            with unwrapped():
                edited, report = rewrite(copy_graph(gm), example_inputs, settings)
            callables[name] = self.finish(edited, example_inputs)
            self.reports[name].append(report)
            self.graphs[name].append(edited)
        return lambda *args: callables[self.chosen](*args)


def compile_variants(
    model: Callable[..., Any],
    inputs: Mapping[str, Any],
    variants: Mapping[str, Options],
    finish: Compiler = eagerly,
    **compile_options: Any,
) -> dict[str, Variant]:
    """Every variant of a model that Dynamo captures as one graph."""
    torch._dynamo.reset()
    backend = RewritingBackend(variants, finish)
    compiled = torch.compile(model, backend=backend, fullgraph=True, **compile_options)

    def run_as(name: str) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            backend.chosen = name
            with data_dependent_sizes():
                return compiled(**inputs)

        return run

    run_as(backend.chosen)(**inputs)
    found = {}
    for name in variants:
        (report,), (gm,) = backend.reports[name], backend.graphs[name]
        found[name] = Variant(report, gm, run_as(name))
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())
