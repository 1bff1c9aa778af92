"""Which input is the timestep, and which factor the graph proves: on diffusers models and on small modules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sta_compile import _torch
from sta_compile.analysis.find_timestep import NoTimestep, TimestepFact, find_timestep
from sta_compile.analysis.graph_view import GraphView
from tests.timestep_models import MODELS, Capture, capture, capture_all, captured, lumina2, wan

FACTOR_1000 = ("flux", "z_image")


def find(graph: Capture, option: str = "auto") -> TimestepFact | NoTimestep:
    return find_timestep(GraphView(graph.gm), option)


@pytest.mark.parametrize("model", MODELS)
def test_diffusers(model):
    graph = captured(model, 1)
    fact = find(graph)
    assert isinstance(fact, TimestepFact)
    assert fact.name == ("t" if model == "z_image" else "timestep")
    assert fact.factor == (1000.0 if model in FACTOR_1000 else 1.0)
    assert graph.example_inputs[fact.index] is graph.inputs[fact.name]


def test_guidance_takes_the_same_road_but_is_not_it():
    fact = find(captured("hunyuan_video", 1), "guidance")
    assert isinstance(fact, TimestepFact)
    assert (fact.name, fact.factor) == ("guidance", 1.0)
    fact = find(captured("flux", 1), "guidance")
    assert isinstance(fact, TimestepFact)
    assert fact.factor == 1000.0


def test_an_option_that_names_no_input_lists_them():
    missing = find(captured("hunyuan_video", 1), "sigma")
    assert isinstance(missing, NoTimestep)
    assert "no input named 'sigma'" in missing.message
    assert '"guidance"' in missing.message
    assert '"timestep"' in missing.message
    assert "every step stays dense" in missing.message


def test_block_graphs_have_no_timestep():
    model, _ = wan(1)
    rope = torch.randn(1, 72, 1, 16)
    inputs = {
        "hidden_states": torch.randn(1, 72, 32),
        "encoder_hidden_states": torch.randn(1, 5, 32),
        "temb": torch.randn(1, 6, 32),
        "rotary_emb": (rope, rope),
    }
    missing = find(capture(model.blocks[0], inputs))
    assert isinstance(missing, NoTimestep)
    assert "regional compile" in missing.reason
    assert "dense_above=None" in missing.hint


def test_the_graph_after_a_break_has_no_timestep():
    graphs = capture_all(*lumina2(1), fullgraph=False)
    assert isinstance(find(graphs[0]), TimestepFact)
    assert all(isinstance(find(graph), NoTimestep) for graph in graphs[1:])


def sinusoid(t: torch.Tensor, scale: float = 1.0, dim: int = 8) -> torch.Tensor:
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(dim // 2) / (dim // 2))
    angles = scale * (t.flatten().float()[:, None] * frequencies[None])
    return torch.cat([angles.cos(), angles.sin()], -1)


class Net(nn.Module):
    """x [batch, tokens, 8] attends to itself after it is modulated by an embedding of the timestep."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
        self.direct = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 8))
        self.register_buffer("table", torch.full((4,), 1000.0))

    def attend(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        x = x * embedded[:, None]
        return nn.functional.scaled_dot_product_attention(x, x, x)

    def modulate(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        return self.attend(x, self.embed(embedding))


X = torch.randn(2, 5, 8)
T = torch.tensor([0.9, 0.3])


class Plain(Net):
    def forward(self, x, timestep):
        return self.modulate(x, sinusoid(timestep))


class Divided(Net):
    def forward(self, x, timestep):
        return self.modulate(x, sinusoid(timestep / 1000 * 1000.0))


class Flipped(Net):
    def forward(self, x, timestep):
        return self.modulate(x, sinusoid((1 - timestep) * 1000))


class InTheTable(Net):
    def forward(self, x, timestep):
        return self.modulate(x, sinusoid(timestep, scale=1000.0))


class HalfPrecision(Net):
    def forward(self, x, timestep):
        return self.modulate(x, sinusoid(timestep.to(torch.bfloat16) * 1000))


class ZeroCondition(Net):
    """Qwen-Image edit: the same embedding for a clean reference."""

    def forward(self, x, timestep):
        both = self.embed(sinusoid(torch.cat([timestep, timestep * 0]) * 1000))
        return self.attend(x, both.chunk(2)[0])


class Buffer(Net):
    def forward(self, x, timestep):
        angles = timestep[:, None] * self.table
        return self.modulate(x, torch.cat([angles.cos(), angles.sin()], -1))


class NoSinusoid(Net):
    def forward(self, x, timestep):
        return self.attend(x, self.direct(timestep[:, None]))


class Checkpointed(Net):
    def forward(self, x, timestep):
        return checkpoint(
            lambda x, t: self.modulate(x, sinusoid(t * 1000)), x, timestep, use_reentrant=False
        )


class CalledT(Net):
    def forward(self, x, t):
        return self.modulate(x, sinusoid(t))


class Prefixed(Net):
    def forward(self, x, video_timestep):
        return self.modulate(x, sinusoid(video_timestep))


@pytest.mark.parametrize(
    ("net", "factor"),
    [
        (Plain, 1.0),
        (Divided, 1.0),
        (Flipped, 1000.0),
        (InTheTable, 1000.0),
        (HalfPrecision, 1000.0),
        (ZeroCondition, 1000.0),
        (Buffer, None),
        (NoSinusoid, None),
        (Checkpointed, 1000.0),
        (CalledT, 1.0),
        (Prefixed, 1.0),
    ],
)
def test_factors(net, factor):
    name = {CalledT: "t", Prefixed: "video_timestep"}.get(net, "timestep")
    grad = net is Checkpointed  # Dynamo drops checkpoints where no gradient is wanted
    fact = find(capture(net(), {"x": X.clone().requires_grad_(grad), name: T}, grad=grad))
    assert isinstance(fact, TimestepFact)
    assert fact.name == name
    assert fact.factor == (None if factor is None else pytest.approx(factor))


class Two(Net):
    def forward(self, x, timestep, timestep_r, guidance):
        embedded = sinusoid(timestep) + sinusoid(timestep_r) + sinusoid(guidance)
        return self.modulate(x, embedded)


def test_timestep_r_and_guidance_are_not_the_timestep():
    inputs = {"x": X, "timestep": T, "timestep_r": T.clone(), "guidance": T.clone()}
    fact = find(capture(Two(), inputs))
    assert isinstance(fact, TimestepFact)
    assert fact.name == "timestep"


class Ambiguous(Net):
    def forward(self, x, video_timestep, audio_timestep):
        return self.modulate(x, sinusoid(video_timestep) + sinusoid(audio_timestep))


def test_two_that_could_be_it_are_none():
    missing = find(capture(Ambiguous(), {"x": X, "video_timestep": T, "audio_timestep": T.clone()}))
    assert isinstance(missing, NoTimestep)
    assert '"audio_timestep", "video_timestep"' in missing.message
    assert 'options={"timestep"' in missing.hint


class Strange(Net):
    def forward(self, x, level):
        return self.modulate(x, sinusoid(level))


def test_another_name_is_asked_for():
    graph = capture(Strange(), {"x": X, "level": T})
    missing = find(graph)
    assert isinstance(missing, NoTimestep)
    assert '"level"' in missing.hint
    fact = find(graph, "level")
    assert isinstance(fact, TimestepFact)
    assert fact.factor == 1.0


def positional_call(names):
    """The graph of a diffusers model called by position, and what `names()` says inside the compile."""
    model, inputs = wan(1)
    found = []

    def backend(gm, example_inputs):
        found.append((gm, names()))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*inputs.values())
    torch._dynamo.reset()
    return found[0]


def test_positional_inputs_of_a_decorated_forward_have_the_names_of_its_parameters():
    gm, names = positional_call(_torch.names_of_positional_arguments)
    assert names["args_1"] == "timestep"
    fact = find_timestep(GraphView(gm), aliases=names)
    assert isinstance(fact, TimestepFact)
    assert fact.name == "timestep"
    for option in ("timestep", "args_1"):
        assert isinstance(find_timestep(GraphView(gm), option, names), TimestepFact)


def test_positional_inputs_without_names_are_asked_for():
    gm, _ = positional_call(dict)
    missing = find_timestep(GraphView(gm))
    assert isinstance(missing, NoTimestep)
    assert "by its keyword" in missing.hint
    assert '"args_1"' in missing.hint
    assert isinstance(find_timestep(GraphView(gm), "args_1"), TimestepFact)


class Position(Net):
    """A frame index that rotates q and k, and is embedded as well."""

    def forward(self, x, timestep):
        angles = sinusoid(timestep)
        q = x * angles[:, None]
        x = nn.functional.scaled_dot_product_attention(q, q, x)
        return self.modulate(x, angles)


def test_positions_are_not_timesteps():
    assert isinstance(find(capture(Position(), {"x": X, "timestep": T})), NoTimestep)


class Number(Net):
    def forward(self, x, timestep):
        return self.modulate(x, sinusoid(torch.full((2,), timestep)))


@pytest.mark.parametrize("option", ["auto", "timestep"])
def test_a_python_number_is_no_tensor(option):
    missing = find(capture(Number(), {"x": X, "timestep": 900}, dynamic=True), option)
    assert isinstance(missing, NoTimestep)
    assert "Python number" in missing.reason
    assert "as a tensor" in missing.hint
