"""The flags that a graph computes from its timestep: every shape, batch, dtype and convention, and through inductor."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule, Node

from sta_compile.analysis.find_timestep import TimestepFact, find_timestep
from sta_compile.analysis.graph_view import GraphView
from sta_compile.analysis.hints import Hint
from sta_compile.analysis.position_values import Positions
from sta_compile.errors import StaError
from sta_compile.ir.noise_level import Convention, UnknownConvention
from sta_compile.planning.noise import parse_noise
from sta_compile.planning.noise_schedule import dense_steps
from sta_compile.rewriting.insert_dense import insert_check, insert_dense
from tests.timestep_models import MODELS, Capture, capture, captured

CPU = torch.device("cpu")


def stated(option: Any) -> Convention:
    convention = parse_noise(option)
    assert convention is not None
    return convention


def edited(
    graph: Capture, convention: Any, batch: Any, above: float | None = 0.95, below: float = 0.0
) -> tuple[GraphModule, TimestepFact]:
    """A copy of the graph that returns its flags and nothing else."""
    gm = graph.copy()
    fact = find_timestep(GraphView(gm))
    assert isinstance(fact, TimestepFact)
    if batch == "symbol":
        batch = next(n for n in gm.graph.nodes if isinstance(n.meta["example_value"], torch.SymInt))
    flags = insert_dense(gm, fact, convention, above, below, batch, CPU)
    assert flags is not None
    assert flags.meta["example_value"].dtype == torch.bool
    assert flags.meta["example_value"].stride() == (1,)
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = ((flags,),)
    gm.graph.lint()
    gm.recompile()
    return gm, fact


def flags_of(gm: GraphModule, fact: TimestepFact, graph: Capture, timestep: torch.Tensor) -> list:
    inputs = [int(i) if isinstance(i, torch.SymInt) else i for i in graph.example_inputs]
    inputs[fact.index] = timestep
    with torch.no_grad():
        (flags,) = gm(*inputs)
    assert flags.dtype == torch.bool
    assert flags.is_contiguous()
    return flags.tolist()


@pytest.mark.parametrize("above", [None, 0.95])
def test_positions_on_another_device(above):
    """Rope's coordinates may be made on the host: what the check says of them goes to the attention's device."""
    model = next(iter(MODELS))
    graph = captured(model, 2)
    gm = graph.copy()
    fact = find_timestep(GraphView(gm))
    dense = insert_dense(gm, fact, stated("0..1000"), above, 0.0, 2, CPU)
    hint = Hint(fact.node, fact.name, Positions(0, 0, (1, 2, 1), True, False))
    flags = insert_check(gm, hint, dense, 2, torch.device("meta"))
    value = flags.meta["example_value"]
    assert (value.device.type, value.dtype, tuple(value.shape)) == ("meta", torch.bool, (2,))
    gm.graph.lint()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_flags_per_sample(model, batch):
    """One sample after the other is noisy; its first frame, where timesteps are given per token, is always clean."""
    graph = captured(model, batch)
    gm, fact = edited(graph, stated("0..1000"), batch, below=0.1)
    shape = graph.example_inputs[fact.index].shape
    for levels in ([960.0, 940.0], [940.0, 960.0], [950.0, 951.0], [99.0, 100.0])[: 2 * batch]:
        timestep = torch.tensor(levels[:batch]).view(-1, *[1] * (len(shape) - 1)).expand(shape)
        timestep = timestep.clone()
        if timestep[0].numel() > 1:
            timestep.view(batch, shape.numel() // batch)[:, 0] = 500.0
        expected = [t > 950 or t < 100 for t in levels[:batch]]
        if timestep[0].numel() > 1:  # its clean tokens don't make a nearly clean sample noisy
            expected = [t > 950 for t in levels[:batch]]
        timestep = timestep.to(graph.example_inputs[fact.index].dtype)
        assert flags_of(gm, fact, graph, timestep) == expected


class Small(torch.nn.Module):
    """An attention after a timestep embedding, in an autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 8)
        )

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            table = torch.exp(-math.log(10000.0) * torch.arange(8) / 8)
            embedded = self.embed((timestep.flatten().float()[:, None] * table).sin())
            x = x + embedded.mean(0)
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)


@cache
def four_samples() -> Capture:
    return small(torch.full((4,), 900.0), batch=4)


