"""What all tests have in common: how hypothesis judges time, and a process that spends none on itself."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, settings

# A busy machine takes its time: how long an example takes says nothing of whether it is right.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# Tests are many small operations, for which threads only get in each other's way; so are the processes that they start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def in_a_large_frame(run: Callable[[], None]) -> None:
    """Calls `run` with room for the frames of its calls.

    Python 3.11 and newer keep frames in chunks of 16 KiB, and map a new chunk into memory at each call across the end of
    the last one. Dynamo's calls nest so deeply that a compile crosses it 100,000 times, a third of its time. A chunk is as
    large as the frame that it is made for.
    """
    run()


in_a_large_frame.__code__ = in_a_large_frame.__code__.replace(co_stacksize=1 << 17)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.runtest = partial(in_a_large_frame, item.runtest)


def pytest_collection_finish() -> None:
    """The collector need not look at what is imported by now, nor at the rest for every 700 objects that are made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def stages_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything but inductor: edited graphs run eagerly, and nothing records gradients."""
    from sta_compile import _torch

    monkeypatch.setattr(_torch, "compile_with_inductor", lambda gm, example_inputs, **_: gm.forward)
    with torch.no_grad():
        yield
