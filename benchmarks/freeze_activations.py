"""Keeps q, k and v of a trained model's self-attention: `examples/moving_shapes.py` while it generates a video.

    python benchmarks/freeze_activations.py acts.pt --weights moving_shapes.pt

For `router_regret.py`, which says how good a choice is on them. Tokens are in tile order, tiles of 8x6x8.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sta_compile.ir.tiling import Tiling

EXAMPLE = Path(__file__).parents[1] / "examples" / "moving_shapes.py"
TILE = (8, 6, 8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--steps", type=int, nargs="*", default=[3, 8, 15, 24])
    args = parser.parse_args()

    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.models.transformers import transformer_wan

    example = runpy.run_path(str(EXAMPLE))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = example["SIZES"]["cuda"]
    model = size.model().to(device)
    model.load_state_dict(torch.load(args.weights, map_location=device, weights_only=True))
    model.to(torch.bfloat16).eval()
    frames, height, width = size.video
    grid = (frames, height // 2, width // 2)
    tiles = tuple(n // tile for n, tile in zip(grid, TILE, strict=True))
    order = torch.tensor(Tiling(grid, tiles).order(), device=device)
    kept: list[dict[str, Any]] = []
    step, layer = -1, 0
    attention = transformer_wan.dispatch_attention_fn

    def keep(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
        """q, k, v: [batch, tokens, heads, head_dim]"""
        nonlocal layer
        if k.shape[1] == len(order):
            if step in args.steps:
                sides = {
                    name: x[0, order].transpose(0, 1).bfloat16().cpu()
                    for name, x in zip("qkv", (q, k, v), strict=True)
                }
                name = f"step {step}, layer {layer}"
                scale = q.shape[-1] ** -0.5
                kept.append(sides | {"name": name, "grid": grid, "tiles": tiles, "scale": scale})
            layer += 1
        return attention(q, k, v, *rest, **named)

    def begin(*_: Any) -> None:
        nonlocal step, layer
        step, layer = step + 1, 0

    transformer_wan.dispatch_attention_fn = keep
    model.register_forward_pre_hook(begin)
    prompts = example["scenes"](1, device, torch.Generator(device).manual_seed(2))
    example["sample"](model, FlowMatchEulerDiscreteScheduler(shift=3.0), prompts, size)
    torch.save(kept, args.out)
    print(f"{len(kept)} layers and steps of {tuple(kept[0]['q'].shape)} are in {args.out}")


if __name__ == "__main__":
    main()
