"""The option precision: what a compiled model computes, and what its report says."""

from __future__ import annotations

import pytest
import torch

from sta_compile.errors import InvalidOptionError
from sta_compile.settings import Settings
from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.tiny import TinyVideo

SPARSE = {"window": (1, 2, 2), "tile": (1, 2, 2)}
VARIANTS = {"native": SPARSE, "fp8": SPARSE | {"precision": "fp8"}}


def latent():
    return torch.randn(2, 4, 3, 4, 6, generator=torch.Generator().manual_seed(0))


def test_a_model_in_fp8():
    inputs = {"latent": latent()}
    with torch.no_grad():
        variants = compile_variants(TinyVideo(heads=2, layers=2), inputs, VARIANTS)
        found = {name: variant.run(**inputs) for name, variant in variants.items()}
    assert 1e-4 < relative_error(found["fp8"], found["native"]) < 6e-2
    site = variants["fp8"].report.replaced[0]
    assert (site.precision, site.why_native) == ("fp8", "")
    assert "fp8" in str(variants["fp8"].report)
    assert variants["native"].report.replaced[0].precision == "native"


def test_training_stays_native():
    inputs = {"latent": latent()}
    variants = compile_variants(TinyVideo(heads=2, layers=2), inputs, VARIANTS)
    found = {name: variant.run(**inputs) for name, variant in variants.items()}
    assert torch.equal(found["fp8"], found["native"])
    site = variants["fp8"].report.replaced[0]
    assert site.precision == "native"
    assert "no gradients" in site.why_native
    assert "torch.no_grad()" in str(variants["fp8"].report)


@pytest.mark.parametrize("value", ["tiered", "nvfp4", "fp16", 8])
def test_other_precisions_are_refused(value):
    with pytest.raises(InvalidOptionError, match='pass "native" or "fp8"'):
        Settings.resolve({"precision": value})
