"""The ways to write one part of a video transformer: attention, rope, patchify and unpatchify."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.random_dits.dit import CHANNELS, FREQUENCIES, Dit

if TYPE_CHECKING:
    from tests.random_dits.model import RandomDit


def attend(spelling: str, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """q [batch, heads, tokens, head_dim], k and v with as many heads or fewer -> like q.

    seen: bool [tokens, tokens]; attention by the definition has it, whatever the spelling.
    """
    if seen is None and spelling == "keywords":
        return F.scaled_dot_product_attention(
            query=q, key=k, value=v, enable_gqa=k.shape[1] != q.shape[1]
        )
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    if seen is not None or spelling in ("sdpa", "heads beside tokens"):
        return F.scaled_dot_product_attention(q, k, v, seen)
    scale = q.shape[-1] ** -0.5
    if spelling == "matmul":
        return (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v
    if spelling == "einsum":
        scores = torch.einsum("bhqd,bhkd->bhqk", q * scale, k)
        return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
    q3, k3, v3 = (x.flatten(0, 1) for x in (q, k, v))
    if spelling == "3-D":
        out = F.scaled_dot_product_attention(q3, k3, v3)
    else:
        zeros = q3.new_empty(q3.shape[0], q3.shape[1], k3.shape[1])
        scores = torch.baddbmm(zeros, q3, k3.transpose(1, 2), beta=0, alpha=scale)
        out = scores.softmax(-1).bmm(v3)
    return out.unflatten(0, q.shape[:2])


def angles(model: RandomDit, sizes: tuple[int, int, int]) -> Tensor:
    """[tokens, head_dim / 2], built from the grid."""
    if model.dit.tables == "meshgrid":
        axes = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        parts = [
            axis.flatten()[:, None] / 2.0 ** torch.arange(n)
            for axis, n in zip(axes, FREQUENCIES, strict=True)
        ]
        return torch.cat(parts, -1)
    tables = model.table.split(FREQUENCIES, 1)
    spread = []
    for axis, (table, size) in enumerate(zip(tables, sizes, strict=True)):
        shape = [1, 1, 1, -1]
        shape[axis] = size
        spread.append(table[:size].view(shape).expand(*sizes, -1))
    return torch.cat(spread, -1).reshape(sizes[0] * sizes[1] * sizes[2], -1)


def angles_per_head(model: RandomDit, sizes: tuple[int, int, int]) -> Tensor:
    """[tokens, heads, head_dim / 2], learned, as in Mochi."""
    axes = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    places = torch.stack(axes, -1).reshape(-1, 3).float()
    return torch.einsum("nd,dhf->nhf", places, model.frequencies)


def turn(kind: str, x: Tensor, angles: Tensor) -> Tensor:
    """Rotates pairs of channels; angles broadcast to x[..., ::2]."""
    if kind == "complex":
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)
    cos, sin = angles.cos(), angles.sin()
    if kind in ("pairs written", "per head"):
        out = torch.empty_like(x)
        even, odd = x[..., ::2], x[..., 1::2]
        out[..., ::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out
    if kind == "halves":
        first, second = x.chunk(2, -1)
        whole = torch.cat([-second, first], -1)
        return x * torch.cat([cos, cos], -1) + whole * torch.cat([sin, sin], -1)
    if kind == "stacked":
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        whole = torch.stack([-odd, even], -1).flatten(-2)
        return x * cos.repeat_interleave(2, -1) + whole * sin.repeat_interleave(2, -1)
    halves = x.unflatten(-1, (2, -1))  # LTX-2 writes into views of the product
    out = halves * cos[..., None, :]
    first, second = out[..., :1, :], out[..., 1:, :]
    first.addcmul_(-sin[..., None, :], halves[..., 1:, :])
    second.addcmul_(sin[..., None, :], halves[..., :1, :])
    return out.flatten(-2)


def patchify(model: RandomDit, latent: Tensor) -> Tensor:
    """-> [batch, tokens, width]"""
    kind, (pt, ph, pw) = model.dit.patchify, model.dit.patch
    if kind == "packed outside":
        return model.embed(latent)
    if kind == "conv3d":
        return model.embed3(latent).flatten(2).transpose(1, 2)
    b, c, t, h, w = latent.shape
    if kind == "conv2d":  # frames alone: patches have a depth of one
        x = model.embed2(latent.transpose(1, 2).flatten(0, 1))
        return x.unflatten(0, (b, t)).flatten(3).transpose(2, 3).flatten(1, 2)
    x = latent.reshape(b, c, t // pt, pt, h // ph, ph, w // pw, pw)
    return model.embed(x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3))


def unpatchify(dit: Dit, x: Tensor, latent: Tensor) -> Tensor:
    """[batch, tokens, patch] -> like the latent, or as it is where the caller unpacks."""
    if dit.unpatchify == "packed":
        return x
    b, (t, h, w), (pt, ph, pw) = latent.shape[0], dit.grid, dit.patch
    if dit.unpatchify == "reshape":
        x = x.reshape(b, t, h, w, pt, ph, pw, CHANNELS).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return x.flatten(6).flatten(4, 5).flatten(2, 3)
    x = x.unflatten(1, (t, h, w)).unflatten(-1, (pt, ph, pw, CHANNELS))
    if dit.unpatchify == "einsum":
        x = torch.einsum("nthwpqrc->nctphqwr", x)
    else:
        x = x.movedim(-1, 1).permute(0, 1, 2, 5, 3, 6, 4, 7)
    return x.reshape(b, CHANNELS, t * pt, h * ph, w * pw)
