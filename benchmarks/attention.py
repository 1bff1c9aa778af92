"""Times of sta::attention and its peers on one GPU; correctness first.

    python benchmarks/attention.py            correctness, then medians of all workloads
    python benchmarks/attention.py --sweep    block sizes on two workloads, to choose codegen/blocks.py

Contestants of a workload run interleaved in one process after two seconds of warm-up, so that all see
the same clocks. Prints one JSON object per line; all of them go to $OUT/attention.json as well.
FLOPs are counted on kept pairs only: 4 * pairs * head_dim * heads.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sta_compile.codegen.select import select
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.kernel_spec import Blocks
from sta_compile.ir.runs import key_runs
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.window import Window
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import launch
from sta_compile.runtime.problem import problem_of
from sta_compile.runtime.tensors import Tensors

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Workload:
    name: str
    grid: tuple[int, int, int]
    tiles: tuple[int, int, int]
    window: tuple[int, int, int] | str
    heads: int
    head_dim: int = 128
    text: int = 0
    valid: int | None = None  # valid text keys
    dense: bool = False
    token_major: bool = True
    peers: bool = False

    @property
    def video(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


W1 = Workload("W1 333", (30, 48, 80), (5, 6, 10), (3, 3, 3), 24)
WAN = Workload("wan 21x45x80", (21, 45, 80), (4, 5, 11), (3, 3, 3), 40)
WORKLOADS = (
    W1,
    replace(W1, name="W1 333 head-major", token_major=False),
    replace(W1, name="W1 555", window=(5, 5, 5)),
    replace(W1, name="W1 333 text 256", text=256, valid=200),
    WAN,
    Workload("hunyuan 33x45x80", (33, 45, 80), (6, 5, 11), (3, 3, 3), 24, text=256, valid=77),
    Workload("31x44x80", (31, 44, 80), (5, 6, 9), (3, 3, 3), 24),
    Workload("mochi 28x30x53", (28, 30, 53), (6, 4, 6), (3, 3, 3), 24, text=256, valid=200),
    Workload("cogvideox 11x48x85", (11, 48, 85), (1, 6, 18), (1, 3, 5), 48, head_dim=64, text=226),
    replace(W1, name="W1 333 d64", head_dim=64),
    replace(W1, name="W1 full", window="full", peers=True),
    replace(W1, name="W1 dense flag", dense=True, peers=True),
)


class Call:
    """The tensors and the operator call of a workload."""

    def __init__(self, w: Workload) -> None:
        roles = ("video", "context") if w.text else ("video",)
        segments = [w.video, w.text] if w.text else [w.video]
        tokens = sum(segments)
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.workload = w

        def tensor() -> torch.Tensor:
            shape = (1, tokens, w.heads, w.head_dim)
            if not w.token_major:
                shape = (1, w.heads, tokens, w.head_dim)
            x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)
            return x.transpose(1, 2) if w.token_major else x

        self.q, self.k, self.v = tensor(), tensor(), tensor()
        self.lengths = None
        if w.valid is not None:
            self.lengths = torch.tensor([[w.valid]], device=DEVICE)
            for x in (self.k, self.v):
                x[:, :, w.video + w.valid :] = torch.nan
        self.dense = torch.ones(1, dtype=torch.bool, device=DEVICE) if w.dense else None
        self.spec = AttentionSpec(roles, tiles=w.tiles, window=w.window, kernel="auto").text()
        self.scale = w.head_dim**-0.5
        self.problem = (
            self.lengths,
            self.dense,
            segments,
            list(w.grid),
            self.spec,
            self.scale,
        )
        self.geometry = geometry_of(segments, w.grid, self.spec)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.sta.attention(self.q, self.k, self.v, *self.problem)

    def flops(self) -> float:
        geometry = self.geometry.full() if self.workload.dense else self.geometry
        return 4.0 * geometry.pairs * self.workload.head_dim * self.workload.heads

    def error(self) -> float:
        """Largest relative error over sampled query tiles; output memory was full of NaN."""
        w = self.workload
        poison = [torch.full_like(x, torch.nan) for x in (self.q, self.q)]
        del poison
        out, lse = self()
        assert not out.isnan().any(), "NaN in out"
        assert not lse.isnan().any(), "NaN in lse"
        tiling = Tiling(w.grid, w.tiles)
        full = w.window == "full" or w.dense
        window = Window(w.tiles if full else w.window)
        text = [(w.video, w.text if w.valid is None else w.valid)]
        units = [
            (tiling.start(*tile), tiling.count(*tile), [*key_runs(tiling, window, tile), *text])
            for tile in ((0, 0, 0), tuple(n // 2 for n in w.tiles), tuple(n - 1 for n in w.tiles))
        ]
        if w.text:
            units.append((w.video, w.text, [(0, w.video), *text]))
        errors = []
        heads = (0, w.heads - 1)
        for start, count, runs in units:
            for head in heads:
                q = self.q[:, head, start : start + count].float()
                k, v = (
                    torch.cat([x[:, head, a : a + n] for a, n in runs], 1).float()
                    for x in (self.k, self.v)
                )
                scores = q @ k.mT * self.scale
                expected = scores.softmax(-1) @ v
                ours = out[:, head, start : start + count].float()
                errors.append(((ours - expected).norm() / expected.norm()).item())
                apart = (lse[:, head, start : start + count] - scores.logsumexp(-1)).abs().max()
                assert apart < 1e-3, f"lse is off by {apart}"
        return max(errors)


def warm_up(seconds: float = 2.0) -> None:
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    end = time.time() + seconds
    while time.time() < end:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize()


def interleaved(contestants: dict[str, Callable[[], object]], budget: float) -> dict[str, float]:
    """Median milliseconds of each, in rounds of one launch each."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    end, rounds = time.time() + budget, 0
    while rounds < 5 or (time.time() < end and rounds < 100):
        for name, run in contestants.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


