"""A quarter of HunyuanVideo on one GPU: steps of eager, inductor and sta, and whole sampling schedules.

    python benchmarks/hunyuan_quarter.py                 all parts
    python benchmarks/hunyuan_quarter.py --parts steps   without the 50-step schedules

The model is diffusers' HunyuanVideoTransformer3DModel with 5 double and 10 single blocks of the real width (24 heads of
128), random bf16 weights, 256 text tokens of which 156 are valid, over a 30x48x80 token grid. Attention and the rest are
timed apart, so that a schedule can be compared with what Amdahl's law predicts from the kernels:

    predicted = sum over steps of (rest + layers * kernel(step)),   share = predicted / measured

Prints one JSON object per line, and writes all of them to $OUT/hunyuan_quarter.json.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTransformer3DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)

import sta_compile
from sta_compile.backend import sta
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.planning.choose_tiles import plan_attention
from sta_compile.planning.noise import parse_noise
from sta_compile.planning.noise_schedule import dense_steps

GRID, TEXT, VALID, HEADS, HEAD_DIM, DOUBLE, SINGLE = (30, 48, 80), 256, 156, 24, 128, 5, 10
LAYERS = DOUBLE + SINGLE
TOKENS = GRID[0] * GRID[1] * GRID[2]
WINDOWS: dict[str, Any] = {"(18,24,24)": (18, 24, 24), "default": "auto"}
DEVICE = torch.device("cuda")
STEPS, SHIFT = 50, 7.0  # as diffusers' pipeline samples 720p
NOISE = "0..1000"

record: list[dict[str, Any]] = []


def add(**values: Any) -> None:
    record.append(values)
    print(json.dumps(values), flush=True)
    folder = Path(
        os.environ.get("OUT", ".")
    )  # after every line: a run that is stopped keeps what it has
    (folder / "hunyuan_quarter.json").write_text(json.dumps(record, indent=1))


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    with DEVICE:
        model = HunyuanVideoTransformer3DModel(
            num_layers=DOUBLE, num_single_layers=SINGLE, guidance_embeds=True
        )
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def as_pipelines_do(t: torch.Tensor) -> torch.Tensor:
    """The timestep of a sampling loop, from the scheduler's 0-d tensor. Every call takes this road: `expand` leaves a
    stride of 0, which is a recompile for code compiled with another."""
    return t.expand(1).to(torch.long)


def inputs(timestep: float) -> dict[str, Any]:
    g = torch.Generator(DEVICE).manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=g)

    mask = torch.zeros(1, TEXT, device=DEVICE, dtype=torch.long)
    mask[:, :VALID] = 1
    return {
        "hidden_states": randn(1, 16, GRID[0], 2 * GRID[1], 2 * GRID[2]),
        "timestep": as_pipelines_do(torch.tensor(timestep, device=DEVICE)),
        "encoder_hidden_states": randn(1, TEXT, 4096),
        "encoder_attention_mask": mask,
        "pooled_projections": randn(1, 768),
        "guidance": torch.full((1,), 6000.0, device=DEVICE, dtype=torch.bfloat16),
        "return_dict": False,
    }


def milliseconds(run: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def time_attention() -> dict[str, float]:
    """Milliseconds of one layer's attention: SDPA with the mask, and the operator sparse and dense."""
    q, k, v = (
        torch.randn(
            1, TOKENS + TEXT, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16
        ).transpose(1, 2)
        for _ in range(3)
    )
    mask = torch.arange(TOKENS + TEXT, device=DEVICE)[None, None, None] < TOKENS + VALID
    lengths = torch.tensor([[VALID]], device=DEVICE, dtype=torch.int32)
    runs: dict[str, Callable[[], Any]] = {
        "sdpa with mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    }
    for name, window in WINDOWS.items():
        plan = plan_attention(GRID, window)
        spec = AttentionSpec(("video", "context"), plan.tiling.tiles, plan.window.tiles).text()
        for flag in (False, True):
            dense = torch.full((1,), flag, device=DEVICE)
            runs[f"sta {name}{' dense' if flag else ''}"] = lambda s=spec, d=dense: (
                torch.ops.sta.attention(
                    q, k, v, lengths, d, [TOKENS, TEXT], list(GRID), s, HEAD_DIM**-0.5
                )
            )
    for run in runs.values():
        run()
    end = time.time() + 2
    while time.time() < end:
        runs["sta (18,24,24)"]()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(5):
        for name, run in runs.items():
            times[name].append(milliseconds(run, 1))
    return {name: statistics.median(values) for name, values in times.items()}


def compiled(model: torch.nn.Module, window: Any) -> tuple[Any, float]:
    """The compiled model and the seconds of its first call, on a step under the threshold."""
    torch._dynamo.reset()
    backend: Any = "inductor" if window is None else sta
    options = None if window is None else {"window": window, "noise": NOISE}
    run = torch.compile(model, backend=backend, fullgraph=True, options=options)
    start = time.perf_counter()
    run(**inputs(500))
    torch.cuda.synchronize()
    return run, time.perf_counter() - start


def peak(run: Callable[[], Any]) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def schedule() -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(STEPS, device=DEVICE)
    return scheduler


def timesteps() -> list[float]:
    """What the model sees, step by step."""
    return [float(as_pipelines_do(t)) for t in schedule().timesteps]


def sample(run: Any) -> tuple[float, list[float]]:
    """Seconds of a whole schedule after its compile, and of each step."""
    scheduler = schedule()
    arguments = inputs(1000)
    latents = arguments["hidden_states"]
    seconds = []
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for t in scheduler.timesteps:
        start = time.perf_counter()
        arguments["hidden_states"] = latents
        arguments["timestep"] = as_pipelines_do(t)
        prediction = run(**arguments)[0]
        latents = scheduler.step(prediction, t, latents, return_dict=False)[0]
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    assert latents.isfinite().all()
    return time.perf_counter() - begin, seconds


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="steps,schedules")
    parts = parser.parse_args().parts.split(",")
    add(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(),
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        command="python benchmarks/hunyuan_quarter.py",
        commit=os.environ.get("STA_COMMIT", "unknown"),
    )
    kernels = time_attention()
    add(attention_ms=kernels)
    model = build()
    reference = model(**inputs(990))[0]
    run, seconds = compiled(model, None)
    inductor = milliseconds(lambda: run(**inputs(500)), 3)
    memory = peak(lambda: run(**inputs(500)))
    add(model="inductor", step_ms=inductor, compile_s=seconds, peak_gib=memory)
    rest = inductor - LAYERS * kernels["sdpa with mask"]
    add(rest_ms=rest)
    convention = parse_noise(NOISE)
    assert convention is not None
    for name, window in WINDOWS.items():
        run, seconds = compiled(model, window)
        report = sta_compile.reports()[-1]
        sparse = milliseconds(lambda: run(**inputs(500)), 3)  # noqa: B023
        predicted = rest + LAYERS * kernels[f"sta {name}"]
        error = relative_error(run(**inputs(990))[0], reference)
        add(
            model=f"sta {name}",
            step_ms=sparse,
            predicted_ms=predicted,
            share_of_predicted=predicted / sparse,
            speedup=inductor / sparse,
            compile_s=seconds,
            peak_gib=peak(lambda: run(**inputs(500))),  # noqa: B023
            dense_step_error=error,
            summary=report.summary(),
            stages_s=sum(report.seconds.values()),
        )
        if "schedules" in parts:
            compiled_graphs = len(sta_compile.reports())
            total, steps = sample(run)
            assert len(sta_compile.reports()) == compiled_graphs, "a step compiled again"
            dense = sum(dense_steps(convention, timesteps(), 0.95))
            kernel = dense * kernels[f"sta {name} dense"] + (STEPS - dense) * kernels[f"sta {name}"]
            expected = (STEPS * rest + LAYERS * kernel) / 1e3
            add(
                schedule=f"sta {name}",
                steps=STEPS,
                dense_steps=dense,
                seconds=total,
                step_s=steps,
                predicted_s=expected,
                share_of_predicted=expected / total,
                inductor_s=STEPS * inductor / 1e3,
                speedup=STEPS * inductor / 1e3 / total,
            )


if __name__ == "__main__":
    main()
