"""Low-precision formats, bit for bit as tensor cores read them: rounding, encoding and scales.

    e4m3    8 bits, 3 of them mantissa; saturates at 448 (OCP OFP8, 2023)
    e2m1    4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; saturates at 6 (OCP Microscaling Formats, 2023)
    NVFP4   e2m1 with an e4m3 scale for every 16 neighbours along the reduction axis and a float32 scale for the whole
            tensor (PTX ISA, `mma` with `.kind::mxf4nvf4` and `.scale_vec::4X`)

A product of two e2m1 values and their e4m3 scales is exact in float32, and e2m1 times e4m3 is exact in bfloat16: so a
GPU without FP4 computes what one with FP4 does. All rounding is to nearest, ties to even. A NaN stays NaN; in NVFP4 it
takes its group of 16 along, as e2m1 has no NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import StaError

E4M3_MAX = 448.0
E2M1_MAX = 6.0
GROUP = 16  # neighbours that share an e4m3 scale in NVFP4

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The least magnitude that rounds up to the next value: where it lies in the middle, it goes to the even code.
_ABOVE, _FROM = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
# Inverses of scales stay finite; what is smaller is 0 beside any attention.
_LEAST_SCALE = 2.0**-100


def to_e4m3(x: Tensor) -> Tensor:
    """float8_e4m3fn like x, saturating at 448 whatever the version of torch."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def to_e2m1(x: Tensor) -> Tensor:
    """uint8 like x: the 4-bit code of each value, 8 where it is negative; -0 keeps its sign."""
    size = x.float().abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for bound in _ABOVE:
        code += size > bound
    for bound in _FROM:
        code += size >= bound
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def from_e2m1(codes: Tensor) -> Tensor:
    """float32 like the uint8 codes of `to_e2m1`."""
    values = torch.tensor(_E2M1, device=codes.device)
    return torch.where(codes < 8, 1.0, -1.0) * values[(codes & 7).long()]


def quantize_e4m3(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn like x, float32 scale of size 1 in `dims`): x is about values * scale.

    The scale takes the largest magnitude over `dims` to 448. Zeros have scale 0.
    """
    x = x.float()
    scale = x.abs().amax(dims, keepdim=True) / E4M3_MAX
    return to_e4m3(x * _inverse(scale)), scale


@dataclass(frozen=True)
class Nvfp4:
    """A tensor [..., n] in NVFP4, n a multiple of 16.

    codes: uint8 [..., n / 2], two e2m1 codes each, the first in the lower four bits (torch.float4_e2m1fn_x2).
    scales: float8_e4m3fn [..., n / 16]. scale: float32, of the whole tensor or broadcast against [..., 1].
    """

    codes: Tensor
    scales: Tensor
    scale: Tensor

    def dequantize(self) -> Tensor:
        """float32 [..., n], exact but for the product with `scale`."""
        pairs = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(-2)
        return (
            _grouped(from_e2m1(pairs)).mul(self.scales.float()[..., None]).flatten(-2) * self.scale
        )


def nvfp4_scale(x: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """float32 scale of a tensor, of size 1 in `dims` (all by default): its largest magnitude becomes 6 * 448."""
    most = x.float().abs().amax(dims, keepdim=True) if dims else x.float().abs().amax()
    return most / (E2M1_MAX * E4M3_MAX)


def quantize_nvfp4(x: Tensor, scale: Tensor | None = None) -> Nvfp4:
    """NVFP4 of x [..., n], groups along the last axis. scale: `nvfp4_scale(x)` if not given.

    Raises StaError if n is no multiple of 16.
    """
    if x.shape[-1] % GROUP:
        raise StaError(
            f"NVFP4 has a scale for every {GROUP} values, but the last axis has {x.shape[-1]}; "
            f"pad it with zeros to a multiple of {GROUP}"
        )
    x = x.float()
    scale = nvfp4_scale(x) if scale is None else scale
    groups = _grouped(x)
    most = groups.abs().amax(-1)
    scales = to_e4m3(most / E2M1_MAX * _inverse(scale))
    codes = to_e2m1(groups * _inverse(scales.float() * scale)[..., None]).flatten(-2)
    return Nvfp4(codes[..., ::2] | (codes[..., 1::2] << 4), scales, scale)


def quantize_nvfp4_residual(x: Tensor, dims: tuple[int, ...] | None = None) -> tuple[Nvfp4, Nvfp4]:
    """(NVFP4 of x [..., n], NVFP4 of what that leaves); each with one scale over `dims`, all axes by default."""
    main = quantize_nvfp4(x, nvfp4_scale(x, dims))
    rest = x.float() - main.dequantize()
    return main, quantize_nvfp4(rest, nvfp4_scale(rest, dims))


def _grouped(x: Tensor) -> Tensor:
    grouped: Tensor = x.unflatten(-1, (-1, GROUP))
    return grouped


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale; 0 where the scale is 0 or too small to have one, and what it scales becomes 0 too."""
    return torch.where(scale.abs() < _LEAST_SCALE, torch.zeros_like(scale), 1.0 / scale)
