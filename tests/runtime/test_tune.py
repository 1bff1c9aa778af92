"""mode="max-autotune" without a GPU: what is measured, kept and chosen, with a timer that is made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sta_compile import config
from sta_compile.codegen.select import select, variants
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.kernel_spec import parse_choice
from sta_compile.ir.target import SHARED_MEMORY, Target
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import disk_cache, prepare, problem, tune
from sta_compile.runtime.prepare import Request
from sta_compile.tune_kernels import tune_kernels

BF16 = torch.bfloat16
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SPEC = AttentionSpec(("video",), tiles=(3, 4, 4), window=(3, 3, 3)).text()
GEOMETRY = geometry_of([1536], (6, 16, 16), SPEC)
REQUEST = Request((1, 4, 1536, 128), 2, 1536, BF16, CUDA, GEOMETRY, 0)


@pytest.fixture(autouse=True)
def hopper(monkeypatch, tmp_path):
    """A GPU that isn't there, an empty folder of kernels, a process that has measured nothing."""
    for module in (problem, prepare, tune):
        monkeypatch.setattr(
            module, "detect", lambda d: Target.cuda(90, 132) if d.type == "cuda" else Target("cpu")
        )
    monkeypatch.setattr(tune, "_tuned", {})
    with config.patch(cache_dir=str(tmp_path)):
        yield tmp_path


class Timer:
    """fast: the text of the kernel that takes least time."""

    def __init__(self, fast="", fails=()):
        self.fast, self.fails, self.asked = fast, fails, []

    def __call__(self, request, specs):
        self.asked.append(specs)
        return {
            spec: 1.0 if self.fast in spec.text() and self.fast else 2.0 + number
            for number, spec in enumerate(specs)
            if not any(text in spec.text() for text in self.fails)
        }


def another_process():
    tune._tuned.clear()


def test_the_fastest_is_chosen_and_kept():
    timer = Timer("triton forward sm90 bf16 d128 64x128 warps=4 stages=2 tma")
    first = tune.tune(REQUEST, "v", timer)
    assert first.choice == "triton,tma,64,128,4,2"
    assert not first.stored
    assert "64x128" in first.text().split(",")[0]
    tune.tune(REQUEST, "v", timer)
    another_process()
    second = tune.tune(REQUEST, "v", Timer(fails=("",)))
    assert second == replace(first, stored=True)
    assert len(timer.asked) == 1
    specs = timer.asked[0]
    assert specs[0] == select(REQUEST.problem(), "auto")[0][0]
    assert len(set(specs)) == len(specs) > 10


@pytest.mark.parametrize(
    "change",
    [
        {"geometry": geometry_of([1536], (6, 16, 16), SPEC.replace("3,3,3", "1,3,3"))},
        {"dense": True},
        {"dtype": torch.float16},
        {"kernel": "triton"},
        {"token_major": False, "shape": (1, 4, 1536, 64)},
    ],
)
def test_another_problem_is_another_measurement(change):
    timer = Timer()
    tune.tune(REQUEST, "v", timer)
    tune.tune(replace(REQUEST, **change), "v", timer)
    tune.tune(REQUEST, "another version", timer)
    tune.tune(replace(REQUEST, shape=(2, 8, 1536, 128), kv_heads=4), "v", timer)  # of one head
    assert len(timer.asked) == 3


def test_of_two_processes_the_first_answer_counts():
    other = Timer("128x64 warps=8 stages=4 pointer")
    mine = Timer("64x64 warps=4 stages=3 tma")

    def both(request, specs):
        theirs = tune.tune(request, "v", other)
        another_process()
        assert theirs.choice == "triton,pointer,128,64,8,4"
        return mine(request, specs)

    assert tune.tune(REQUEST, "v", both).choice == "triton,pointer,128,64,8,4"


def test_a_damaged_answer_is_measured_again(hopper):
    tune.tune(REQUEST, "v", Timer("64x64 warps=4 stages=3 tma"))
    another_process()
    (file,) = hopper.glob("sta_kernels/*.sta")
    file.write_bytes(file.read_bytes()[:-3])
    assert tune.tune(REQUEST, "v", Timer("64x64 warps=4 stages=2 tma")).choice.endswith(",4,2")
    another_process()
    assert tune.tune(REQUEST, "v", Timer(fails=("",))).choice == "triton,tma,64,64,4,2"


def test_a_process_measures_once_where_nothing_can_be_kept(monkeypatch):
    monkeypatch.setattr(disk_cache, "store", lambda *_, **__: False)
    timer = Timer("64x64 warps=4 stages=3 tma")
    assert tune.tune(REQUEST, "v", timer) == tune.tune(REQUEST, "v", timer)
    assert len(timer.asked) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"device": CPU},
        {"device": torch.device("meta")},
        {"geometry": None},
        {"kernel": "reference"},
        {"kernel": "cutlass"},  # one kernel
    ],
)
def test_nothing_to_measure(change):
    timer = Timer()
    assert tune.tune(replace(REQUEST, **change), "v", timer) is None
    assert not timer.asked


