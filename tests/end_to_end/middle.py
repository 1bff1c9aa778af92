"""A tiny model whose middle part a test writes itself, and its compiled variants."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.tiny import CHANNELS, SPARSE, Block, TinyVideo, sdpa

GRID = T, H, W = (3, 6, 8)
N = T * H * W
OPTIONS = {"sta": SPARSE, "full": {**SPARSE, "window": "full"}}


class Middle(TinyVideo):
    """`middle(model, x, ...)` stands between patchify and unpatchify; `text_block` is for other tokens."""

    def __init__(self, middle=None, **options) -> None:
        super().__init__(**{"layers": 2, **options})
        self.middle = middle or (lambda model, x: model.blocks[1](model.blocks[0](x)))
        self.text_block = Block(16, heads=2, head_dim=8, kv_heads=2, attend=sdpa)
        self.places = nn.Parameter(torch.randn(1, N, 16))

    def forward(self, latent: Tensor, **inputs: Tensor) -> Tensor:
        x = self.patchify(latent).flatten(2).transpose(1, 2).contiguous()
        x = self.out(self.middle(self, x, **inputs))
        return x.unflatten(1, GRID).permute(0, 4, 1, 2, 3)


def latent() -> Tensor:
    return torch.randn(2, CHANNELS, *GRID)


def variants_of(model, **inputs):
    """Compiled models; with exact attention they give eager's numbers."""
    variants = compile_variants(model, inputs, OPTIONS)
    assert relative_error(variants["full"].run(**inputs), model(**inputs)) < 1e-5
    return variants["sta"]


def names(variant) -> list[str]:
    return [site.name for site in variant.report.replaced]
