"""The option precision: what a compiled model computes, and what its report says."""

from __future__ import annotations

import pytest
import torch

from sta_compile import config, explain
from sta_compile.codegen import cutlass_forward
from sta_compile.codegen.select import select
from sta_compile.errors import InvalidOptionError
from sta_compile.settings import Settings
from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.tiny import TinyVideo

SPARSE = {"window": (1, 2, 2), "tile": (1, 2, 2)}
VARIANTS = {
    "native": SPARSE,
    "fp8": SPARSE | {"precision": "fp8"},
    "nvfp4": SPARSE | {"precision": "nvfp4"},
}


def latent():
    return torch.randn(2, 4, 3, 4, 6, generator=torch.Generator().manual_seed(0))


def test_a_model_in_low_precision():
    inputs = {"latent": latent()}
    with torch.no_grad():
        variants = compile_variants(TinyVideo(heads=2, layers=2), inputs, VARIANTS)
        found = {name: variant.run(**inputs) for name, variant in variants.items()}
    assert 1e-4 < relative_error(found["fp8"], found["native"]) < 6e-2
    errors = [relative_error(found[name], found["native"]) for name in ("fp8", "nvfp4")]
    assert errors[0] < errors[1] < 0.2
    for name in ("fp8", "nvfp4"):
        site = variants[name].report.replaced[0]
        assert (site.precision, site.why_native) == (name, "")
        assert name in str(variants[name].report)
    assert variants["native"].report.replaced[0].precision == "native"


def test_a_model_in_tiers():
    inputs = {"latent": latent()}
    prices = {0.0: "free", 1e3: "dear"}
    variants = {
        name: {"precision": "tiered", "window": "full", "price": p} for p, name in prices.items()
    }
    variants["full"] = {"window": "full"}
    with torch.no_grad():
        compiled = compile_variants(TinyVideo(heads=2, layers=2), inputs, variants)
        found = {name: variant.run(**inputs) for name, variant in compiled.items()}
    torch.testing.assert_close(found["free"], found["full"])
    assert relative_error(found["dear"], found["full"]) > 1e-3
    report = compiled["dear"].report
    assert not report.replaced[0].exact
    assert "in tiers at price 1000; " in " ".join(str(report).split())


def test_training_stays_native():
    inputs = {"latent": latent()}
    two = {name: VARIANTS[name] for name in ("native", "fp8")}
    variants = compile_variants(TinyVideo(heads=2, layers=2), inputs, two)
    found = {name: variant.run(**inputs) for name, variant in variants.items()}
    assert torch.equal(found["fp8"], found["native"])
    site = variants["fp8"].report.replaced[0]
    assert site.precision == "native"
    assert "no gradients" in site.why_native
    assert "torch.no_grad()" in str(variants["fp8"].report)


@pytest.mark.parametrize("value", ["fp4", "fp16", 8])
def test_other_precisions_are_refused(value):
    with pytest.raises(InvalidOptionError, match='pass "native", "fp8", "nvfp4" or "tiered"'):
        Settings.resolve({"precision": value})


@pytest.mark.parametrize(
    ("precision", "target", "head_dim", "why"),
    [
        ("fp8", "sm_90", 64, ""),
        ("fp8", "sm_90", 32, "head dim 32 has no fp8 kernel"),
        ("fp8", "sm_80", 64, "for Hopper GPUs (sm_90) only"),
        ("nvfp4", "sm_120", 64, ""),
        ("nvfp4", "sm_90", 64, "sm_90 has no FP4 products; pass precision='fp8'"),
    ],
)
def test_a_report_says_what_a_gpu_has_no_kernel_for(precision, target, head_dim, why, monkeypatch):
    """Before anything runs, for a GPU that is not here."""
    monkeypatch.setattr(cutlass_forward, "missing", lambda: "")
    select.cache_clear()
    with torch.device("meta"):
        model = TinyVideo(head_dim=head_dim).bfloat16()
    options = VARIANTS[precision] | {"min_tokens": 0, "dense_above": None}
    with config.patch(target=target), torch.no_grad():
        explanation = explain(model, options=options)(latent=latent().bfloat16().to("meta"))
    select.cache_clear()
    (report,) = explanation.reports
    (site,) = report.replaced
    assert site.precision == ("native" if why else precision)
    assert why in site.why_native
    assert bool(site.why_native) == bool(why)
    assert why in " ".join(str(report).replace("│", "").split())