def test_no_kernel_that_runs_is_no_choice():
    assert tune.tune(REQUEST, "v", Timer(fails=("",))) is None


def test_variants_fit_and_a_choice_comes_first():
    p = REQUEST.problem()
    for spec in variants(p, "triton"):
        row = 2 * spec.padded_head_dim
        assert (spec.blocks.m + 2 * spec.blocks.stages * spec.blocks.n) * row <= SHARED_MEMORY[90]
        assert parse_choice(spec.choice) == (spec.emitter, spec.loads, spec.blocks)
        assert select(p, "auto", spec.choice)[0][0] == spec
    usual = select(p, "auto")[0]
    assert select(p, "auto", usual[0].choice)[0] == usual
    assert select(p, "auto", "triton,tma,64,64,4,2")[0][1:] == usual
    fp32 = replace(REQUEST, dtype=torch.float32).problem()
    assert select(fp32, "auto", "cutlass,tma,192,128,16,2") == select(fp32, "auto")  # refuses


def test_one_head_or_as_many_as_fill_the_gpu():
    large = replace(REQUEST, shape=(2, 24, 115200, 128), kv_heads=24)
    assert tune.of_few_heads(large, 132).shape == (1, 1, 115200, 128)
    small = replace(REQUEST, shape=(2, 24, 8192, 128), kv_heads=12)
    assert tune.of_few_heads(small, 132).shape == (1, 10, 8192, 128)
    assert tune.of_few_heads(small, 132).kv_heads == 5
    assert tune.of_few_heads(REQUEST, 132).shape == REQUEST.shape


class Runner:
    """Kernels of 128 rows are right, those of 64 rows are wrong, and 4 stages do not compile."""

    def build(self, spec, device):
        if spec.blocks.stages == 4:
            raise RuntimeError("no shared memory left")
        return spec

    def bind(self, spec, binary, tensors, geometry, scale, price=0.0):
        return lambda t: t.out.copy_(t.q if spec.blocks.m == 128 else 2 * t.q)


def test_what_fails_or_is_wrong_is_not_measured(monkeypatch):
    monkeypatch.setattr(tune, "runner_of", lambda emitter: Runner())
    monkeypatch.setattr(tune, "SECONDS", 0)
    monkeypatch.setattr(tune, "WARM_UP", 0.01)
    specs = variants(REQUEST.problem(), "triton")
    specs = tuple(
        sorted(specs, key=lambda spec: spec.blocks.m != 128)
    )  # the first is taken for right
    text = ("video", "context")
    geometry = geometry_of(
        [1536, 64], (6, 16, 16), AttentionSpec(text, (3, 4, 4), (3, 3, 3)).text()
    )
    flags = {"lengths": torch.int32, "dense": True, "masked": True, "video_masked": True}
    request = replace(REQUEST, device=CPU, geometry=geometry, contexts=1, **flags)
    found = tune.measure_here(request, specs, 0)
    assert found.keys() == {s for s in specs if s.blocks.m == 128 and s.blocks.stages < 4}
    assert all(ms > 0 for ms in found.values())


def graph_of_one_attention():
    gm = torch.fx.symbolic_trace(
        lambda q: torch.ops.sta.attention(q, q, q, None, None, [1536], [6, 16, 16], SPEC, 0.1)[0]
    )
    (q,) = (node for node in gm.graph.nodes if node.op == "placeholder")
    with FakeTensorMode():
        q.meta["example_value"] = torch.empty(1, 1536, 4, 128, dtype=BF16, device=CUDA).mT.mT
        q.meta["example_value"] = q.meta["example_value"].transpose(1, 2)
    attention = next(n for n in gm.graph.nodes if n.target is torch.ops.sta.attention)
    attention.target = torch.ops.sta.attention.default
    return gm, attention


def test_the_choice_is_written_into_the_graph():
    gm, attention = graph_of_one_attention()
    timer = Timer("64x128 warps=4 stages=2 tma")
    (line,) = tune_kernels(gm, "v", timer)
    assert line.startswith("measured on 6x16x16 tokens: triton forward sm90 bf16 d128 64x128")
    spec = AttentionSpec.parse(attention.args[7])
    assert spec == replace(AttentionSpec.parse(SPEC), choice="triton,tma,64,128,4,2")
    assert "choice=triton,tma,64,128,4,2" in gm.code
    q = torch.randn(1, 4, 1536, 128)
    usual = torch.ops.sta.attention(q, q, q, None, None, [1536], [6, 16, 16], SPEC, 0.1)[0]
    assert torch.equal(gm(q), usual)


@pytest.mark.parametrize(
    ("asks", "how"),
    [
        (False, {}),
        (False, {"mode": "reduce-overhead"}),
        (True, {"mode": "max-autotune"}),
        (True, {"mode": "max-autotune-no-cudagraphs"}),
        (True, {"options": {"max_autotune": True}}),
        (False, {"options": {"max_autotune": False}}),
    ],
)
def test_who_asks_for_it(asks, how):
    from sta_compile._inductor import asks_for_max_autotune

    assert asks_for_max_autotune(how.get("mode"), how.get("options", {})) is asks
