"""Models that we can't improve run as inductor compiles them, and one warning says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import sta_compile
from sta_compile import _torch
from sta_compile.analysis.graph_view import module_path
from sta_compile.errors import StrictError
from tests.end_to_end.compiled import compile_variants
from tests.end_to_end.models import FAMILIES
from tests.end_to_end.other_models import (
    OTHERS,
    build,
    language_model,
    latte,
    resnet,
    sana_video,
)

every_model = pytest.mark.parametrize("builder", OTHERS, ids=lambda builder: builder.__name__)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@contextmanager
def at_default_filters() -> Iterator[list[warnings.WarningMessage]]:
    """What a user sees who never touched the warnings module: pytest shows more."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=PendingDeprecationWarning)
        warnings.filterwarnings("ignore", category=ImportWarning)
        warnings.filterwarnings("ignore", category=ResourceWarning)
        yield seen


@pytest.fixture
def given_to_inductor(monkeypatch) -> list[str]:
    """The code of the graphs that reach inductor, in whose place they run eagerly here."""
    given: list[str] = []

    def compile_eagerly(gm, example_inputs, **_):
        given.append(gm.print_readable(print_output=False))
        return gm.forward

    monkeypatch.setattr(_torch, "compile_with_inductor", compile_eagerly)
    return given


def graph_of(model: torch.nn.Module, inputs: dict) -> str:
    """The code of the graph as Dynamo captures it."""
    found: list[str] = []

    def backend(gm, example_inputs):
        found.append(gm.print_readable(print_output=False))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(**inputs)
    torch._dynamo.reset()
    return found[0]


def ours(seen: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in seen if str(w.message).startswith("sta:")]


@every_model
def test_the_graph_is_left_alone_and_one_warning_says_why(builder, given_to_inductor):
    model, inputs = build(builder)
    unchanged = graph_of(model, inputs)
    expected = model(**inputs)[0]
    compiled = torch.compile(model, backend="sta", fullgraph=True, options={"min_tokens": 0})
    with at_default_filters() as seen:
        for _ in range(3):
            assert torch.equal(compiled(**inputs)[0], expected)
    assert given_to_inductor == [unchanged]
    (said,) = ours(seen)
    assert "nothing was replaced" in said
    assert OTHERS[builder] in said
    (report,) = sta_compile.reports()
    assert not report.replaced
    assert report.conversions == 0
    modules = dict(model.named_modules())
    assert all(site.name in modules for site in report.refused)


def test_each_of_two_models_is_spoken_of_once(given_to_inductor):
    """Also where both are compiled by the same line, and where one of them is compiled twice."""
    with at_default_filters() as seen:
        for builder in (resnet, sana_video):
            model, inputs = build(builder)
            for options in ({"min_tokens": 0}, {"min_tokens": 1}):
                torch.compile(model, backend="sta", options=options)(**inputs)
    assert len(ours(seen)) == 2
    assert all(w.category is UserWarning for w in seen if str(w.message).startswith("sta:"))


@pytest.mark.slow
@pytest.mark.parametrize("builder", [resnet, language_model])
def test_equal_to_inductor(builder: Callable):
    model, inputs = build(builder)
    expected = torch.compile(model, backend="inductor", fullgraph=True)(**inputs)[0]
    torch._dynamo.reset()
    found = torch.compile(model, backend="sta", fullgraph=True)(**inputs)[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("builder", [resnet, language_model, sana_video])
def test_strict_is_about_known_grids_only(builder, given_to_inductor):
    model, inputs = build(builder)
    options = {"min_tokens": 0, "strict": True}
    torch.compile(model, backend="sta", fullgraph=True, options=options)(**inputs)
    assert len(given_to_inductor) == 1


def test_strict_raises_where_the_grid_is_known(given_to_inductor):
    model, inputs = build(latte)
    with pytest.raises(StrictError, match="factorised attention"):
        torch.compile(model, backend="sta", options={"min_tokens": 0, "strict": True})(**inputs)
    assert given_to_inductor == []


def test_strict_is_content_with_a_model_that_is_replaced_whole():
    case = FAMILIES["hunyuan"].case(2, (3, 4, 6))
    report = compile_variants(case.model, case.inputs, {"sta": {"strict": True}})["sta"].report
    assert len(report.replaced) == len(case.sites)


def test_text_beside_the_grid_is_left_alone():
    """HunyuanVideo refines its text by self-attention of its own, which is neither replaced nor reported."""
    case = FAMILIES["hunyuan"].case(2, (3, 4, 6))
    variant = compile_variants(case.model, case.inputs, {"sta": {}})["sta"]
    assert not any("refiner" in site.name for site in variant.report.replaced)
    assert not variant.report.refused
    left = [n for n in variant.gm.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert len(left) == 1
    assert module_path(left[0]) == "context_embedder.token_refiner.refiner_blocks.0.attn"


def test_strict_accepts_attention_that_an_option_keeps_exact():
    case = FAMILIES["wan"].case(1, (3, 5, 7))
    options = {"min_tokens": 10_000, "strict": True}
    with torch.no_grad():
        variant = compile_variants(case.model, case.inputs, {"sta": options})["sta"]
    assert all(site.by_request for site in variant.report.refused)
    assert len(variant.report.refused) == len(case.sites)
