"""Linear layers as the products that quantisers put into a graph: what a token axis is must be seen through them."""

from __future__ import annotations

from collections.abc import Callable

import bitsandbytes  # noqa: F401  registers its operators
import pytest
import torch
from torch import Tensor, nn

from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo, check


class Quantized(nn.Module):
    """int8 or fp8 weights [out, in] with a scale per output channel, around one product."""

    def __init__(self, linear: nn.Linear, product: Callable[..., Tensor]) -> None:
        super().__init__()
        self.product = product
        self.register_buffer("scale", linear.weight.abs().amax(1) / 127)
        self.register_buffer("weight", (linear.weight / self.scale[:, None]).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.scale) + self.bias


def int_mm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Dynamic int8: every row of x has a scale of its own, and rows of all samples are one axis."""
    rows = x.reshape(-1, x.shape[-1])
    size = rows.abs().amax(1, keepdim=True) / 127
    out = torch._int_mm((rows / size).round().to(torch.int8), weight.t())
    return (out * size * scale).reshape(*x.shape[:-1], -1)


def int8pack_mm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return torch._weight_int8pack_mm(rows, weight, scale).reshape(*x.shape[:-1], -1)


def bitsandbytes_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """What its layer does without outliers, on a GPU too: the rows are quantised for each projection anew."""
    ops = torch.ops.bitsandbytes
    rows = x.reshape(-1, x.shape[-1]).to(torch.float16)
    quantized, sizes, _ = ops.int8_vectorwise_quant.default(rows)
    out = ops.int8_scaled_mm.default(quantized, weight, sizes, scale * 127, dtype=x.dtype)
    return out.reshape(*x.shape[:-1], -1)


def bitsandbytes_int8_with_outliers(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """With a threshold: columns of x with a larger value are multiplied in fp16."""
    ops = torch.ops.bitsandbytes
    rows = x.reshape(-1, x.shape[-1]).to(torch.float16)
    quantized, sizes, columns = ops.int8_vectorwise_quant.default(rows, 100.0)
    out, _ = ops.int8_mixed_scaled_mm.default(
        rows, quantized, weight, sizes, scale * 127, columns, None
    )
    return out.to(x.dtype).reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize(
    "product", [int_mm, int8pack_mm, bitsandbytes_int8, bitsandbytes_int8_with_outliers]
)
def test_projections(product: Callable[..., Tensor]) -> None:
    model = TinyVideo(layers=1, width=32, heads=2, head_dim=16)
    for name in ("to_q", "to_k", "to_v", "to_out"):
        linear = getattr(model.blocks[0].attn, name)
        setattr(model.blocks[0].attn, name, Quantized(linear, product))
    dynamic = product is not int8pack_mm  # a rounding more or less turns an int8 step
    latent = torch.randn(2, CHANNELS, 3, 5, 7)
    check(model, model.sites, SPARSE, 2e-3 if dynamic else 1e-5, latent=latent)
