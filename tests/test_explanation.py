from __future__ import annotations

import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

import sta_compile
from sta_compile import explain
from sta_compile.errors import UnknownOptionError
from sta_compile.explanation import Explanation, Schedule
from sta_compile.report import NoiseReport, ReplacedSite, Report
from tests.end_to_end.tiny import TinyVideo

X = torch.ones(1, 4)


@pytest.fixture(autouse=True)
def _clean():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def pipeline(monkeypatch):
    """The stages, replaced by one that edits every graph in place and reports its calls."""

    def rewrite(gm, example_inputs, settings, *, kernel, remember, call):
        assert not remember, "an explanation leaves no trace"
        calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
        for node in calls:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        site = ReplacedSite("block.0", (1, 1, 1), (), (1, 1, 1), (1, 1, 1), (1, 1, 1), 0.5, "t")
        noise = NoiseReport("t", "0..1000", "stub")
        inputs = [tuple(x.shape) for x in example_inputs if isinstance(x, torch.Tensor)]
        report = Report("Stub", [site] * len(calls), noise=noise, seconds={"edit": 1.0})
        report.settings = settings.to_dict() | {"inputs": inputs}
        return gm, report

    stub = types.ModuleType("sta_compile.pipeline")
    stub.rewrite = rewrite
    monkeypatch.setitem(sys.modules, "sta_compile.pipeline", stub)
    monkeypatch.setattr(sta_compile, "pipeline", stub, raising=False)


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, *, scale=2.0):
        return F.relu(self.linear(x)) * scale


class Breaking(torch.nn.Module):
    """Graph breaks in forward and in a function that it calls."""

    def __init__(self):
        super().__init__()
        self.inner = Small()

    def forward(self, x):
        x = self.inner(x) + 1
        x = halve(x)
        return x.sin()


