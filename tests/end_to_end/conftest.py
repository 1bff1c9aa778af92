"""Tests of whole models: each begins with a Dynamo that knows nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def stages_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything but inductor: edited graphs run eagerly, and nothing records gradients."""
    from sta_compile import _torch

    monkeypatch.setattr(_torch, "compile_with_inductor", lambda gm, example_inputs, **_: gm.forward)
    with torch.no_grad():
        yield
