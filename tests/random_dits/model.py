"""A module for every `Dit`: patchify, blocks of attention, feed-forward and modulation, unpatchify."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import nested_compile_region
from torch.utils.checkpoint import checkpoint

from tests.random_dits.bodies import BODIES
from tests.random_dits.dit import FREQUENCIES, HELD, Dit
from tests.random_dits.parts import (
    angles,
    angles_per_head,
    attend,
    patchify,
    turn,
    unpatchify,
)

HEADS, HEAD_DIM = 2, 8
WIDTH = HEADS * HEAD_DIM


class Attention(nn.Module):
    """`seen`, bool [tokens, tokens], makes it attention by the definition."""

    def __init__(self, dit: Dit) -> None:
        super().__init__()
        self.dit, self.seen = dit, None
        self.key_heads = 1 if dit.projection == "fewer key heads" else HEADS
        sizes = [WIDTH, self.key_heads * HEAD_DIM, self.key_heads * HEAD_DIM]
        fused = dit.projection.startswith("fused")
        self.to_qkv = nn.ModuleList(nn.Linear(WIDTH, n) for n in ([sum(sizes)] if fused else sizes))
        self.norm_heads = nn.RMSNorm(HEAD_DIM) if dit.normed_heads else nn.Identity()
        self.out = nn.Linear(WIDTH, WIDTH)

    def project(self, x: Tensor) -> list[Tensor]:
        """q, k and v, [..., heads, head_dim]"""
        if self.dit.projection == "fused":
            return [part.unflatten(-1, (HEADS, -1)) for part in self.to_qkv[0](x).chunk(3, -1)]
        if self.dit.projection == "fused per head":
            return list(self.to_qkv[0](x).unflatten(-1, (HEADS, 3, HEAD_DIM)).unbind(-2))
        return [to(x).unflatten(-1, (-1, HEAD_DIM)) for to in self.to_qkv]

    def forward(self, parts: list[Tensor], first: int, table: Tensor | None) -> list[Tensor]:
        """parts: [batch, tokens, width] each, one after the other in the sequence, as they are held; `first`
        tokens stand before the video. Returns what each part gets."""
        projected = [self.project(part) for part in parts]
        q, k, v = (torch.cat([_flat(self.dit, p[i]) for p in projected], 1) for i in range(3))
        q, k = self.norm_heads(q), self.norm_heads(k)
        if (
            self.dit.attention == "heads beside tokens"
        ):  # turned as [batch, tokens, heads, head_dim]
            q, k = (self.turned(x, first, table, 1) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.dit.attention != "heads beside tokens":
            q, k = (self.turned(x, first, table, 2) for x in (q, k))
        out = attend(self.dit.attention, q, k, v, self.seen)
        out = out.transpose(1, 2).flatten(2)
        lengths = [_flat(self.dit, part).shape[1] for part in parts]
        pieces = out.split(lengths, 1) if len(parts) > 1 else [out]
        return [
            self.out(_held_like(self.dit, piece, part))
            for piece, part in zip(pieces, parts, strict=True)
        ]

    def turned(self, x: Tensor, first: int, table: Tensor | None, dim: int) -> Tensor:
        """x with its tokens on axis `dim`."""
        if table is None:
            return x
        end = first + self.dit.tokens
        if self.dit.rope == "per head":  # [tokens, heads, half]
            table = table[:, : x.shape[3 - dim]]
            table = table if dim == 1 else table.transpose(0, 1)
        elif dim == 1:
            table = table[:, None]
        axis = 0 if dim == 1 else -2
        if x.shape[dim] == self.dit.tokens:
            return turn(self.dit.rope, x, table)
        if self.dit.rope_of_text == "padded":
            shapes = [list(table.shape), list(table.shape)]
            shapes[0][axis], shapes[1][axis] = first, x.shape[dim] - end
            before, after = (table.new_zeros(shape) for shape in shapes)
            return turn(self.dit.rope, x, torch.cat([before, table, after], axis))
        turned = turn(self.dit.rope, x.narrow(dim, first, self.dit.tokens), table)
        if self.dit.rope_of_text == "written":
            x = x.clone()
            if dim == 1:
                x[:, first:end] = turned
            else:
                x[:, :, first:end] = turned
            return x
        after = x.narrow(dim, end, x.shape[dim] - end)
        return torch.cat([x.narrow(dim, 0, first), turned, after], dim)


def _flat(dit: Dit, x: Tensor) -> Tensor:
    """Tokens as they are held -> [batch, tokens, ...]; text is held as [batch, tokens, width] beside a grid."""
    if dit.held == HELD[1]:
        return x.transpose(0, 1)
    return x.flatten(1, 3) if dit.held == HELD[2] and x.shape[1:4] == dit.grid else x


def _held_like(dit: Dit, x: Tensor, like: Tensor) -> Tensor:
    if dit.held == HELD[1]:
        return x.transpose(0, 1)
    return x.unflatten(1, dit.grid) if dit.held == HELD[2] and like.shape[1:4] == dit.grid else x


class Cross(nn.Module):
    """Attention of tokens to a prompt, [batch, tokens, width] both."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(2, (HEADS, -1)).transpose(1, 2)
            for y in (self.q(x), self.k(prompt), self.v(prompt))
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class InFrames(nn.Module):
    """Attention of each frame to itself; over the grid if there is one frame."""

    seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, self.seen)


