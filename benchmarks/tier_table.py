"""Error against time of ways to read less, on activations of the model that examples/moving_shapes.py trains.

    python examples/moving_shapes.py train
    python benchmarks/tier_table.py --weights moving_shapes.pt --json tiers.json --plot tiers.png

Queries, keys and values are those of the model's layers at some steps of sampling, heads of all of them in one call. Errors
are root mean squares relative to attention in float32; times are medians of whole calls on the GPU, statistics, routing and
quantizing included, and of the kernel alone. Ways to read less:

    STA       a sliding window of tiles, bf16
    fp8       all keys in e4m3
    top-k     blocks with the largest products of means in bf16, the others dropped (SpargeAttn, arXiv 2502.18137)
    means     tiers without e4m3: a block is read in bf16, or its means stand for it
    plain     as means, without slopes of values and without the scores' second order
    tiers     precision="tiered"

The last four are of the kernel alone, with a router that has run before; "whole calls" have all of it.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sta_compile.bench.run import describe
from sta_compile.codegen.cutlass_fp8 import CutlassTieredForward
from sta_compile.errors import StaError, ends_in_a_line
from sta_compile.ir.attention_spec import AttentionSpec, Triple
from sta_compile.ir.geometry import Geometry
from sta_compile.ir.tiling import Tiling
from sta_compile.ir.trade import EXACT, Trade
from sta_compile.ir.window import Window
from sta_compile.planning.choose_tiles import plan_attention
from sta_compile.runtime import tiered
from sta_compile.runtime.cutlass_runner import CutlassRunner, start_of_tiers
from sta_compile.runtime.problem import problem_of
from sta_compile.runtime.quantize import quantized
from sta_compile.runtime.tensors import Tensors
from sta_compile.tiers.attention import Tier
from sta_compile.tiers.router import COSTS, choose_tiers, lists_of

EXAMPLE = Path(__file__).parents[1] / "examples" / "moving_shapes.py"
STEPS = (3, 10, 17, 24)  # of sampling
ROUNDS = 5
PRICES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0)


@dataclass(frozen=True)
class Layer:
    """q, k, v: bf16 [1, heads, tokens, head_dim], in tile order."""

    q: Tensor
    k: Tensor
    v: Tensor
    tiling: Tiling

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1]) ** -0.5

    def call(self, spec: AttentionSpec) -> Tensor:
        grid, tokens = list(self.tiling.grid), self.tiling.tokens
        none = None, None
        problem = [tokens], grid, spec.text(), self.scale
        out: Tensor = torch.ops.sta.attention(self.q, self.k, self.v, *none, *problem)[0]
        return out


class Kept(TorchFunctionMode):
    """Keeps q, k and v of self-attention over so many tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.found: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            q, k, v = (*args, *(kwargs or {}).values())[:3]
            if q.shape[2] == k.shape[2] == self.tokens:
                self.found.append((q[:1].clone(), k[:1].clone(), v[:1].clone()))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def layer_of(weights: str, device: torch.device) -> Layer:
    """Heads of all layers and of STEPS, as if of one layer."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    example = runpy.run_path(str(EXAMPLE))
    size = example["SIZES"]["cuda"]
    model = size.model().to(device)
    model.load_state_dict(torch.load(weights, map_location=device, weights_only=True))
    model.to(torch.bfloat16).eval()
    grid = size.video[0], size.video[1] // 2, size.video[2] // 2
    prompts = example["scenes"](1, device, torch.Generator(device).manual_seed(2))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(size.steps, device=device)
    x = torch.randn(
        (1, 3, *size.video), device=device, generator=torch.Generator(device).manual_seed(1)
    )
    kept = Kept(grid[0] * grid[1] * grid[2])
    for index, step in enumerate(scheduler.timesteps):
        with kept:
            arguments = x.bfloat16(), step.expand(1), prompts.bfloat16()
            velocity = model(*arguments, return_dict=False)[0]
        if index not in STEPS:
            del kept.found[-size.layers :]
        x = scheduler.step(velocity.float(), step, x, return_dict=False)[0]
    return tiled([torch.cat(each, 1) for each in zip(*kept.found, strict=True)], grid)


def tiled(operands: list[Tensor], grid: Triple) -> Layer:
    tiling = plan_attention(grid, "full").tiling
    order = torch.tensor(tiling.order(), device=operands[0].device)
    q, k, v = (
        x.bfloat16()[:, :, order].transpose(1, 2).contiguous().transpose(1, 2) for x in operands
    )
    return Layer(q, k, v, tiling)


@dataclass(frozen=True)
class Way:
    name: str
    setting: str
    run: Callable[[], Tensor]


def windows(layer: Layer) -> Iterator[Way]:
    n = layer.tiling.tiles
    spec = AttentionSpec(("video",), n, "full")
    yield Way("dense", "bf16", lambda: layer.call(spec))
    yield Way("fp8", "", lambda: layer.call(replace(spec, precision="fp8")))
    for price in PRICES:
        whole = replace(spec, precision="tiered", trade=Trade(price))
        yield Way("tiers, whole calls", f"{price:g}", lambda whole=whole: layer.call(whole))
    for kept in ((1, 1, 1), (3, 1, 1), (3, 3, 1), (3, 3, 3), (5, 3, 3), (5, 5, 3), (5, 5, 5)):
        window = tuple(min(a, b) for a, b in zip(kept, n, strict=True))
        text = "x".join(map(str, window))
        yield Way("STA", text, lambda window=window: layer.call(replace(spec, window=window)))


class Routed:
    """Launches of the kernel with tiers, of other makers' tiers too."""

    def __init__(self, layer: Layer) -> None:
        self.layer, q = layer, layer.q
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
        self.tensors = Tensors(q, layer.k, layer.v, out, lse)
        tiling = layer.tiling
        geometry = Geometry((tiling.tokens,), ("video",), tiling, Window(tiling.tiles))
        problem = problem_of(self.tensors, geometry, layer.scale, precision="tiered")
        spec = CutlassTieredForward().specify(problem)
        self.plan = tiered.plan_of(spec, self.tensors, geometry)
        binary = CutlassRunner().build(spec, q.device.index or 0)
        self.start = start_of_tiers(spec, binary, self.tensors, self.plan, layer.scale)
        self.made = quantized(self.tensors, geometry, layer.scale, sources=self.plan.sources)
        self.keys, self.predicted, _ = tiered.routed(
            *self.tensors[:3], self.plan, None, layer.scale, EXACT
        )

    def way(self, name: str, setting: str, tiers: Tensor, plain: bool = False) -> Way:
        """The whole call is this plus what the statistics and the router take, which is that of `tiers` for all."""
        predicted, slope = self.predicted, self.keys.slope(self.layer.scale)
        if plain:
            log_n = self.plan.blocks.lengths.log().expand_as(predicted.log_skipped)
            predicted, slope = replace(predicted, log_skipped=log_n), torch.zeros_like(slope)
        routing = lists_of(tiers, predicted, self.layer.scale)
        means = self.keys.mean_k, self.keys.mean_v, slope
        given = tiered.assembled(self.tensors, self.made, means, routing, self.plan)

        def kernel() -> Tensor:
            self.start(given)
            return self.tensors.out

        shares = [float((tiers == tier).float().mean()) for tier in (Tier.REFINE, Tier.SKIM)]
        return Way(name, f"{setting} ({shares[0]:.0%} bf16, {shares[1]:.0%} fp8)", kernel)

    def top_k(self, share: float) -> Tensor:
        """The blocks of each row with the largest products of means."""
        group = self.layer.q.shape[1] // self.keys.mean_k.shape[1]
        starts, lengths = self.plan.rows.runs.long().T
        of_row = torch.arange(len(starts), device=starts.device).repeat_interleave(lengths)
        means = self.layer.q.new_zeros(
            (1, self.layer.q.shape[1], len(starts), self.layer.q.shape[-1]), dtype=torch.float32
        )
        means.index_add_(2, of_row, self.layer.q.float())
        means = means / lengths.clamp(min=1)[:, None]
        scores = means @ self.keys.mean_k.float().repeat_interleave(group, 1).mT
        kept = max(1, round(share * scores.shape[-1]))
        best = scores.topk(kept, -1).indices
        tiers = torch.full_like(scores, int(Tier.DROP), dtype=torch.uint8)
        return tiers.scatter(-1, best, int(Tier.REFINE))


