"""A small video transformer with a body around the second of its three attentions, which may move the tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.oracle import window_mask
from tests.end_to_end.tiny import SPARSE, OneProduct

GRID = T, H, W = 3, 4, 6
N = T * H * W
C, HEADS = 16, 2
Body = Callable[["Model", Tensor], Tensor]  # [batch, frames, rows, cols, C] -> the same


class Attention(OneProduct):
    """[batch, frames, rows, cols, C]; q and k are scaled by their place in the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        places = [torch.arange(n, dtype=x.dtype) for n in x.shape[1:4]]
        table = torch.stack(torch.meshgrid(*places, indexing="ij"), -1).flatten(0, 2).sum(1).cos()
        q, k, v = self.heads(x.flatten(1, 3))
        scale = table[:, None, None]
        return x + self.attend(q * scale, k * scale, v).view(x.shape)


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv3d(4, C, 1)
        self.attn = nn.ModuleList(Attention(C, HEADS) for _ in range(3))
        self.out = nn.Linear(C, 4)
        self.body = body
        self.register_buffer("order", torch.randperm(W))
        self.register_buffer("shuffled", torch.randperm(N))
        self.register_buffer("table", torch.randn(1, N, C))

    def forward(self, latent: Tensor) -> Tensor:
        x = self.embed(latent).permute(0, 2, 3, 4, 1)
        x = self.attn[0](x)
        x = self.body(self, x)
        x = self.attn[2](x)
        return self.out(x).permute(0, 4, 1, 2, 3)


@torch.no_grad()
def check(body: Body, windowed: list[int]) -> list[str]:
    """Asserts that these attentions are windowed, by the definition, and the others exact; returns why these are."""
    model, inputs = Model(body).eval(), {"latent": torch.randn(2, 4, *GRID)}
    variant = compile_variants(model, inputs, {"sta": SPARSE})["sta"]
    report = variant.report
    assert [site.name for site in report.replaced] == [f"attn.{i}" for i in windowed]
    assert {site.grid for site in report.replaced} == {GRID}
    site = report.replaced[0]
    for i in windowed:
        model.attn[i].mask = window_mask(site.grid, site.tiles, site.window)
    assert relative_error(variant.run(**inputs), model(**inputs)) < 1e-5
    return [refused.reason for refused in report.refused]
