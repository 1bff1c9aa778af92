"""The value of a first call, and the memory that keeps what was inferred from it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sta_compile.analysis.find_timestep import TimestepFact
from sta_compile.analysis.first_call import ConventionMemory, first_value
from sta_compile.ir.noise_level import Convention, UnknownConvention
from sta_compile.planning.noise import infer_convention

NODE = torch.fx.Graph().placeholder("l_timestep_")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([999, 3]), 999.0),
        (torch.tensor(0.25, dtype=torch.bfloat16), 0.25),
        (torch.tensor([[0.0, 0.5], [0.75, 0.0]]), 0.75),
        (torch.full((2, 1, 3, 1, 1), 7, dtype=torch.int32), 7.0),
        (torch.tensor([torch.nan]), None),
        (torch.empty(0), None),
        (torch.empty(2, device="meta"), None),
        (500, None),
    ],
)
def test_first_value(value, expected):
    assert first_value(TimestepFact(NODE, "timestep", 1, 1.0, ""), [None, value]) == expected


def test_a_fake_timestep_has_no_value():
    fake = FakeTensorMode().from_tensor(torch.tensor([999.0]))
    assert first_value(TimestepFact(NODE, "timestep", 0, 1.0, ""), [fake]) is None


def test_memory_keeps_the_first_answer_by_identity():
    memory = ConventionMemory()
    # Tensors compare element by element; as keys they must not.
    keys = [torch.nn.Linear(2, 2), torch.zeros(2), torch.nn.Parameter(torch.zeros(2))]
    falling, unknown = infer_convention(1.0, 999.0), infer_convention(1.0, 0.0)
    for key in keys:
        assert memory.recall(key) is None
        memory.remember(key, falling)
        memory.remember(key, unknown)
        assert memory.recall(key) is falling
    memory.clear()
    assert [memory.recall(key) for key in keys] == [None] * 3


def test_unknown_is_an_answer_but_a_fake_call_is_not():
    memory, model = ConventionMemory(), torch.nn.Linear(1, 1)
    memory.remember(model, infer_convention(1.0, None))
    assert memory.recall(model) is None
    memory.remember(model, infer_convention(1.0, 0.0))
    memory.remember(model, infer_convention(1.0, 800.0))
    assert isinstance(memory.recall(model), UnknownConvention)


def test_memory_does_not_keep_models_alive():
    memory = ConventionMemory()
    for _ in range(50):  # ids are used again
        model = torch.nn.Linear(1, 1)
        assert memory.recall(model) is None
        memory.remember(model, infer_convention(1.0, 999.0))
        assert isinstance(memory.recall(model), Convention)
        del model
    assert not memory._entries
