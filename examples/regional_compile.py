"""Regional compilation: each block is compiled once, and the grid is told, since a block has no patch embed to prove it.

    python examples/regional_compile.py

A block's graph holds tokens and no patch embed. Wan's blocks get rope tables as inputs, so without more the report says
that the grid is hinted by values of rotary_emb; blocks without such inputs show none. With
`sta_compile.token_grid(...)` around the calls, as here, or options={"grid": ...}, the grid is declared, and each block
tiles its own attention. Another grid compiles again, even one with as many tokens: 9x24x40 and 9x40x24 are not the
same video.
"""

from __future__ import annotations

import argparse

import torch

import sta_compile
from sta_compile.errors import ends_in_a_line
from sta_compile.video_models import build, make_inputs

SMALL = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128,
         "text_dim": 64, "rope_max_seq_len": 64}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = build("WanTransformer3DModel", SMALL, device=device, dtype=dtype)
    # A block gets no timestep either, only what was made of it: say that no step is to be dense,
    # and switch with `window="full"` where some should be.
    model.compile_repeated_blocks(backend="sta", options={"dense_above": None})

    for latent in ((9, 48, 80), (9, 80, 48)):
        inputs = make_inputs(model, latent, device=device, dtype=dtype)
        frames, rows, cols = latent[0], latent[1] // 2, latent[2] // 2  # patches of 1x2x2
        with torch.no_grad(), sta_compile.token_grid(frames, rows, cols):
            model(**inputs)

    for report in sta_compile.reports():
        print(report)


if __name__ == "__main__":
    with ends_in_a_line():
        main()