class BreakingInALoop(torch.nn.Module):
    """Dynamo gives up forward, and compiles what it calls."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Sequential(Small()) for _ in range(2)])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
            torch._dynamo.graph_break()
        return x


def halve(x):
    x = x / 2
    torch._dynamo.graph_break()
    return x.cos()


def entries(function):
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    found = _debug_get_cache_entry_list(function.__code__)
    return sum(not isinstance(e.guard_manager, DeletedGuardManagerWrapper) for e in found)


@pytest.mark.usefixtures("pipeline")
class TestTracing:
    def test_one_graph_reads_like_one_report(self):
        explanation = explain(Small(), options={"window": "full"})(X, scale=3.0)
        assert isinstance(explanation, Explanation)
        assert len(explanation) == 1
        assert len(explanation.replaced) == 3
        assert explanation.settings["window"] == "full"
        assert explanation.noise.convention == "0..1000"
        assert explanation.seconds == {"edit": 1.0}
        assert explanation.name == "Small"
        assert explanation.to_dict()["graphs"] == 1
        assert "block.0" in str(explanation)

    def test_nothing_in_the_process_changes(self):
        model = Small()
        compiled = torch.compile(model, backend="eager")
        compiled(X)
        before = (entries(Small.forward), dict(torch._dynamo.utils.counters["stats"]))
        rng = torch.get_rng_state()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            explain(compiled)(X)
            explain(model)(torch.ones(3, 4))
        assert (entries(Small.forward), dict(torch._dynamo.utils.counters["stats"])) == before
        assert torch.equal(rng, torch.get_rng_state())
        assert sta_compile.reports() == []

        def recompiled(*_):
            raise AssertionError("compiled again")

        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(X)

    def test_another_size_does_not_make_the_next_compile_dynamic(self):
        shapes = []

        def backend(gm, inputs):
            shapes.extend(x.shape for x in inputs if x.ndim == 2)
            return gm.forward

        model = Small()
        for rows in (2, 3, 5):
            explain(model)(torch.ones(rows, 4))
        torch.compile(model, backend=backend)(torch.ones(7, 4))
        assert torch.Size([7, 4]) in shapes
        assert all(isinstance(size, int) for shape in shapes for size in shape)

    def test_compiled_models_are_unwrapped(self):
        model = Small()
        expected = explain(model)(X)
        assert explain(torch.compile(model))(X).to_dict() == expected.to_dict()
        model.compile()
        assert explain(model)(X).to_dict() == expected.to_dict()
        assert len(explain(torch.compile(halve))(X)) == 2

    def test_a_model_of_compiled_parts_gets_a_note(self):
        model = Breaking()
        assert explain(model)(X).note == ""
        model.inner.compile()
        assert "compiled one by one" in explain(model)(X).note
        assert explain(torch.compile(model))(X).note == ""

    def test_graph_breaks_give_several_graphs_and_the_run_is_right(self):
        torch.manual_seed(0)
        model = Breaking()
        compiled = torch.compile(model, backend="eager")
        expected = compiled(X)
        before = (entries(Breaking.forward), entries(halve))
        assert before[1]
        explanation = explain(model)(X)
        assert len(explanation) == 4
        assert len(explanation.replaced) == 7
        assert "4 graphs" in str(explanation)
        assert (entries(Breaking.forward), entries(halve)) == before
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(X), expected)

    def test_a_first_explanation_leaves_no_entries(self):
        explain(Breaking())(X)
        assert entries(halve) == entries(Breaking.forward) == entries(Small.forward) == 0

    def test_a_frame_that_breaks_in_a_loop_is_given_up_and_the_functions_that_it_calls_are_seen(
        self,
    ):
        graphs = []

        def collect(gm, example_inputs):
            graphs.append(gm)
            return gm.forward

        model = BreakingInALoop()
        torch._dynamo.reset()
        torch.compile(model, backend=collect)(X)
        torch._dynamo.reset()
        assert len(explain(model)(X)) == len(graphs) > 1

    def test_fullgraph_says_where_the_break_is(self):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
            explain(Breaking(), fullgraph=True)(X)

    def test_meta_and_fake_tensors(self):
        with torch.device("meta"):
            meta = Small()
        assert len(explain(meta)(X.to("meta")).replaced) == 3
        with torch._subclasses.FakeTensorMode():
            fake, x = Small(), torch.ones(1, 4)
        explanation = explain(fake)(x, scale=1.5)
        assert len(explanation.replaced) == 3
        assert (1, 4) in explanation.settings["inputs"]

    def test_functions_and_callables(self):
        import functools

        assert len(explain(functools.partial(halve))(X)) == 2

    def test_a_device_without_kernels_is_said(self, monkeypatch):
        from sta_compile.ir.target import Target
        from sta_compile.runtime import target

        monkeypatch.setattr(target, "detect", lambda _: Target("hip", unsupported="AMD"))
        explanation = explain(Small())(X)
        assert explanation.replaced == []
        assert "AMD; use an NVIDIA GPU" in explanation.summary()

    def test_an_error_of_a_stage_is_raised_as_it_is(self, monkeypatch):
        def fail(*_, **__):
            raise sta_compile.StaError("strict")

        monkeypatch.setattr(sta_compile.pipeline, "rewrite", fail)
        with pytest.raises(sta_compile.StaError, match="strict"):
            explain(Small())(X)

    def test_timesteps(self):
        timesteps = torch.tensor([1000.0, 960.0, 900.0, 100.0])
        explanation = explain(Small(), timesteps=timesteps)(X)
        assert explanation.dense_steps == [0, 1]
        assert explanation.schedule.speedup == pytest.approx(1 / (0.5 + 0.5 * 0.5))
        assert "dense steps: 2 of 4 (0-1)" in str(explanation)
        assert explanation.to_dict()["schedule"]["dense_steps"] == [0, 1]
        none = explain(Small(), options={"dense_above": None}, timesteps=timesteps)(X)
        assert none.dense_steps == []

    def test_values_that_meta_tensors_lack_come_from_the_schedule(self, monkeypatch):
        rewrite = sta_compile.pipeline.rewrite

        def unknown(*args, **kwargs):
            gm, report = rewrite(*args, **kwargs)
            report.noise = NoiseReport("timestep", None, "no value")
            return gm, report

        monkeypatch.setattr(sta_compile.pipeline, "rewrite", unknown)
        timesteps = [999.0, 960.0, 500.0]
        assert explain(Small())(X).noise.unknown
        assert explain(Small(), timesteps=[0.0])(X).dense_steps == [0]
        explanation = explain(Small(), timesteps=timesteps)(X)
        assert explanation.noise.convention == "0..1000"
        assert explanation.dense_steps == [0, 1]


def test_options_are_checked_before_anything_is_traced():
    with pytest.raises(sta_compile.StaError, match="did you mean 'window'"):
        explain(Small(), options={"windw": 1})


def test_an_empty_schedule_gains_nothing():
    assert Schedule((), (), 0.4, "0..1").speedup == 1.0
    assert "none" in str(Schedule((1.0,), (False,), 0.5, "0..1"))


def test_options_are_keywords_too():
    explained = sta_compile.explain(TinyVideo(), window=(1, 3, 3), tile=(1, 2, 2), min_tokens=0)
    (site,) = explained(torch.randn(1, 4, 3, 4, 6)).replaced
    assert site.tile == (1, 2, 2)
    with pytest.raises(UnknownOptionError, match="did you mean 'window'"):
        sta_compile.explain(TinyVideo(), windows=(1, 3, 3))
