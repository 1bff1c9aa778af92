"""Which of the kernels that can run a call is the fastest on this GPU? Measured once, then kept on disk.

The answer is a text (KernelSpec.choice) that becomes a part of the attention's spec, so a compiled graph launches the same
kernel in every process. It is found again by the problem, the target, the kernels to choose from and the version of all
that makes them; of several processes that measure at the same time, the first one's answer is everyone's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from .. import config
from ..codegen.select import variants
from ..codegen.toolchain import toolchain
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from . import disk_cache
from .prepare import Request
from .runner import runner_of
from .target import detect
from .tensors import Tensors
from .timing import interleaved, warm_up, watch_of

log = logging.getLogger(__name__)
ROWS_OF_A_BLOCK = 128
BLOCKS_OF_A_MULTIPROCESSOR = 4  # so that the last wave of blocks doesn't decide
TOLERANCE = 2e-2  # between two kernels' outputs; both round to 16 bits
SECONDS, ROUNDS, WARM_UP = 1.0, 7, 0.3
TURN = 2.0  # milliseconds: kernels of one head can be shorter than their launch

Measure = Callable[[Request, tuple[KernelSpec, ...]], dict[KernelSpec, float]]


@dataclass(frozen=True)
class Tuned:
    """choice: KernelSpec.choice of the fastest. milliseconds: by the text of each kernel that ran. stored: found on disk."""

    choice: str
    milliseconds: dict[str, float]
    stored: bool

    def text(self) -> str:
        """The fastest three with their times."""
        fastest = sorted(self.milliseconds.items(), key=lambda item: item[1])
        times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in fastest[:3])
        return f"{times}, of {len(fastest)} measured" + (" (stored)" if self.stored else "")


_tuned: dict[str, Tuned] = {}  # where the disk can't keep them, a process is at least of one mind


def tune(request: Request, version: str, measure: Measure | None = None) -> Tuned | None:
    """None where there is nothing to measure: no grid yet, no GPU, or a single kernel.

    version: of all that makes kernels, as text. measure: milliseconds of the kernels that run and are right.
    """
    on_gpu = request.device.type == "cuda" and request.has_kernels
    if request.geometry is None or not on_gpu:
        return None
    problem = request.problem()
    specs = variants(problem, request.kernel)
    if len(specs) < 2:
        return None
    names = [spec.text() for spec in specs]
    what = repr(problem), repr(request.geometry), version
    key = disk_cache.key_of("tuning", *what, *_compilers(), *names)
    if key not in _tuned:
        found = _find(key, request, specs, measure or measure_on_device)
        if found is None:
            return None
        _tuned[key] = found
    return _tuned[key]


def _compilers() -> tuple[str, ...]:
    """Versions of what makes and runs kernels."""
    tools = toolchain(config.compiler)
    of_cuda = tools if isinstance(tools, str) else f"{tools.name} {tools.version}"
    of_triton = ""
    if find_spec("triton"):
        import triton

        of_triton = triton.__version__
    return torch.__version__, of_triton, of_cuda


def _find(
    key: str, request: Request, specs: tuple[KernelSpec, ...], measure: Measure
) -> Tuned | None:
    entry = disk_cache.load(key)
    stored = entry is not None
    if entry is None:
        times = measure(request, specs)
        if not times:
            return None
        fastest = min(times, key=lambda spec: times[spec])
        by_name = {spec.text(): ms for spec, ms in times.items()}
        content = json.dumps({"choice": fastest.choice, "milliseconds": by_name})
        entry = disk_cache.store_first(key, disk_cache.Entry(b"", content))
    return Tuned(**json.loads(entry.log), stored=stored)


def measure_on_device(request: Request, specs: tuple[KernelSpec, ...]) -> dict[KernelSpec, float]:
    """As `measure_here`, with the request's device as the current one."""
    with torch.cuda.device(request.device):
        return measure_here(request, specs, torch.cuda.current_device())


def measure_here(
    request: Request, specs: tuple[KernelSpec, ...], index: int
) -> dict[KernelSpec, float]:
    """Medians on random tensors of one head, or of as many as fill the GPU; without what fails or differs from the first."""
    geometry = request.geometry
    assert geometry is not None
    one = of_few_heads(request, detect(request.device).sm_count)
    tensors = filled(one.tensors(request.device), geometry)
    runs: dict[KernelSpec, Callable[[], Any]] = {}
    expected = None
    for spec in specs:
        try:
            runner = runner_of(spec.emitter)
            binary = runner.build(spec, index)
            start = runner.bind(spec, binary, tensors, geometry, request.scale)
            tensors.out.fill_(torch.nan)
            start(tensors)
            out = tensors.out.float()
        except Exception as error:  # too much shared memory, or whatever: the others are measured
            log.info("kernel [%s] is not measured: %s", spec.text(), error)
            continue
        expected = out if expected is None else expected
        apart = float((out - expected).norm() / expected.norm())
        if not apart <= TOLERANCE:
            log.warning("kernel [%s] is off by %.1e and is not chosen", spec.text(), apart)
            continue
        runs[spec] = partial(start, tensors)
    if not runs:
        return {}
    warm_up(next(iter(runs.values())), request.device, WARM_UP)
    named = {str(number): run for number, run in enumerate(runs.values())}
    watch = watch_of(request.device)
    timings = interleaved(named, watch, SECONDS, ROUNDS, TURN).values()
    return {spec: timing.ms for spec, timing in zip(runs, timings, strict=True)}


def of_few_heads(request: Request, multiprocessors: int) -> Request:
    """One sample of one head of keys, or of as many as give each multiprocessor a few blocks of rows.

    Of all heads, where they have windows of their own.
    """
    _, heads, queries, head_dim = request.shape
    if request.head_windows:
        return replace(request, shape=(1, *request.shape[1:]))
    share = heads // request.kv_heads
    rows = multiprocessors * BLOCKS_OF_A_MULTIPROCESSOR * ROWS_OF_A_BLOCK
    count = min(request.kv_heads, max(1, -(-rows // (queries * share))))
    return replace(request, shape=(1, count * share, queries, head_dim), kv_heads=count)


def filled(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Random vectors, every key valid, no sample dense."""
    generator = torch.Generator(tensors.q.device).manual_seed(0)
    for x in tensors[:3]:
        x.normal_(generator=generator)
    if tensors.key_lengths is not None:
        for column, (_, length) in enumerate(geometry.contexts):
            tensors.key_lengths[:, column] = length
    if tensors.dense is not None:
        tensors.dense.fill_(False)
    for flags in (tensors.key_mask, tensors.video_mask, tensors.shown):
        if flags is not None:
            flags.fill_(True)
    return tensors
