"""Compile a video transformer with Sliding Tile Attention, and see what became of it.

python examples/compile_a_model.py            a small random Wan: runs anywhere
python examples/compile_a_model.py --real     Wan 2.1 1.3B's shape at 480p: for a GPU
"""

from __future__ import annotations

import argparse

import torch

import sta_compile
from sta_compile.errors import ends_in_a_line
from sta_compile.video_models import build, make_inputs

SMALL = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128,
         "text_dim": 64, "rope_max_seq_len": 64}  # fmt: skip
REAL = {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true")
    args = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config, latent = (REAL, (21, 60, 104)) if args.real else (SMALL, (9, 48, 80))
    model = build("WanTransformer3DModel", config, device=device, dtype=dtype)
    inputs = make_inputs(model, latent, device=device, dtype=dtype)

    def at(timestep: int) -> dict[str, object]:
        return {**inputs, "timestep": torch.full_like(inputs["timestep"], timestep)}

    with torch.no_grad():
        exact = model(**at(500))[0]
        model.compile(backend="sta")  # in place; state-dict keys stay as they are
        model(**at(999))  # a run starts at its noisiest step, which is dense
        sparse = model(**at(500))[0]

    for report in sta_compile.reports():
        print(report)
    error = (sparse - exact).norm() / exact.norm()
    print(f"difference from the dense model at noise level 0.5: {error:.2e} (random weights)")


if __name__ == "__main__":
    with ends_in_a_line():
        main()
