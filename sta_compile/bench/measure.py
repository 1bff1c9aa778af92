"""One workload: every contestant is checked, then all of them and a matrix product take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..codegen.select import variants
from ..runtime.timing import LEAST_ROUNDS, interleaved, watch_of
from ..runtime.tune import measure_on_device
from .check import WrongResult, check
from .clock import clock_of
from .inputs import Contestant, Inputs, kernel_of, ours
from .peers import PEERS
from .workloads import Workload, dtype_of

MATRIX = "matrix product"
NATIVE = "sta native"  # beside a workload of another precision
NO_TEXT = "sta without text"  # beside one with text
TURN = {
    "cuda": 25.0,
    "cpu": 0.0,
}  # milliseconds of a contestant's turn: a few times what the host needs for a launch
MATRIX_SIZES = {"cuda": (8192, 8), "cpu": (256, 1)}  # rows, and products of one run


@dataclass(frozen=True)
class Options:
    """peers: names, None for all of a workload. seconds: of one workload's rounds, which are `rounds` at least.

    kernels: time every kernel that may run a forward, too, on few heads.
    """

    device: torch.device
    kernel: str = "auto"
    peers: tuple[str, ...] | None = None
    seconds: float = 4.0
    rounds: int = LEAST_ROUNDS
    kernels: bool = False


@dataclass
class Row:
    """What was measured; the dicts are by contestant, "sta" first.

    tflops: on the pairs that a contestant keeps. share: of the matrix product's rate. speedup: over the fastest dense
    peer. mcycles: million clock cycles of a multiprocessor. missing: peers that were not measured, and why.
    kernel: what ran. extra_bytes: what a call needs beside its inputs and outputs. kernels: milliseconds of each that may
    run a forward, on few heads. failed: why nothing is timed.
    """

    workload: str
    direction: str
    kernel: str = ""
    kept: float = 1.0
    error: float = 0.0
    ms: dict[str, float] = field(default_factory=dict)
    tflops: dict[str, float] = field(default_factory=dict)
    share: dict[str, float] = field(default_factory=dict)
    speedup: dict[str, float] = field(default_factory=dict)
    megahertz: dict[str, float] = field(default_factory=dict)
    mcycles: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    matrix_tflops: float = 0.0
    rounds: int = 0
    extra_bytes: int | None = None
    kernels: dict[str, float] = field(default_factory=dict)
    failed: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, without what is empty."""
        return {name: value for name, value in asdict(self).items() if value not in ("", {}, None)}


def measure(workload: Workload, options: Options) -> Row:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(workload.deterministic, warn_only=True)
    try:
        return _measure(workload, options)
    finally:
        torch.use_deterministic_algorithms(before)


def _measure(workload: Workload, options: Options) -> Row:
    torch._dynamo.reset()  # FlexAttention compiles for each shape, and Dynamo allows few of one function
    w, device = workload, options.device
    inputs = Inputs.make(w, device)
    row = Row(w.name, "backward" if w.backward else "forward")
    row.kept = w.pattern.pairs / (w.batch * w.everything.pairs)
    mine = ours(inputs, options.kernel)
    try:
        row.error = row.errors["sta"] = check(inputs, mine)
    except WrongResult as error:
        row.failed = str(error)
        return row
    row.kernel = kernel_of(inputs, options.kernel)
    row.extra_bytes = extra_bytes(mine, device)
    if not w.backward:
        request = inputs.request(options.kernel)
        if options.kernels and request.has_kernels:
            times = measure_on_device(request, variants(request.problem(), options.kernel))
            row.kernels = {spec.text(): ms for spec, ms in times.items()}
    contestants = {"sta": mine}
    if w.precision != "native":
        as_native = replace(inputs, workload=replace(w, precision="native"))
        contestants[NATIVE] = ours(as_native, options.kernel)
        row.errors[NATIVE] = check(as_native, contestants[NATIVE])
    elif w.text and not w.backward:
        video = Inputs.make(replace(w, text=0, valid=0), device)
        contestants[NO_TEXT] = ours(video, options.kernel)
        row.errors[NO_TEXT] = check(video, contestants[NO_TEXT])
    dense = set()
    for peer in PEERS:
        chosen = options.peers is None or peer.name in options.peers
        if not chosen or peer.name not in w.peers:
            continue
        reason = peer.refuse(inputs)
        try:
            if not reason:
                found = peer.prepare(inputs)
                row.errors[peer.name] = check(inputs, found)
                contestants[peer.name] = found
                dense |= {peer.name} if peer.dense else set()
        except Exception as error:  # another package's, whatever it is: the others are measured
            reason = _last_line(error)
        if reason:
            row.missing[peer.name] = reason
    _time(row, w, contestants, dense, options)
    return row


def _time(
    row: Row,
    w: Workload,
    contestants: dict[str, Contestant],
    dense: set[str],
    options: Options,
) -> None:
    product, flops = matrix_product(options.device)
    runs = {name: c.run for name, c in contestants.items()} | {MATRIX: product}
    clock = clock_of(options.device) if options.device.type == "cuda" else None
    watch = watch_of(options.device, None if clock is None else clock.megahertz)
    turn = TURN[options.device.type]
    timings = interleaved(runs, watch, options.seconds, options.rounds, turn)
    rate = flops / timings[MATRIX].ms / 1e9
    row.matrix_tflops, row.rounds = rate, timings[MATRIX].rounds
    fastest = min((timings[name].ms for name in dense), default=None)
    for name, contestant in contestants.items():
        timing = timings[name]
        row.ms[name] = timing.ms
        row.tflops[name] = w.flops(contestant.pattern.pairs) / timing.ms / 1e9
        row.share[name] = row.tflops[name] / rate
        if fastest is not None:
            row.speedup[name] = fastest / timing.ms
        if timing.megahertz is not None:
            row.megahertz[name] = timing.megahertz
            row.mcycles[name] = timing.megahertz * timing.ms / 1e3


def matrix_product(device: torch.device) -> tuple[Callable[[], object], float]:
    """(run, FLOPs of a run) of large products, whose rate is what the device can do at most."""
    size, count = MATRIX_SIZES[device.type]
    a = torch.randn(size, size, device=device, dtype=dtype_of(device))
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    return run, 2.0 * size**3 * count


def extra_bytes(contestant: Contestant, device: torch.device) -> int | None:
    """Memory that a call takes beside its inputs and outputs; None where nothing counts it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = contestant.run()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated()
    del outputs
    return torch.cuda.max_memory_allocated() - max(kept, before)


def measure_all(workloads: tuple[Workload, ...], options: Options) -> Iterator[Row]:
    for workload in workloads:
        yield measure(workload, options)
        if options.device.type == "cuda":
            torch.cuda.empty_cache()


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"
