"""What the first call of a model said about its noise convention, and for how long that holds.

The convention is inferred from the timestep of the first call, which is read once, while compiling. A later graph of
the same model (another prompt length, another resolution) may be compiled in the middle of a run, where the timestep
says something else, so the first answer is remembered, unknown or not, for as long as the model lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..ir.noise_level import Convention, UnknownConvention
from .find_timestep import TimestepFact


def first_value(fact: TimestepFact, example_inputs: Sequence[Any]) -> float | None:
    """The largest timestep among the real inputs of a compile; None if they are fake, meta or hold no number."""
    return largest_value(example_inputs[fact.index])


def largest_value(value: Any) -> float | None:
    """The largest number of a real tensor, read on the host."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.numel() == 0:
        return None
    if hasattr(value, "fake_mode"):
        return None
    try:
        largest = float(value.detach().to("cpu", torch.float64).max())
    except (
        RuntimeError
    ):  # a wrapper that holds no data; without a value the convention stays unknown
        return None
    return largest if largest == largest else None


class ConventionMemory:
    """Conventions by model and option `timestep`, since another input may have another scale.

    Models (a module, a parameter) are compared by identity and held weakly.
    """

    def __init__(self) -> None:
        self._entries: dict[
            int, tuple[weakref.ref[Any], dict[str, Convention | UnknownConvention]]
        ] = {}

    def recall(self, key: object, timestep: str = "auto") -> Convention | UnknownConvention | None:
        entry = self._entries.get(id(key))
        return entry[1].get(timestep) if entry is not None and entry[0]() is key else None

    def remember(
        self, key: object, convention: Convention | UnknownConvention, timestep: str = "auto"
    ) -> None:
        """Keeps the first answer; one that had no value to judge by (an explanation on fake tensors) is no answer."""
        if isinstance(convention, UnknownConvention) and convention.value is None:
            return
        self._answers(key).setdefault(timestep, convention)

    def settle(self, key: object, convention: Convention, timestep: str = "auto") -> None:
        """In place of what is remembered: a schedule beats what one value says."""
        self._answers(key)[timestep] = convention

    def _answers(self, key: object) -> dict[str, Convention | UnknownConvention]:
        name = id(key)
        entry = self._entries.get(name)
        if entry is None or entry[0]() is not key:
            entry = (weakref.ref(key, lambda ref: self._forget(name, ref)), {})
            self._entries[name] = entry
        return entry[1]

    def clear(self) -> None:
        """For torch._dynamo.reset(): the next call is a first call again."""
        self._entries.clear()

    def _forget(self, name: int, ref: weakref.ref[Any]) -> None:
        # By then a new object with the same id may have taken the place.
        entry = self._entries.get(name)
        if entry is not None and entry[0] is ref:
            del self._entries[name]
