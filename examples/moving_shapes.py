"""Train a small video transformer on moving shapes, then see what windows do to the videos that it generates.

    python examples/moving_shapes.py train      some minutes on a GPU; --minutes 5
    python examples/moving_shapes.py compare    PSNR and SSIM against the dense model, same seed, beside the time of a step

A video is a few discs and squares that move in straight lines and bounce, over a background that drifts; what the model is
told is the list of shapes. Data and weights are made here, so quality is measured on something learned, and anyone can
repeat it. There is no autoencoder: a latent is the video itself, of 32 frames, and a token is 2x2 pixels of a frame.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sta_compile
from sta_compile.errors import StaError, ends_in_a_line, needs

SHAPES = 4  # of a video; each is one token of the prompt
MOMENTS = 8  # whose positions a token tells
FEATURES = 9 + 2 * MOMENTS
console = Console(width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Size:
    """Of the videos (frames, height and width in pixels) and of the model.

    parts: of training, (share of the time, video, batch): shapes and prompts are learned soonest from small videos.
    """

    video: tuple[int, int, int] = (32, 48, 80)
    layers: int = 6
    heads: int = 2
    head_dim: int = 128
    parts: tuple[tuple[float, tuple[int, int, int], int], ...] = (
        (0.75, (16, 24, 40), 32),
        (0.25, (32, 48, 80), 4),
    )
    steps: int = 30  # of sampling

    def model(self) -> torch.nn.Module:
        from diffusers import WanTransformer3DModel

        model: torch.nn.Module = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=self.heads, attention_head_dim=self.head_dim,
            in_channels=3, out_channels=3, text_dim=FEATURES, freq_dim=64, num_layers=self.layers,
            ffn_dim=4 * self.heads * self.head_dim, rope_max_seq_len=128,
        )  # fmt: skip
        return model


SMALL = (9, 24, 32)
SIZES = {"cuda": Size(), "cpu": Size(SMALL, 1, 2, 16, ((1.0, SMALL, 2),), 4)}


def scenes(count: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Prompts: [count, SHAPES, FEATURES] in -1 to 1, each row (square or disc, r, g, b, radius, x, y, vx, vy), and then x
    and y at MOMENTS from the first frame to the last.
    """
    prompts = torch.rand(count, SHAPES, 9, device=device, generator=generator) * 2 - 1
    prompts[..., 0] = prompts[..., 0].sign()
    t = torch.linspace(0, 1, MOMENTS, device=device)
    x, y = (center(prompts[..., None], axis, t) for axis in (0, 1))
    return torch.cat([prompts, x, y], -1)


def center(shapes: Tensor, axis: int, t: Tensor) -> Tensor:
    """Where shapes are at times 0 to 1, of x (axis 0) or y. shapes: [..., features, 1...]"""
    features = shapes.unbind(-1 - t.dim())
    return bounced(features[5 + axis] + 2.5 * features[7 + axis] * t)


def render(prompts: Tensor, size: tuple[int, int, int]) -> Tensor:
    """The videos of prompts: [count, 3, frames, height, width] in -1 to 1, edges a pixel soft."""
    frames, height, width = size
    t = torch.linspace(0, 1, frames, device=prompts.device)
    y = torch.linspace(-1, 1, height, device=prompts.device)[:, None]
    x = torch.linspace(-1, 1, width, device=prompts.device)
    first = prompts[
        :, 0, 1:4
    ]  # the background takes the first shape's colour, dimmed, and drifts with the time
    wave = torch.sin(3 * x + 2 * y + 4 * t[:, None, None]).expand(frames, height, width)
    video = 0.3 * first[..., None, None, None] + 0.15 * wave
    for index in range(SHAPES):
        shape = prompts[:, index, :, None, None, None]
        center_x, center_y = (center(shape, axis, t[:, None, None]) for axis in (0, 1))
        across, down = (x - center_x).abs(), (y - center_y).abs()
        distance = torch.where(
            shape[:, 0] > 0, torch.maximum(across, down), (across**2 + down**2).sqrt()
        )
        inside = torch.sigmoid((0.25 + 0.1 * shape[:, 4] - distance) * height / 2)
        video = torch.lerp(video, shape[:, 1:4], inside[:, None])
    return video.clamp(-1, 1)