def small(timestep: torch.Tensor, batch: int = 3, **options: Any) -> Capture:
    return capture(Small(), {"x": torch.randn(batch, 5, 8), "timestep": timestep}, **options)


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), [True] * 3),
        ((1,), [True] * 3),
        ((1, 4), [True] * 3),
        ((3,), [False, True, False]),
        ((3, 4), [False, True, False]),
        ((3, 1, 2, 1, 1), [False, True, False]),
        ((6,), [True] * 3),  # not one row per sample: the noisiest decides for all
    ],
)
def test_shapes_and_dtypes(shape, expected):
    timestep = torch.full(shape, 900.0)
    if timestep.ndim == 0:
        timestep.fill_(960)
    else:
        timestep.flatten()[timestep.numel() // 2] = 960
    graph = small(timestep)
    gm, fact = edited(graph, stated("0..1000"), 3)
    for dtype in DTYPES:
        assert flags_of(gm, fact, graph, timestep.to(dtype)) == expected


CASES = [
    ("0..1000", [1000.0, 950.1, 950.0, 0.0], [True, True, False, False]),
    ("0..1", [1.0, 0.951, 0.95, 0.0], [True, True, False, False]),
    ("1000..0", [0.0, 49.9, 50.0, 1000.0], [True, True, False, False]),
    ("1..0", [0.0, 0.049, 0.051, 1.0], [True, True, False, False]),
    ("log_sigma", [1.0955, 0.737, 0.735, -1.5], [True, True, False, False]),
    (lambda t: 1 - t / 500, [0.0, 24.0, 26.0, 500.0], [True, True, False, False]),
    (lambda t: torch.where(t > 5, t / 10, t / 5), [9.6, 4.8, 9.4, 4.7], [True, True, False, False]),
    (lambda t: t.double().exp().log() / 2, [1.91, 1.89, 0.0, 2.0], [True, False, False, True]),
]


@pytest.mark.parametrize(("option", "timesteps", "expected"), CASES)
def test_conventions(option, timesteps, expected):
    timestep = torch.tensor(timesteps)
    graph = four_samples()
    gm, fact = edited(graph, stated(option), 4)
    assert flags_of(gm, fact, graph, timestep) == expected


def test_the_noisiest_token_of_a_rising_timestep_is_the_lowest():
    timestep = torch.tensor([[10.0, 1000.0], [900.0, 1000.0]])
    graph = small(timestep, batch=2)
    gm, fact = edited(graph, stated("reversed"), 2)
    assert flags_of(gm, fact, graph, timestep) == [True, False]


@pytest.mark.parametrize("shape", ["batch", "one", "scalar", "tokens"])
def test_a_symbolic_batch_needs_no_guard(shape):
    timestep = {
        "batch": torch.full((3,), 900.0),
        "one": torch.full((1,), 900.0),
        "scalar": torch.tensor(900.0),
        "tokens": torch.full((3, 4), 900.0),
    }[shape]
    x = torch.randn(3, 5, 8)
    torch._dynamo.mark_dynamic(x, 0)
    if shape in ("batch", "tokens"):
        torch._dynamo.mark_dynamic(timestep, 0)
    graph = capture(Small(), {"x": x, "timestep": timestep})
    gm, fact = edited(graph, stated("0..1000"), "symbol")
    noisy = timestep + 60
    assert flags_of(gm, fact, graph, noisy) == [True] * 3
    assert flags_of(gm, fact, graph, timestep) == [False] * 3
    sizes = [n.meta["example_value"] for n in gm.graph.nodes if n.name == fact.node.name]
    assert shape in ("one", "scalar") or isinstance(sizes[0].shape[0], torch.SymInt)


def test_no_dense_steps_add_no_node():
    graph = small(torch.full((3,), 900.0))
    gm = graph.copy()
    before = len(gm.graph.nodes)
    unknown = UnknownConvention("?", "?")
    assert insert_dense(gm, None, unknown, None, 0.0, 3, CPU) is None
    assert insert_dense(gm, None, None, None, 0.0, 3, CPU) is None
    assert len(gm.graph.nodes) == before


@pytest.mark.parametrize("known_input", [True, False])
def test_unknown_is_dense_everywhere(known_input):
    graph = small(torch.full((3,), 900.0))
    gm = graph.copy()
    fact = find_timestep(GraphView(gm)) if known_input else None
    assert fact is None or isinstance(fact, TimestepFact)
    flags = insert_dense(gm, fact, UnknownConvention("?", "?"), 0.95, 0.0, 3, CPU)
    assert isinstance(flags, Node)
    assert flags.target is torch.ones
    assert flags.meta["example_value"].shape == (3,)


def branch(t):
    return t if t > 0 else -t


def number(t):
    return 0.5


def read(t):
    return torch.full_like(t, t.max().item())


def reduced(t):
    return t.max()


def host(t):
    return math.log(t)


@pytest.mark.parametrize("function", [branch, number, read, reduced, host])
def test_functions_that_are_no_arithmetic(function):
    gm = four_samples().copy()
    before = list(gm.graph.nodes)
    fact = find_timestep(GraphView(gm))
    assert isinstance(fact, TimestepFact)
    with pytest.raises(
        StaError, match=r"can't be made part of the graph .* lambda t: 1 - t / 1000"
    ):
        insert_dense(gm, fact, stated(function), 0.95, 0.0, 4, CPU)
    assert list(gm.graph.nodes) == before
    gm.graph.lint()


def test_inductor_agrees_with_the_list_made_in_advance():
    """Every convention's flags in one compiled graph, for timesteps on and around all of their thresholds."""
    timesteps = torch.tensor([t for case in CASES for t in case[1]])
    conventions = [stated(case[0]) for case in CASES]

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        fact = find_timestep(GraphView(gm))
        assert isinstance(fact, TimestepFact)
        rows = [insert_dense(gm, fact, c, 0.95, 0.2, len(timesteps), CPU) for c in conventions]
        output = next(n for n in gm.graph.nodes if n.op == "output")
        with gm.graph.inserting_before(output):
            output.args = ((gm.graph.call_function(torch.stack, (rows,)),),)
        gm.recompile()
        return compile_fx(gm, example_inputs)

    torch._dynamo.reset()
    compiled = torch.compile(Small(), backend=backend, fullgraph=True)
    with torch.no_grad():
        flags = compiled(torch.randn(len(timesteps), 5, 8), timesteps)
    for row, convention in zip(flags, conventions, strict=True):
        # Larger values of a convention within 0..1 would be read as a scheduler's own timesteps.
        own = timesteps <= (1.0 if convention.name in ("0..1", "1..0") else 1000.0)
        expected = dense_steps(convention, timesteps[own], 0.95, 0.2)
        assert row[own].tolist() == expected, convention.name
