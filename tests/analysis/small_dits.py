"""Small video transformers of our own: every part can be varied, and attention has a twin with the definition's mask.

The grid is 3x4x6 tokens of 2x2 patches unless said otherwise; 5 tokens of text stand after, before or on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from sta_compile.pipeline import rewrite
from sta_compile.report import Report
from sta_compile.settings import Settings
from tests.oracle import full_mask, tile_order

T, H, W = 3, 4, 6
GRID = (T, H, W)
VIDEO, TEXT, DIM, HEADS = T * H * W, 5, 32, 2
OPTIONS: Mapping[str, Any] = {
    "min_tokens": 0, "dense_above": None, "tile": (1, 2, 2), "window": (1, 2, 2),
}  # fmt: skip
Hook = Callable[["SmallDiT", Tensor], Tensor]


def plain(model: SmallDiT, x: Tensor) -> Tensor:
    return x


def heads(x: Tensor) -> Tensor:
    """[batch, tokens, dim] -> [batch, heads, tokens, head_dim]"""
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def conv3d_patchify(model: SmallDiT, latent: Tensor) -> Tensor:
    return model.embed3(latent).flatten(2).transpose(1, 2)


def conv2d_patchify(model: SmallDiT, latent: Tensor) -> Tensor:
    batch, frames = latent.shape[0], latent.shape[2]
    x = model.embed2(latent.transpose(1, 2).flatten(0, 1))  # [batch * frames, dim, rows, cols]
    return x.unflatten(0, (batch, frames)).flatten(3).transpose(2, 3).flatten(1, 2)


def reshape_patchify(model: SmallDiT, latent: Tensor) -> Tensor:
    b, c, t, h, w = latent.shape
    x = latent.reshape(b, c, t, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6)
    return model.embed(x.flatten(4).flatten(1, 3))


def unpatchify(model: SmallDiT, x: Tensor, latent: Tensor) -> Tensor:
    b, _, t, h, w = latent.shape
    x = model.out(x).reshape(b, t, h // 2, w // 2, 4, 2, 2)
    return x.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)


def leave_tokens(model: SmallDiT, x: Tensor, latent: Tensor) -> Tensor:
    return model.out(x)


def no_rope(model: SmallDiT, x: Tensor) -> Tensor:
    return x


def rope(model: SmallDiT, x: Tensor) -> Tensor:
    """x: [batch, heads, video tokens, head_dim]"""
    first, second = x.chunk(2, -1)
    return x * model.table.cos() + torch.cat([-second, first], -1) * model.table.sin()


def rope_in_place(model: SmallDiT, x: Tensor) -> Tensor:
    """As in diffusers' Wan: two strided writes into an empty tensor."""
    cos, sin = model.table.cos()[:, ::2], model.table.sin()[:, 1::2]
    real, imaginary = x[..., ::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., ::2] = real * cos - imaginary * sin
    out[..., 1::2] = real * sin + imaginary * cos
    return out


@dataclass
class Parts:
    patchify: Callable[[SmallDiT, Tensor], Tensor] = conv3d_patchify
    unpatchify: Callable[[SmallDiT, Tensor, Tensor], Tensor] = unpatchify
    rope: Hook = rope
    before: Hook = plain  # of the layers
    after: Hook = plain
    text: tuple[int, int] = (0, 0)  # tokens before and after the video
    layers: int = 1
    keys: Hook = plain  # what keys and values are projected from
    extra: dict[str, Any] = field(default_factory=dict)  # of scaled_dot_product_attention


