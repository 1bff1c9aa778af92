"""A video transformer of a few lines, for faults that no particular model has: tokens of any grid, any head size, any
spelling of attention, text in the sequence or not.

    TinyVideo(head_dim=40)(torch.randn(1, 4, 3, 5, 7))        a 3x5x7 grid: patches are single positions
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.end_to_end.compiled import DEFAULTS, Options, compile_variants, relative_error
from tests.end_to_end.models import randomize
from tests.end_to_end.oracle import Oracle, window_mask

# q [batch, heads, queries, head_dim], k and v [batch, kv heads, keys, head_dim], mask [batch, 1, 1, keys] -> like q
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
CHANNELS = 4
SPARSE: Options = {"window": (1, 3, 3), "tile": (1, 2, 2)}  # sees 3 x 3 tiles of one frame


def valid(*lengths: int, of: int) -> Tensor:
    """bool [batch, tokens]: the first ones of each sample."""
    return torch.arange(of) < torch.tensor(lengths)[:, None]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=k.shape[1] != q.shape[1])


class Attention(nn.Module):
    """Self-attention of [batch, tokens, width], or attention to `other` tokens."""

    def __init__(
        self, width: int, heads: int, head_dim: int, kv_heads: int, attend: Attend
    ) -> None:
        super().__init__()
        self.head_dim, self.attend = head_dim, attend
        self.to_q = nn.Linear(width, heads * head_dim)
        self.to_k = nn.Linear(width, kv_heads * head_dim)
        self.to_v = nn.Linear(width, kv_heads * head_dim)
        self.to_out = nn.Linear(heads * head_dim, width)

    def forward(self, x: Tensor, other: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        source = x if other is None else other
        q, k, v = (
            proj(tokens).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for proj, tokens in ((self.to_q, x), (self.to_k, source), (self.to_v, source))
        )
        return self.to_out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class OneProduct(nn.Module):
    """Self-attention of [batch, tokens, width] with q, k and v from one product. mask: the definition's, or none."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.count, self.mask = nn.Linear(width, 3 * width), heads, None

    def heads(self, x: Tensor) -> list[Tensor]:
        """q, k and v [..., heads, width / heads] of [..., width]"""
        return [u.unflatten(-1, (self.count, -1)) for u in self.qkv(x).chunk(3, -1)]

    def attend(self, *qkv: Tensor) -> Tensor:
        """[batch, tokens, width] of three [batch, tokens, heads, width / heads]"""
        q, k, v = (u.transpose(1, 2) for u in qkv)
        return F.scaled_dot_product_attention(q, k, v, self.mask).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.heads(x))


class Block(nn.Module):
    def __init__(self, width: int, **attention: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width, **attention)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.attn(self.norm(x), mask=mask)


class TinyVideo(nn.Module):
    """forward: latent [batch, channels, frames, rows, cols], text [batch, tokens, width] that follows the video, valid
    [batch, tokens] of that text (padded at its end) -> like the latent."""

    def __init__(
        self,
        *,
        heads: int = 2,
        head_dim: int = 8,
        kv_heads: int | None = None,
        layers: int = 1,
        attend: Attend = sdpa,
        width: int = 16,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        attention = {"heads": heads, "head_dim": head_dim, "kv_heads": kv_heads or heads}
        self.patchify = nn.Conv3d(CHANNELS, width, 1)
        self.blocks = nn.ModuleList(Block(width, attend=attend, **attention) for _ in range(layers))
        self.out = nn.Linear(width, CHANNELS)
        randomize(self)
        self.eval()

    @property
    def sites(self) -> list[str]:
        return [f"blocks.{i}.attn" for i in range(len(self.blocks))]

    def forward(
        self, latent: Tensor, text: Tensor | None = None, valid: Tensor | None = None
    ) -> Tensor:
        batch, _, frames, rows, cols = latent.shape
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        video, mask = x.shape[1], None
        if text is not None:
            x = torch.cat([x, text], 1)
        if valid is not None:
            places = torch.arange(x.shape[1], device=x.device)
            mask = (places < video + valid.sum(1, keepdim=True))[:, None, None]
        for block in self.blocks:
            x = block(x, mask)
        x = self.out(x[:, :video]).reshape(batch, frames, rows, cols, CHANNELS)
        return x.permute(0, 4, 1, 2, 3)


def check(
    model: nn.Module, sites: list[str], options: Options, tolerance: float = 1e-5, **inputs: Any
) -> Any:
    """Compiles, compares with the masked eager model and returns the variant; also with exact attention."""
    with torch.no_grad():
        wanted = {"sta": options, "full": {**options, "window": "full"}}
        variants = compile_variants(model, inputs, wanted)
        variant = variants["sta"]
        assert [site.name for site in variant.report.replaced] == sites, variant.report
        site = variant.report.replaced[0]
        with Oracle(model, sites, window_mask(site.grid, site.tiles, site.window)):
            expected = model(**inputs)
        found = variant.run(**inputs)
        assert found.shape == expected.shape
        assert relative_error(found, expected) < tolerance
        assert relative_error(variants["full"].run(**inputs), model(**inputs)) < tolerance
    return variant


def check_left_alone(model: nn.Module, reason: str, options: Options, **inputs: Any) -> None:
    """Nothing is replaced, for this reason, and the output is eager's to the last bit."""
    with torch.no_grad():
        variant = compile_variants(model, inputs, {"sta": {**DEFAULTS, **options}})["sta"]
        assert not variant.report.replaced
        assert reason in variant.report.summary()
        assert torch.equal(variant.run(**inputs), model(**inputs))