class SpelledOut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)


def norm(kind: str) -> nn.Module:
    return (
        {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[kind](WIDTH)
        if kind != "spelled out"
        else SpelledOut()
    )


class Block(nn.Module):
    def __init__(self, dit: Dit) -> None:
        super().__init__()
        self.dit = dit
        self.norm, self.norm_ff = norm(dit.norm), norm(dit.norm)
        self.attn = Attention(dit)
        self.modulate = nn.Linear(WIDTH, 3 * WIDTH)
        self.cross = Cross() if dit.cross else None
        gated = dit.feed_forward == "gated"
        self.up = nn.Linear(WIDTH, 2 * WIDTH if not gated else 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.conv = nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1, groups=2 * WIDTH)

    def modulated(
        self, x: Tensor, signal: Tensor | None, first: int
    ) -> tuple[Tensor, Tensor | None]:
        """Scaled and shifted tokens, and the gate of what comes back from attention; signal: [batch, ..., width]."""
        if signal is None:
            return x, None
        tokens, kind = self.dit.tokens, self.dit.modulation
        shift, scale, gate = self.modulate(F.silu(signal)).chunk(3, -1)
        if kind == "first frame":
            cut, end = self.dit.grid[1] * self.dit.grid[2], x.shape[1]
            parts = [x[:, :first]] if first else []
            parts += [
                x[:, first : first + cut] * (1 + scale[:, :1]) + shift[:, :1],
                x[:, first + cut : end] * (1 + scale[:, 1:]) + shift[:, 1:],
            ]
            return torch.cat(parts, 1), gate
        if kind == "frames apart" and x.shape[1] == tokens:
            frames = x.unflatten(1, (self.dit.grid[0], -1))
            y = frames * (1 + scale[:, :, None]) + shift[:, :, None]
            return y.flatten(1, 2), None
        if signal.shape[1] == 1:
            return x * (1 + scale) + shift, gate
        rest = x.shape[1] - tokens
        if rest:
            scale, shift, gate = (
                F.pad(y, (0, 0, first, rest - first)) for y in (scale, shift, gate)
            )
        return x * (1 + scale) + shift, gate

    def gated(self, x: Tensor, gate: Tensor, first: int) -> Tensor:
        if self.dit.modulation != "first frame":
            return x * gate
        cut = first + self.dit.grid[1] * self.dit.grid[2]
        return torch.cat([x[:, :cut] * gate[:, :1], x[:, cut:] * gate[:, 1:]], 1)

    def feed_forward(self, x: Tensor, first: int) -> Tensor:
        y = self.up(self.norm_ff(x))
        if self.dit.feed_forward == "gated":
            value, gate = y.chunk(2, -1)
            return self.down(value * F.silu(gate))
        if self.dit.feed_forward == "conv2d" and x.shape[1] == self.dit.tokens:
            t, h, w = self.dit.grid
            y = y.unflatten(1, (t, h, w)).flatten(0, 1).permute(0, 3, 1, 2)
            y = self.conv(y).permute(0, 2, 3, 1).unflatten(0, (-1, t)).flatten(1, 3)
        return self.down(F.gelu(y))

    def forward(
        self,
        x: Tensor,
        text: Tensor | None,
        signal: Tensor | None,
        prompt: Tensor | None,
        table: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """x and text as they are held."""
        before = self.dit.text[0]
        first = before if self.dit.joined else 0
        normed = self.norm(_flat(self.dit, x))
        y, gate = self.modulated(normed, signal, first)
        y = _held_like(self.dit, y, x)
        if text is None:
            (out,) = self.attn([y], before, table)
        else:
            other = self.norm(_flat(self.dit, text))
            pieces = [other[:, :before], None, other[:, before:]]
            kept = [i for i, p in enumerate(pieces) if p is None or p.shape[1]]
            parts = [y if p is None else _held_like(self.dit, p, text) for p in pieces]
            outs = dict(zip(kept, self.attn([parts[i] for i in kept], before, table), strict=True))
            out = outs[1]
            around = [_flat(self.dit, outs[i]) for i in (0, 2) if i in outs]
            text = text + _held_like(self.dit, torch.cat(around, 1), text)
        if gate is not None:
            out = _held_like(self.dit, self.gated(_flat(self.dit, out), gate, first), out)
        x = x + out
        if self.cross is not None and prompt is not None:
            x = x + _held_like(self.dit, self.cross(_flat(self.dit, x), prompt), x)
        if self.dit.feed_forward != "none":
            x = x + _held_like(self.dit, self.feed_forward(_flat(self.dit, x), first), x)
        return x, text


class Region(Block):
    forward = nested_compile_region(Block.forward)


class RandomDit(nn.Module):
    def __init__(self, dit: Dit) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dit = dit
        patch = dit.patch[0] * dit.patch[1] * dit.patch[2] * 3
        self.embed3 = nn.Conv3d(3, WIDTH, dit.patch, dit.patch)
        self.embed2 = nn.Conv2d(3, WIDTH, dit.patch[1:], dit.patch[1:])
        self.embed = nn.Linear(patch, WIDTH)
        kind = Region if dit.region == "nested" else Block
        self.blocks = nn.ModuleList(kind(dit) for _ in range(dit.layers))
        self.second = nn.ModuleList(Block(dit) for _ in range(dit.beside == "second stream"))
        self.in_frames = InFrames()
        self.last = nn.Linear(WIDTH, patch)
        self.signal = nn.Linear(1, WIDTH)
        tokens = dit.tokens
        self.places = nn.Parameter(torch.randn(tokens, WIDTH))
        self.kernel = nn.Parameter(torch.randn(WIDTH, 1, 3, 3, 3) / 5)
        self.mixing = nn.Parameter(torch.randn(tokens, tokens) / tokens**0.5)
        self.frequencies = nn.Parameter(torch.randn(3, HEADS, HEAD_DIM // 2))
        self.table = nn.Parameter(torch.randn(32, sum(FREQUENCIES)))
        self.register_buffer("order", torch.randperm(tokens))
        self.register_buffer("kinds", torch.arange(tokens) % 7 % 3)
        with torch.no_grad():  # sharp attention, so that its mask matters
            for block in [*self.blocks, *self.second]:
                for linear in block.attn.to_qkv:
                    linear.weight.mul_(3)
        self.eval()

    def bodies(self, place: str, x: Tensor) -> Tensor:
        """Bodies see the video alone."""
        for where, name in self.dit.bodies:
            if where == place:
                x = BODIES[name](self, x)
        return x

    def forward(
        self,
        latent: Tensor,
        timestep: Tensor | None = None,
        text: Tensor | None = None,
        prompt: Tensor | None = None,
        angles: Tensor | None = None,
        residuals: list[Tensor] | None = None,
        control: Tensor | None = None,
        sizes: list[int] | None = None,
    ) -> Tensor:
        dit = self.dit
        x = patchify(self, latent)
        table = angles if angles is not None else self.rope_table(tuple(sizes or dit.grid))
        if dit.positions == "once":
            x = x + self.places
        x = self.bodies("before", x)
        if control is not None:
            hints = patchify(self, control)
            for block in self.second:
                hints, _ = block(_hold(dit, hints + x), None, None, None, table)
                hints = _flat(dit, hints)
        signal = None if timestep is None else self.signals(timestep)
        before, after = dit.text
        if dit.joined and text is not None:
            x, text = torch.cat([text[:, :before], x, text[:, before:]], 1), None
        end = x.shape[1] - after if dit.joined else x.shape[1]
        start = before if dit.joined else 0
        x = _hold(dit, x)
        text = None if text is None else _hold_text(dit, text)
        for layer, block in enumerate(self.blocks):
            if dit.region == "checkpoint":
                x, text = checkpoint(block, x, text, signal, prompt, table, use_reentrant=False)
            else:
                x, text = block(x, text, signal, prompt, table)
            x = _flat(dit, x)
            video = x[:, start:end] if end - start < x.shape[1] else x
            if dit.positions == "in every block":
                video = video + self.places
            if residuals is not None:
                video = video + residuals[layer % len(residuals)]
            if control is not None:
                video = video + hints
            video = self.bodies("in blocks", video)
            if end - start < x.shape[1]:
                video = torch.cat([x[:, :start], video, x[:, end:]], 1)
            x = _hold(dit, video)
        x = _flat(dit, x)
        video = x[:, start:end] if end - start < x.shape[1] else x
        return unpatchify(dit, self.last(self.bodies("after", video)), latent)

    def rope_table(self, sizes: Any) -> Tensor | None:
        if self.dit.rope == "none":
            return None
        return angles_per_head(self, sizes) if self.dit.rope == "per head" else angles(self, sizes)

    def signals(self, timestep: Tensor) -> Tensor:
        """[batch], [batch, frames] or [batch, tokens] -> [batch, 1, tokens or frames, width]"""
        _, h, w = self.dit.grid
        signal = self.signal(timestep[..., None])
        kind = self.dit.modulation
        if kind == "per frame":
            return signal.repeat_interleave(h * w, 1)
        if kind == "frames expanded":
            return signal[:, :, None, None].expand(-1, -1, h, w, -1).flatten(1, 3)
        if kind == "frames apart" and sum(self.dit.text) and self.dit.joined:
            return signal[:, :, None].repeat(1, 1, h * w, 1).flatten(1, 2)
        if kind == "first frame":
            return torch.stack([signal, signal * 0], 1)
        return signal if signal.dim() == 3 else signal[:, None]


def _hold(dit: Dit, x: Tensor) -> Tensor:
    if dit.held == HELD[1]:
        return x.transpose(0, 1)
    return x.unflatten(1, dit.grid) if dit.held == HELD[2] and x.shape[1] == dit.tokens else x


def _hold_text(dit: Dit, x: Tensor) -> Tensor:
    return x.transpose(0, 1) if dit.held == HELD[1] else x