def bounced(position: Tensor) -> Tensor:
    """Into -1 to 1, turned back at walls."""
    return 1 - ((position + 1) % 4 - 2).abs()


@torch.enable_grad()
def train(args: argparse.Namespace, size: Size, device: torch.device) -> None:
    """Flow matching (Lipman et al. 2023, eq. 23): the model learns noise - video at x = (1 - s) video + s noise."""
    generator = torch.Generator(device).manual_seed(0)
    torch.manual_seed(0)
    model = size.model().to(device)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.998))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    losses: list[Tensor] = []
    for done in track(until(args.minutes, args.steps), description="training", console=console):
        shares = accumulate(share for share, *_ in size.parts)
        _, shape, batch = next(
            part for part, end in zip(size.parts, shares, strict=True) if done < end
        )
        prompts = scenes(batch, device, generator)
        video = render(prompts, shape)
        noise = torch.randn(video.shape, device=device, generator=generator)
        level = torch.randn(batch, device=device, generator=generator).add(0.5).sigmoid()
        noisy = torch.lerp(video, noise, level[:, None, None, None, None])
        with torch.autocast(device.type, torch.bfloat16):
            found = model(noisy, level * 1000, prompts, return_dict=False)[0]
        loss = F.mse_loss(found.float(), noise - video)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        rate = 1e-3 * min(1.0, (len(losses) + 1) / 200) * (1 - done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        averaged.update_parameters(model)
        losses.append(loss.detach())
    last = torch.stack(losses[-50:]).mean().item()
    torch.save(averaged.module.to(torch.bfloat16).state_dict(), args.weights)
    console.print(f"{len(losses)} steps, loss {last:.4f}; the weights are in {args.weights}")


def until(minutes: float, steps: int | None) -> Iterator[float]:
    """For so many steps, or as long: the share of them that is over, below 1."""
    start, step = time.monotonic(), 0
    while True:
        over = (time.monotonic() - start) / (60 * minutes) if steps is None else step / steps
        if over >= 1:
            return
        yield over
        step += 1


@torch.no_grad()
def sample(
    model: torch.nn.Module, scheduler: Any, prompts: Tensor, size: Size
) -> tuple[Tensor, float]:
    """(videos of the prompts, float32; median seconds of a step). The noise is the same in every call."""
    device = prompts.device
    generator = torch.Generator(device).manual_seed(1)
    dtype = next(model.parameters()).dtype
    x = torch.randn((len(prompts), 3, *size.video), device=device, generator=generator)
    scheduler.set_timesteps(size.steps, device=device)
    seconds = []
    for timestep in scheduler.timesteps:
        start = time.perf_counter()
        told = timestep.expand(len(prompts))
        velocity = model(x.to(dtype), told, prompts.to(dtype), return_dict=False)[0]
        x = scheduler.step(velocity.float(), timestep, x, return_dict=False)[0]
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return x.clamp(-1, 1), statistics.median(seconds[len(seconds) // 2 :])


def psnr(videos: Tensor, exact: Tensor) -> float:
    """Peak signal-to-noise ratio in dB; values span 2. The mean over videos."""
    error = (videos - exact).square().flatten(1).mean(1).clamp_min(1e-12)
    return (10 * torch.log10(4 / error)).mean().item()


def ssim(videos: Tensor, exact: Tensor) -> float:
    """Structural similarity of frames (Wang et al. 2004, eq. 13), over windows of 7x7 pixels; values span 2."""
    a, b = (x.transpose(1, 2).flatten(0, 1) for x in (videos, exact))  # [frames, 3, height, width]
    mean_a, mean_b = (F.avg_pool2d(x, 7, 1) for x in (a, b))
    var_a, var_b = (F.avg_pool2d(x * x, 7, 1) - mean**2 for x, mean in ((a, mean_a), (b, mean_b)))
    both = F.avg_pool2d(a * b, 7, 1) - mean_a * mean_b
    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    value = (2 * mean_a * mean_b + c1) * (2 * both + c2)
    return (value / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean().item()


def compare(args: argparse.Namespace, size: Size, device: torch.device) -> None:
    """Videos of each window, with the same prompts and noise, against those of the dense model."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    needs("matplotlib")
    if not Path(args.weights).exists():
        raise StaError(f"there is no {args.weights}; run `train` first")
    prompts = scenes(args.videos, device, torch.Generator(device).manual_seed(2))
    truth = render(prompts, size.video)
    weights = torch.load(args.weights, map_location=device, weights_only=True)
    rows: list[dict[str, Any]] = []
    shown: dict[str, Tensor] = {"data": truth[0]}
    exact: Tensor | None = None
    for window in ("full", *args.windows):
        torch._dynamo.reset()
        model = size.model().to(device)
        model.load_state_dict(weights)
        model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        given = window if window == "full" else tuple(map(int, window.split(",")))
        sta_compile.compile(model, scheduler=scheduler, window=given, min_tokens=1)
        sample(model, scheduler, prompts, size)  # compiles
        videos, seconds = sample(model, scheduler, prompts, size)
        exact = videos if exact is None else exact
        row = {"window": window, "step_ms": seconds * 1e3, "psnr_to_data": psnr(videos, truth)}
        if window != "full":
            row |= {"psnr": psnr(videos, exact), "ssim": ssim(videos, exact)}
        rows.append(row)
        shown[window] = videos[0]
    console.print(as_table(rows))
    frames_of(shown).savefig(args.frames, dpi=120)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    console.print(f"frames of the first video are in {args.frames}")


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "window in tokens", "ms of a step", "PSNR to dense", "SSIM to dense", "PSNR to data"
    )
    for row in rows:
        beside = (f"{row['psnr']:.1f} dB", f"{row['ssim']:.4f}") if "psnr" in row else ("", "")
        table.add_row(
            row["window"], f"{row['step_ms']:.1f}", *beside, f"{row['psnr_to_data']:.1f} dB"
        )
    return table


def frames_of(videos: dict[str, Tensor], columns: int = 6) -> Any:
    """A row of frames for each video [3, frames, height, width]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * columns, 1.3 * len(videos)), layout="constrained")
    axes = figure.subplots(len(videos), columns, squeeze=False)
    for row, (name, video) in zip(axes, videos.items(), strict=True):
        picked = torch.linspace(0, video.shape[1] - 1, columns).round().long()
        for ax, frame in zip(row, picked.tolist(), strict=True):
            ax.imshow((video[:, frame].permute(1, 2, 0).float().cpu() + 1).div(2).clamp(0, 1))
            ax.set(xticks=[], yticks=[])
        row[0].set_ylabel(name)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("train", "compare"))
    parser.add_argument("--weights", default="moving_shapes.pt")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training")
    parser.add_argument("--steps", type=int, help="of training, instead of minutes")
    parser.add_argument("--videos", type=int, default=4, help="that are generated")
    parser.add_argument(
        "--windows", nargs="*", default=["19,15,25", "11,15,25"], help="in tokens: frames,rows,cols"
    )
    parser.add_argument("--frames", default="moving_shapes.png")
    parser.add_argument("--json", help="where to write the table's numbers")
    args = parser.parse_args(arguments)
    needs("diffusers")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    {"train": train, "compare": compare}[args.what](args, SIZES[device.type], device)


if __name__ == "__main__":
    with ends_in_a_line():
        main()
