"""The benchmark on a CPU: what it checks, how contestants take turns, what it prints and writes."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from sta_compile.__main__ import main
from sta_compile.bench.chart import draw
from sta_compile.bench.check import WrongResult, check
from sta_compile.bench.inputs import Contestant, Inputs, ours
from sta_compile.bench.measure import Options, Row, measure
from sta_compile.bench.table import as_table
from sta_compile.bench.workloads import BACKWARD, FORWARD, SMALL, workloads
from sta_compile.errors import StaError
from sta_compile.runtime.timing import interleaved

CPU = torch.device("cpu")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.name)
def test_the_operator_is_right(workload):
    inputs = Inputs.make(workload, CPU)
    limit = {"native": 1e-5, "fp8": 5.5e-2, "nvfp4": 0.17}[workload.precision]
    assert check(inputs, ours(inputs, "auto")) < limit


@pytest.mark.parametrize(
    "change", [{"window": (1, 3, 1)}, {"tiles": (3, 3, 3)}, {"dense": (True,)}]
)
def test_another_window_is_found_out(change):
    inputs = Inputs.make(SMALL[0], CPU)
    other = ours(Inputs.make(replace(SMALL[0], **change), CPU), "auto")
    with pytest.raises(WrongResult, match="relative error"):
        check(inputs, replace(other, pattern=SMALL[0].pattern))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_wrong_gradient_is_found_out(which):
    inputs = Inputs.make(SMALL[-1], CPU)
    right = ours(inputs, "auto")

    def wrong():
        gradients = list(right.result())
        gradients[which] = gradients[which] * 1.1
        return tuple(gradients)

    with pytest.raises(WrongResult, match="over"):
        check(inputs, replace(right, result=wrong))


def test_a_sample_that_is_sparse_in_place_of_dense_is_found_out():
    mixed = next(w for w in SMALL if len(w.dense) > 1)
    inputs = Inputs.make(mixed, CPU)
    other = ours(Inputs.make(replace(mixed, dense=mixed.dense[::-1]), CPU), "auto")
    with pytest.raises(WrongResult, match="relative error"):
        check(inputs, replace(other, pattern=mixed.pattern))


def test_what_is_not_written_is_found_out():
    inputs = Inputs.make(SMALL[0], CPU)
    empty = torch.full_like(inputs.q, torch.nan)
    with pytest.raises(WrongResult, match="NaN"):
        check(inputs, Contestant("lazy", SMALL[0].pattern, lambda: None, lambda: (empty,)))


def test_contestants_take_turns_and_medians_count():
    order = []

    class Watch:
        def measure(self, run):
            return run(), [1500.0 + len(order)]

    def contestant(name, *times):
        left = iter(times)
        return lambda: (order.append(name), next(left))[1]

    runs = {"a": contestant("a", 9.0, 1.0, 2.0), "b": contestant("b", 3.0, 3.0, 8.0)}
    found = interleaved(runs, Watch(), seconds=0, rounds=3)
    assert order == ["a", "b"] * 3
    assert (found["a"].ms, found["b"].ms) == (2.0, 3.0)
    assert found["a"].rounds == 3
    assert found["b"].megahertz == 1504.0


def test_a_turn_is_as_many_runs_as_it_takes():
    ran = {"short": 0, "long": 0}

    class Watch:
        def measure(self, run):
            before = sum(ran.values())
            name = run()
            assert sum(ran.values()) - before in (1, {"short": 7, "long": 1}[name])
            return {"short": 3.0, "long": 30.0}[name] * (sum(ran.values()) - before), []

    def contestant(name):
        def run():
            ran[name] += 1
            return name

        return run

    runs = {name: contestant(name) for name in ran}
    found = interleaved(runs, Watch(), seconds=0, rounds=4, turn=20.0)
    assert ran == {"short": 1 + 4 * 7, "long": 1 + 4}  # one run to see how long it takes
    assert (found["short"].ms, found["long"].ms) == (3.0, 30.0)
    assert found["short"].rounds == 4


def test_a_wrong_peer_is_named_and_not_timed(monkeypatch):
    from sta_compile.bench import measure as module

    class Wrong:
        name, dense = "flash", True

        def refuse(self, inputs):
            return ""

        def prepare(self, inputs):
            return Contestant("flash", SMALL[0].everything, lambda: None, lambda: (inputs.q,))

    monkeypatch.setattr(module, "PEERS", (Wrong(),))
    row = measure(SMALL[0], Options(CPU, seconds=0, rounds=1))
    assert row.ms.keys() == {"sta"}
    assert "relative error" in row.missing["flash"]
    assert not row.speedup


def test_beside_text_the_video_alone_takes_turns():
    row = measure(SMALL[1], Options(CPU, peers=(), seconds=0, rounds=1))
    assert SMALL[1].name == "small text"
    assert list(row.ms) == ["sta", "sta without text"]
    pairs = [row.tflops[name] * row.ms[name] for name in row.ms]
    assert pairs[0] > pairs[1] > 0


def test_a_wrong_kernel_fails_the_run(monkeypatch, capsys):
    from sta_compile.bench import measure as module

    def wrong(inputs, kernel):
        return Contestant("sta", inputs.workload.pattern, lambda: None, lambda: (inputs.q,))

    monkeypatch.setattr(module, "ours", wrong)
    row = measure(SMALL[0], Options(CPU, seconds=0, rounds=1))
    assert "nothing of it is timed" in row.failed
    assert not row.ms


@needs_no_gpu
def test_small_sizes_run_on_a_cpu(capsys, tmp_path):
    found, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["--small", "--only", "small 333", "--seconds", "0", "--peers", "flash,flex STA"]
    assert main(["bench", *arguments, "--json", str(found), "--chart", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "small 333: reference, 27.0% of pairs" in out
    assert "flex STA is not measured: NotImplementedError" in out  # the backward, on a CPU
    head, forward, backward = json.loads(found.read_text())
    assert {"date", "device", "torch", "commit", "command"} <= head.keys()
    assert head["command"].startswith("python -m sta_compile bench --small --only 'small 333'")
    assert forward["ms"].keys() == forward["tflops"].keys() == {"sta", "flash", "flex STA"}
    assert forward["speedup"]["flash"] == 1
    assert forward["error"] < 1e-5
    assert backward["direction"] == "backward"
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs_no_gpu
@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([], "needs an NVIDIA GPU of compute capability 8.0 or later"),
        (["--small", "--peers", "flashh"], "there is no peer 'flashh'"),
        (
            ["--small", "--only", "nothing", "--direction", "backward"],
            "no workload's name has 'nothing' in it; pass a part of one of small 333 backward",
        ),
        (["--small", "--kernel", "fast"], "not a value of the option kernel"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, hint):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1


def test_a_chart_needs_something_to_draw():
    with pytest.raises(StaError, match="nothing was measured"):
        draw([Row("failed", "forward", failed="no")], "cpu")


@pytest.mark.parametrize(
    ("tflops", "unit", "cell"),
    [({"sta": 706.4, "flash": 9.28}, "TFLOP/s", "706"), ({"sta": 3.6e-4, "flash": 0.0588}, "GFLOP/s", "0.36"),
     ({"sta": 1.56e-5}, "MFLOP/s", "16")],
)  # fmt: skip
def test_rates_are_in_a_unit_that_fits(tflops, unit, cell):
    """And columns of which nothing is known are left out."""
    row = Row("case", "forward", ms=dict.fromkeys(tflops, 1.0), tflops=tflops, share={"sta": 0.004})
    text = io.StringIO()
    Console(file=text, width=120).print(as_table(row))
    assert unit in text.getvalue()
    assert f" {cell} " in text.getvalue()
    assert "0.40%" in text.getvalue()
    assert "MHz" not in text.getvalue()


def test_workloads():
    names = [w.name for w in (*FORWARD, *BACKWARD, *SMALL)]
    assert len(set(names)) == len(names)
    assert {w.backward for w in workloads(False, "W1", "backward")} == {True}
    assert not any("nvfp4" in w.name for w in workloads(False, "W1", "both"))
    assert len(workloads(False, "nvfp4", "both")) == len(workloads(False, "full nvfp4", "both")) + 1
    assert {w.grid for w in FORWARD} >= {
        (30, 48, 80),
        (21, 45, 80),
        (33, 45, 80),
        (13, 30, 45),
        (28, 30, 53),
        (31, 44, 80),
    }
    for w in FORWARD:
        if not w.text:
            flags = w.dense or (False,)
            cases = [w.geometry().full() if dense else w.geometry() for dense in flags]
            assert w.pattern.pairs == sum(geometry.pairs(w.heads) // w.heads for geometry in cases)