class SmallDiT(nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = Parts(**parts)
        self.embed3 = nn.Conv3d(4, DIM, (1, 2, 2), (1, 2, 2))
        self.embed2 = nn.Conv2d(4, DIM, 2, 2)
        self.embed = nn.Linear(16, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(self.parts.layers))
        self.out = nn.Linear(DIM, 16)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.weight = nn.Parameter(torch.randn(VIDEO, DIM))
        self.table = nn.Parameter(torch.randn(VIDEO, DIM // HEADS))
        self.rows = torch.randperm(VIDEO)

    def forward(self, latent: Tensor, text: Tensor) -> Tensor:
        before, after = self.parts.text
        x = self.parts.before(self, self.parts.patchify(self, latent))
        pieces = [text[:, :before]] * bool(before) + [x] + [text[:, before:]] * bool(after)
        x = torch.cat(pieces, 1) if len(pieces) > 1 else x
        for layer in self.layers:
            x = layer(self, x)
        x = x[:, before : x.shape[1] - after] if before or after else x
        return self.parts.unpatchify(self, self.parts.after(self, x), latent)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.o = nn.Linear(DIM, DIM)

    def forward(self, model: SmallDiT, x: Tensor) -> Tensor:
        y = self.norm(x)
        keys = model.parts.keys(model, y)
        q, k, v = heads(3 * self.q(y)), heads(3 * self.k(keys)), heads(self.v(keys))
        q, k = self._turn(model, q), self._turn(model, k)
        return x + self.o(joined(attend(q, k, v, **model.parts.extra)))

    def _turn(self, model: SmallDiT, x: Tensor) -> Tensor:
        before, after = model.parts.text
        end = x.shape[2] - after
        pieces = [x[:, :, :before]] * bool(before)
        pieces += [model.parts.rope(model, x[:, :, before:end])]
        pieces += [x[:, :, end:]] * bool(after)
        return torch.cat(pieces, 2) if len(pieces) > 1 else pieces[0]


def attend(q: Tensor, k: Tensor, v: Tensor, **extra: Any) -> Tensor:
    """Where a test puts the mask of the definition."""
    return F.scaled_dot_product_attention(q, k, v, **extra)


def inputs(batch: int = 2, text: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, 4, T, 2 * H, 2 * W), torch.randn(batch, text, DIM)


@dataclass
class Result:
    report: Report
    gm: GraphModule
    output: Tensor

    @property
    def reasons(self) -> list[str]:
        return [site.reason for site in self.report.refused]


def compiled(model: nn.Module, *args: Tensor, dynamic: bool = False, **options: Any) -> Result:
    """The model with its graph edited, run without inductor."""
    settings, _ = Settings.resolve({**OPTIONS, **options})
    found: list[tuple[GraphModule, Report]] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        found.append(rewrite(gm, example_inputs, settings))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        output = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    ((gm, report),) = found
    return Result(report, gm, output)


def expected(model: SmallDiT, result: Result, *args: Tensor) -> Tensor:
    """The eager model, whose attentions over the video get the mask of the definition in raster order."""
    site = result.report.replaced[0]
    assert site.tiles is not None
    assert site.window is not None
    before, after = model.parts.text
    roles = ("context",) * bool(before) + ("video",) + ("context",) * bool(after)
    segments = [n for n in (before, VIDEO, after) if n]
    batch, total = args[0].shape[0], sum(segments)
    mask = full_mask(GRID, site.tiles, site.window, roles, segments, batch, None, None)
    # In tile order; row i of the raster is where the tile order has it.
    order = torch.arange(total)
    order[before : before + VIDEO] = torch.tensor(tile_order(GRID, site.tiles)) + before
    place = order.argsort()
    return masked(model, mask[:, place][:, :, place], *args)


def masked(model: SmallDiT, mask: Tensor, *args: Tensor) -> Tensor:
    """The eager model under a mask [batch, queries, keys]."""
    ordinary = attend

    def attend_masked(q: Tensor, k: Tensor, v: Tensor, **extra: Any) -> Tensor:
        return ordinary(q, k, v, attn_mask=mask[:, None], **extra)

    globals()["attend"] = attend_masked
    try:
        with torch.no_grad():
            return model(*args)
    finally:
        globals()["attend"] = ordinary


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
