"""A diffusers pipeline with a sparse transformer, beside the same seed with the dense one, frame by frame.

    python examples/diffusers_pipeline.py                                   a tiny random Wan: shows the calls
    python examples/diffusers_pipeline.py Wan-AI/Wan2.1-T2V-1.3B-Diffusers  a real one (GPU)

The only line that a pipeline needs is `pipe.transformer.compile(backend="sta")`. A pipeline with two experts has a
`transformer_2` that wants the same line.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import sta_compile
from sta_compile.errors import ends_in_a_line, needs

if TYPE_CHECKING:
    from diffusers import WanPipeline


def tiny_pipeline() -> WanPipeline:
    """Random weights; the text encoder is replaced by random prompt embeddings."""
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )

    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=24, ffn_dim=64, text_dim=16,
        rope_max_seq_len=64,
    )  # fmt: skip
    vae = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return WanPipeline(None, None, vae, scheduler, transformer=transformer.eval())


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB of two frames [rows, cols, channels] with values in 0..1."""
    error = F.mse_loss(a, b).item()
    return float("inf") if error == 0 else -10 * torch.log10(torch.tensor(error)).item()


def ssim(a: torch.Tensor, b: torch.Tensor) -> float:
    """Structural similarity of two frames [rows, cols, channels], 11x11 Gaussian windows, sigma 1.5."""
    line = torch.exp(-((torch.arange(11.0) - 5) ** 2) / (2 * 1.5**2))
    kernel = torch.outer(line, line)[None, None] / line.sum() ** 2

    def blur(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x.permute(2, 0, 1)[:, None], kernel)

    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
    covariance = blur(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    similarity = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return (similarity / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a Wan pipeline's name or folder")
    parser.add_argument("--prompt", default="a red fox runs through snow")
    parser.add_argument("--steps", type=int)
    args = parser.parse_args(arguments)
    needs("diffusers", "transformers")
    from diffusers import WanPipeline

    if args.model:
        pipe = WanPipeline.from_pretrained(args.model, torch_dtype=torch.bfloat16).to("cuda")
        call = {"prompt": args.prompt, "height": 480, "width": 832, "num_frames": 81}
        options, steps = {}, args.steps or 50
    else:
        pipe = tiny_pipeline()
        embeds = torch.randn(1, 32, 16, generator=torch.Generator().manual_seed(1))
        call = {"prompt_embeds": embeds, "negative_prompt_embeds": -embeds}
        call |= {"height": 192, "width": 256, "num_frames": 17}
        # So short a video stays exact unless it is asked for.
        options, steps = {"min_tokens": 0, "window": (3, 6, 6)}, args.steps or 4
    pipe.set_progress_bar_config(disable=True)

    def video() -> torch.Tensor:
        """[frames, rows, cols, channels] in 0..1, always of the same seed"""
        seed = torch.Generator().manual_seed(0)
        frames = pipe(**call, num_inference_steps=steps, generator=seed, output_type="np").frames
        return torch.from_numpy(frames[0]).float()

    dense = video()
    pipe.transformer.compile(backend="sta", options=options)  # the one line
    sparse = video()

    for report in sta_compile.reports():
        print(report)
    print("sparse against dense, the same seed:")
    table = Table("frame", "PSNR dB", "SSIM")
    for number, (a, b) in enumerate(zip(sparse, dense, strict=True)):
        table.add_row(str(number), f"{psnr(a, b):.1f}", f"{ssim(a, b):.4f}")
    Console().print(table)


if __name__ == "__main__":
    with ends_in_a_line():
        main()
