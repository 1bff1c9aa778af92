"""Formats against ml_dtypes and torch, bit for bit, and the errors that theory gives them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sta_compile import StaError
from sta_compile.tiers import formats


def many_values() -> Tensor:
    """Every bfloat16 that is a number, and values just beside the middles between e2m1's and e4m3's."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = torch.cat([middles, (e4m3[1:] + e4m3[:-1]) / 2])
    up, down = (torch.nextafter(middles, torch.tensor(to)) for to in (torch.inf, -torch.inf))
    values = torch.cat([every, middles, up, down, -middles, -up, -down])
    return values[~values.isnan()]


def as_ml_dtypes(x: Tensor, dtype: type, most: float) -> np.ndarray:
    return np.clip(x.numpy(), -most, most).astype(dtype)


def test_e2m1_is_that_of_ml_dtypes():
    x = many_values()
    expected = as_ml_dtypes(x, ml_dtypes.float4_e2m1fn, 6)
    assert np.array_equal(formats.to_e2m1(x).numpy(), expected.view(np.uint8) & 15)
    decoded = formats.from_e2m1(formats.to_e2m1(x)).numpy()
    assert np.array_equal(decoded, expected.astype(np.float32))


def test_e4m3_is_that_of_ml_dtypes_and_saturates():
    x = many_values()
    expected = as_ml_dtypes(x, ml_dtypes.float8_e4m3fn, 448)
    found = formats.to_e4m3(x)
    assert np.array_equal(found.view(torch.uint8).numpy(), expected.view(np.uint8))
    assert found.float().abs().max() == 448
    inside = x[x.abs() <= 448]
    assert torch.equal(formats.to_e4m3(inside).float(), inside.to(torch.float8_e4m3fn).float())
    assert formats.to_e4m3(torch.tensor(torch.nan)).isnan()


def test_nvfp4_values_are_exact_in_bfloat16():
    """So a GPU without FP4 multiplies the same numbers."""
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    e4m3 = e4m3[~e4m3.isnan()]
    product = formats.from_e2m1(torch.arange(16, dtype=torch.uint8))[:, None] * e4m3
    assert torch.equal(product.bfloat16().float(), product)


@pytest.mark.parametrize("shape", [(512, 1024), (3, 5, 64, 128)])
def test_error_on_normal_values_is_that_of_theory(shape):
    """9.5e-2 for one rounding and 8.6e-3 with the residual, each within 5 %."""
    x = torch.randn(shape, generator=torch.manual_seed(0))
    main, rest = formats.quantize_nvfp4_residual(x)

    def error(found: Tensor) -> float:
        return float((found - x).norm() / x.norm())

    assert error(main.dequantize()) == pytest.approx(9.5e-2, rel=0.05)
    assert error(main.dequantize() + rest.dequantize()) == pytest.approx(8.6e-3, rel=0.05)


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e30]))
def test_what_nvfp4_can_say_comes_back(seed, size):
    """Codes and scales of which one group has the largest value there is are found again."""
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (4, 3, 16), generator=gen, dtype=torch.uint8)
    codes[..., 0] = 7  # 6: the largest of each group
    scales = torch.randint(8, 127, (4, 3), generator=gen, dtype=torch.uint8)
    scales[0, 0] = 126  # 448
    scale = torch.tensor(2.0**10 * size)
    x = formats.from_e2m1(codes) * scales.view(torch.float8_e4m3fn).float()[..., None]
    x = (x * scale).flatten(-2)
    found = formats.quantize_nvfp4(x)
    torch.testing.assert_close(found.dequantize(), x, rtol=1e-6, atol=0)
    assert torch.equal(found.scales.view(torch.uint8), scales)


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.floats(-30, 30))
def test_nvfp4_errs_by_less_than_half_a_step(seed, exponent):
    """Of a group with scale s the steps are at most 2 s; values over 6 s, by the rounding of s, lose 6.25 % more."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 48, generator=gen) * 2.0**exponent
    x *= 2.0 ** (torch.rand(7, 1, generator=gen) * 12)
    found = formats.quantize_nvfp4(x)
    most = x.unflatten(-1, (-1, 16)).abs().amax(-1)
    # e4m3 rounds a scale by 1/16 of it, or by 2^-10 where it is subnormal
    step = most / 6 * (1 + 1 / 16) + found.scale * 2.0**-10
    wrong = (found.dequantize() - x).unflatten(-1, (-1, 16)).abs().amax(-1)
    assert bool((wrong <= step + most / 16 + found.scale * 6 * 2.0**-10).all())


def test_zeros_nans_and_sizes():
    assert torch.equal(formats.quantize_nvfp4(torch.zeros(2, 32)).dequantize(), torch.zeros(2, 32))
    x = torch.ones(2, 32)
    x[1, 20] = torch.nan
    found = formats.quantize_nvfp4(x, formats.nvfp4_scale(torch.ones(1)))
    assert found.dequantize()[1, 16:].isnan().all()
    assert torch.equal(found.dequantize()[0], x[0])
    assert found.codes.shape == (2, 16)
    assert found.scales.dtype == torch.float8_e4m3fn
    values, scale = formats.quantize_e4m3(torch.zeros(3, 4), (1,))
    assert not values.float().any()
    assert not scale.any()
    with pytest.raises(StaError, match="pad it with zeros to a multiple of 16"):
        formats.quantize_nvfp4(torch.ones(2, 24))


def test_the_first_code_is_in_the_lower_bits():
    """As torch.float4_e2m1fn_x2 and the MMA's operands have it."""
    x = torch.zeros(16)
    x[0], x[1] = 6.0, -0.5
    assert formats.quantize_nvfp4(x).codes[0] == 0x97
