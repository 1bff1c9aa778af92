"""Medians of contestants that take turns, so that all see the same clocks and the same heat."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

Run = Callable[[], object]
LEAST_ROUNDS, MOST_ROUNDS = 5, 100
MOST_REPEATS = 1000


@dataclass(frozen=True)
class Timing:
    """Medians. ms: of one run. megahertz: of the multiprocessors, None if nothing says it. rounds: how many turns."""

    ms: float
    megahertz: float | None
    rounds: int


class Watch(Protocol):
    def measure(self, run: Run) -> tuple[float, list[float]]:
        """(milliseconds, clocks in MHz that were read meanwhile) of one run."""


class HostWatch:
    """For a device that has finished when the call returns."""

    def measure(self, run: Run) -> tuple[float, list[float]]:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3, []


class CudaWatch:
    """Reads the clock while the device works; the host has nothing else to do then."""

    def __init__(self, megahertz: Callable[[], list[float]] | None = None) -> None:
        """megahertz: reads the clock; the times alone are taken without it."""
        self._megahertz = megahertz

    def measure(self, run: Run) -> tuple[float, list[float]]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        clocks: list[float] = []
        while self._megahertz is not None and not stop.query():
            clocks += self._megahertz()
            time.sleep(1e-3)
        stop.synchronize()
        return start.elapsed_time(stop), clocks


def watch_of(device: torch.device, megahertz: Callable[[], list[float]] | None = None) -> Watch:
    return CudaWatch(megahertz) if device.type == "cuda" else HostWatch()


def interleaved(
    runs: Mapping[str, Run],
    watch: Watch,
    seconds: float,
    rounds: int = LEAST_ROUNDS,
    turn: float = 0.0,
) -> dict[str, Timing]:
    """Every contestant once a round, for as long as `seconds` and for `rounds` rounds at least.

    turn: milliseconds that a contestant's turn takes at least, in as many runs as that needs. A device is idle when a turn
    starts, and has the clocks and the caches that the contestant before left: a short run alone is timed with the host's
    launch, and under its neighbour's conditions.
    """
    repeats = {
        name: _repeats(watch.measure(run)[0], turn) if turn else 1 for name, run in runs.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    clocks: dict[str, list[float]] = {name: [] for name in runs}
    end, done = time.monotonic() + seconds, 0
    while done < rounds or (time.monotonic() < end and done < MOST_ROUNDS):
        for name, run in runs.items():
            ms, read = watch.measure(partial(_repeat, run, repeats[name]))
            times[name].append(ms / repeats[name])
            clocks[name] += read
        done += 1
    return {
        name: Timing(
            statistics.median(values),
            statistics.median(clocks[name]) if clocks[name] else None,
            done,
        )
        for name, values in times.items()
    }


def _repeats(ms: float, turn: float) -> int:
    return min(max(1, math.ceil(turn / ms)), MOST_REPEATS) if ms > 0 else MOST_REPEATS


def _repeat(run: Run, times: int) -> object:
    for _ in range(times - 1):
        run()
    return run()


def warm_up(run: Run, device: torch.device, seconds: float) -> None:
    """Until the card has the clocks that it can keep."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(10):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
