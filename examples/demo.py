"""`make demo`: two real video transformers, eager, with inductor and with Sliding Tile Attention.

    python examples/demo.py [--layers N] [--picture FILE.png]

Small random models on a CPU; on a GPU Wan 2.1 1.3B at 480p and a quarter of HunyuanVideo's layers at 720p. Prints what
was replaced, the error against eager of window="full" and of the default, and the time of a step; draws a tile's window.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import sta_compile
from sta_compile.errors import ends_in_a_line, needs
from sta_compile.ir.attention_spec import Triple
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.window import Window
from sta_compile.picture import draw_window
from sta_compile.video_models import build, make_inputs

console = Console(width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Case:
    """A diffusers class, its config, the latent (T, H, W) of the video and a window in tokens."""

    name: str
    title: str
    config: dict[str, Any]
    latent: Triple
    window: Triple


SMALL = {"num_attention_heads": 2, "attention_head_dim": 32}
ON_CPU = (
    Case(
        "WanTransformer3DModel", "a small random Wan",
        {**SMALL, "num_layers": 2, "ffn_dim": 128, "text_dim": 64, "rope_max_seq_len": 64},
        (9, 32, 44), (9, 8, 8),
    ),
    Case(
        "HunyuanVideoTransformer3DModel", "a small random HunyuanVideo",
        {**SMALL, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
         "text_embed_dim": 64, "pooled_projection_dim": 16, "rope_axes_dim": (8, 12, 12)},
        (9, 32, 44), (9, 8, 8),
    ),
)  # fmt: skip
ON_GPU = (
    Case(
        "WanTransformer3DModel", "Wan 2.1 1.3B, 81 frames of 480x832",
        {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}, (21, 60, 104), (15, 24, 24),
    ),
    Case(
        "HunyuanVideoTransformer3DModel", "HunyuanVideo, a quarter of its layers, 129 frames of 720x1280",
        {"num_layers": 5, "num_single_layers": 10}, (33, 90, 160), (18, 24, 24),
    ),
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="layers of Wan, for a quick look")
    parser.add_argument("--picture", default="sta_window.png")
    args = parser.parse_args(arguments)
    needs("diffusers", "matplotlib")

    on_gpu = torch.cuda.is_available()
    console.print(
        f"on {torch.cuda.get_device_name() if on_gpu else 'a CPU'}, torch {torch.__version__}"
    )
    if not on_gpu:
        console.print(
            "Here plain PyTorch stands in for the kernels: the times say nothing of a GPU."
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of a CPU: on a busy one, threads wait for each other
    grids: list[sta_compile.Report] = []
    for case in ON_GPU if on_gpu else ON_CPU:
        if args.layers and "num_single_layers" not in case.config:
            case.config["num_layers"] = args.layers
        grids.append(show(case, "cuda" if on_gpu else "cpu"))
    torch.set_num_threads(threads)
    site = grids[0].replaced[0]
    if site.grid is not None and site.tiles is not None and site.window is not None:
        picture = draw_window(Tiling(site.grid, site.tiles), Window(site.window))
        picture.savefig(args.picture, dpi=150)
        console.print(f"wrote {args.picture}: what the queries of one tile attend to")


def show(case: Case, device: str) -> sta_compile.Report:
    """Compares eager, inductor and sta on one model, and returns the report of the default."""
    console.rule(case.title)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = build(case.name, case.config, device=device, dtype=dtype)
    inputs = make_inputs(model, case.latent, device=device, dtype=dtype)
    middle = {**inputs, "timestep": torch.full_like(inputs["timestep"], 500)}

    def step(call: Callable[..., Any]) -> tuple[torch.Tensor, float]:
        """The output and the milliseconds of a step in the middle of a run, after a first, dense one."""
        call(**inputs)
        call(**middle)
        times: list[float] = []
        while len(times) < 3 and sum(times) < 1:  # a long step needs no repeats
            start = time.perf_counter()
            (out,) = call(**middle)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return out, 1e3 * statistics.median(times)

    table = Table("", "ms a step", "against inductor", "error against eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report below says the same
        eager, eager_ms = step(model)
        inductor, inductor_ms = step(torch.compile(model))
        reports: list[sta_compile.Report] = []
        rows = [("eager", eager_ms, 0.0), ("inductor", inductor_ms, error(inductor, eager))]
        for title, options in (
            ('sta, window="full"', {"window": "full"}),
            ("sta, as it is", {}),
            (f"sta, window={case.window}", {"window": case.window}),
        ):
            sta_compile.reset_reports()
            options |= {} if device == "cuda" else {"min_tokens": 0}  # a small video stays exact
            out, ms = step(torch.compile(model, backend="sta", options=options))
            rows.append((title, ms, error(out, eager)))
            reports += sta_compile.reports()[:1]
    for title, ms, difference in rows:
        table.add_row(title, f"{ms:,.1f}", f"{inductor_ms / ms:.2f}x", f"{difference:.1e}")
    report = reports[1]  # of the default
    console.print(report)
    console.print(table)
    console.print("The weights are random, so these errors say nothing of a video's quality.\n")
    torch._dynamo.reset()
    return report


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


if __name__ == "__main__":
    with ends_in_a_line():
        main()