def peers(call: Call) -> dict[str, Callable[[], object]]:
    q, k, v = (x.contiguous() for x in (call.q, call.k, call.v))

    def sdpa(backend: SDPBackend) -> Callable[[], object]:
        def run() -> object:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v)

        return run

    found = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    usable = {}
    for name, backend in found.items():
        try:
            sdpa(backend)()
            usable[name] = sdpa(backend)
        except RuntimeError as error:
            print(f"peer {name} does not run: {error}")
    return usable


def measure(w: Workload) -> dict[str, object]:
    call = Call(w)
    error = call.error()
    kernel = [*launch._ready.values()][-1].spec.text()  # each workload is bound once
    assert error < 3e-3, f"{w.name}: relative error {error}"
    contestants = {"sta": call, **(peers(call) if w.peers else {})}
    for run in contestants.values():
        run()
    torch.cuda.synchronize()
    medians = interleaved(contestants, 6.0 if w.peers else 3.0)
    return {
        "workload": w.name,
        "error": error,
        "kernel": kernel,
        "kept": call.geometry.pairs / (call.geometry.queries * call.geometry.keys),
        "ms": medians,
        "tflops": {name: call.flops() / ms / 1e9 for name, ms in medians.items()},
    }


def host_overhead() -> dict[str, object]:
    """Microseconds of Python per call, for a problem that the GPU finishes at once."""
    call = Call(Workload("tiny", (3, 8, 8), (3, 4, 4), (1, 3, 3), 2))
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return {"host_us_per_call": spent / 500 * 1e6}


SWEEP = [
    *(Blocks(128, n, w, s) for n, w, s in [(128, 8, 3), (128, 8, 2), (64, 8, 3), (64, 8, 4)]),
    *(Blocks(128, n, w, s) for n, w, s in [(64, 4, 3), (256, 8, 2), (32, 8, 4)]),
    *(Blocks(64, n, w, s) for n, w, s in [(128, 4, 2), (128, 4, 3), (64, 4, 2), (64, 4, 3)]),
    *(Blocks(64, n, w, s) for n, w, s in [(64, 4, 4), (128, 8, 3)]),
    *(Blocks(256, n, w, s) for n, w, s in [(64, 8, 3), (128, 16, 2)]),
]


def sweep() -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for w in (W1, WAN, replace(W1, name="W1 333 d64", head_dim=64)):
        call = Call(w)
        out = torch.empty_like(call.q)
        lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
        tensors = Tensors(call.q, call.k, call.v, out, lse)
        base = select(problem_of(tensors, call.geometry, call.scale), "triton")[0]
        runs: dict[str, Callable[[], object]] = {}
        for spec in base:
            for blocks in SWEEP:
                candidate = replace(spec, blocks=blocks)
                if spec.loads == "pointer" and blocks.m > 128:
                    continue
                started = launch.run(candidate, tensors, call.geometry, call.scale)
                if started:
                    torch.cuda.synchronize()
                    runs[candidate.text()] = partial(started, tensors)
        for name, ms in interleaved(runs, 1.0).items():
            tflops = call.flops() / ms / 1e9
            results.append({"workload": w.name, "kernel": name, "ms": ms, "tflops": tflops})
    return sorted(results, key=lambda r: (r["workload"], r["ms"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time block sizes")
    arguments = parser.parse_args()
    import triton

    record: list[dict[str, object]] = [
        {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "cudnn": torch.backends.cudnn.version(),
            "commit": os.environ.get("STA_COMMIT", "unknown"),
        }
    ]
    print(json.dumps(record[0]), flush=True)
    warm_up()

    def add(result: dict[str, object]) -> None:
        record.append(result)
        print(json.dumps(result), flush=True)

    if arguments.sweep:
        for result in sweep():
            add(result)
    else:
        for workload in WORKLOADS:
            try:
                add(measure(workload))
            except AssertionError as error:
                add({"workload": workload.name, "failed": str(error)})
            torch.cuda.empty_cache()
        add(host_overhead())
    folder = Path(os.environ.get("OUT", "."))
    name = "attention_sweep.json" if arguments.sweep else "attention.json"
    (folder / name).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
