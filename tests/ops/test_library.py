"""Calls that record no gradient skip a dispatch, and nobody who waits for that dispatch is passed over."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import sta_compile.ops  # noqa: F401  registers the operator

SPEC = "v1 roles=video tiles=1,1,1 window=full kernel=auto"
REST = (None, None, [24], [2, 3, 4], SPEC, 0.3)


def attend(q, k=None, v=None):
    return torch.ops.sta.attention(q, q if k is None else k, q if v is None else v, *REST)[0]


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        self.names.append(str(function))
        return function(*arguments, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A tensor that holds another and answers every operator itself."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner, self.seen = inner, []  # 2.11's tensors have `names`

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), kwargs=None):
        for x in arguments:
            if type(x) is cls:
                x.seen.append(str(function))
        return function(*(x.inner if type(x) is cls else x for x in arguments), **(kwargs or {}))


@pytest.fixture
def q():
    return torch.randn(1, 2, 24, 8)


@pytest.mark.parametrize("grad", [True, False])
def test_modes_see_the_operator(q, grad):
    with torch.set_grad_enabled(grad), Seen() as mode:
        attend(q)
    assert mode.names[0] == "sta.attention.default"


def test_subclasses_see_the_operator(q):
    wrapped = Wrapped(q)
    torch.testing.assert_close(attend(wrapped, q, q), attend(q))
    assert wrapped.seen == ["sta.attention.default"]


def test_tracing_sees_the_operator(q):
    graph = make_fx(lambda x: attend(x))(q)
    assert torch.ops.sta.attention.default in [node.target for node in graph.graph.nodes]


def test_a_lazy_negation_is_resolved(q):
    torch.testing.assert_close(attend(torch._neg_view(q)), attend(-q))


def test_vmap(q):
    many = torch.stack([q, 2 * q])
    expected = torch.stack([attend(x, q, q) for x in many])
    torch.testing.assert_close(torch.func.vmap(lambda x: attend(x, q, q))(many), expected)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_are_recorded_for_any_input(q, which):
    inputs = [q.clone().requires_grad_(index == which) for index in range(3)]
    out = attend(*inputs)
    assert out.requires_grad
    with torch.no_grad():
        assert not attend(*inputs).requires_grad
    with torch.inference_mode():
        assert attend(*inputs).is_inference()
    assert not attend(q).requires_grad