def routed(layer: Layer) -> Iterator[Way]:
    made = Routed(layer)
    for share in (0.02, 0.05, 0.1, 0.2, 0.4):
        yield made.way("top-k", f"{share:.0%}", made.top_k(share))
    for price in PRICES:
        no_e4m3 = replace(COSTS, skim=1e9)
        yield made.way("means", f"{price:g}", choose_tiers(made.predicted, price, no_e4m3))
        yield made.way("plain", f"{price:g}", choose_tiers(made.predicted, price, no_e4m3), True)
    for price in PRICES:
        yield made.way("tiers", f"{price:g}", choose_tiers(made.predicted, price, COSTS))


def exact(layer: Layer) -> Tensor:
    """float32 [1, heads, tokens, head_dim], a head and some queries at a time."""
    found = torch.empty(layer.q.shape, device=layer.q.device)
    for head in range(layer.q.shape[1]):
        k, v = layer.k[0, head].float(), layer.v[0, head].float()
        for start in range(0, layer.q.shape[2], 4096):
            rows = slice(start, start + 4096)
            scores = layer.scale * (layer.q[0, head, rows].float() @ k.mT)
            found[0, head, rows] = scores.softmax(-1) @ v
    return found


def measure(layer: Layer, ways: list[Way]) -> list[dict[str, Any]]:
    """Turns of all ways, so that the clock is one for all."""
    expected = exact(layer)
    rows: list[dict[str, Any]] = []
    for way in ways:
        out = way.run()
        error = float((out.float() - expected).norm() / expected.norm())
        rows.append({"way": way.name, "setting": way.setting, "error": error, "times": []})
    for _ in range(ROUNDS):
        for way, row in zip(ways, rows, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(3):
                way.run()
            end.record()
            end.synchronize()
            row["times"].append(start.elapsed_time(end) / 3)
    for row in rows:
        row["ms"] = statistics.median(row.pop("times"))
    return rows


def plot(rows: list[dict[str, Any]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    ax = figure.subplots()
    for name in dict.fromkeys(row["way"] for row in rows):
        mine = sorted((row["ms"], row["error"]) for row in rows if row["way"] == name)
        ax.plot(*zip(*mine, strict=True), "o-", label=name)
    ax.set(xlabel="ms", ylabel="relative error", yscale="log")
    ax.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", default="moving_shapes.pt")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise StaError("kernels with tiers are for Hopper GPUs; run this on one")
    layer = layer_of(args.weights, torch.device("cuda", 0))
    rows = measure(layer, [*windows(layer), *routed(layer)])
    table = Table("", "setting", "relative error", "ms")
    for row in rows:
        table.add_row(row["way"], row["setting"], f"{row['error']:.4f}", f"{row['ms']:.2f}")
    Console(width=100).print(table)
    if args.json:
        command = "python benchmarks/tier_table.py --weights moving_shapes.pt"
        head = describe(torch.device("cuda", 0), command)
        shape = {
            "shape": list(layer.q.shape),
            "grid": layer.tiling.grid,
            "tiles": layer.tiling.tiles,
        }
        Path(args.json).write_text(json.dumps([head | shape, *rows], indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    with ends_in_a_line():
        main()
