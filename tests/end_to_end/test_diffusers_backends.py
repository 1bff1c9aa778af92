"""Every attention backend of diffusers: its attention is replaced, or refused with the hint to set `native`.

Those whose package is absent run with a stub of its schema; diffusers' checks of the device are off by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.end_to_end import attention_stubs as stubs
from tests.end_to_end.compiled import compile_variants
from tests.end_to_end.spelled import check, latent, spelled
from tests.end_to_end.test_attention_calls import by_tokens
from tests.end_to_end.tiny import SPARSE

dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
stubs.register()

REPLACED = (
    *("native", "_native_math", "_native_flash", "flex"),
    *("flash", "flash_hub", "flash_varlen_hub", "flash_4_hub", "_flash_3", "_flash_3_hub"),
    "_flash_3_varlen_hub",
    *("aiter_fa2_hub", "sage", "sage_hub", "sage_blackwell_hub", "xformers"),
    *("_sage_qk_int8_pv_fp8_cuda", "_sage_qk_int8_pv_fp8_cuda_sm90"),
    *("_sage_qk_int8_pv_fp16_cuda", "_sage_qk_int8_pv_fp16_triton"),
)
REFUSED = ("flash_varlen", "_flash_varlen_3", "sage_varlen")
UNKNOWN = ("_native_npu", "_native_xla")
NOT_ON_A_CPU = (
    "_native_efficient",
    "_native_cudnn",
)  # the same call, under kernels that a CPU has not


def in_graph(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that Dynamo doesn't trace into, under the name that its package gives it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = name
    call.__wrapped__ = function  # type: ignore[attr-defined]
    torch.compiler.allow_in_graph(call)
    return call


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    sage = [name for name in REPLACED if name.startswith("_sage")]
    functions = {
        "flash_attn_func": stubs.flash_attn_func,
        "flash_attn_varlen_func": stubs.flash_attn_varlen_func,
        "flash_attn_3_varlen_func": stubs.flash_attn_varlen_func,
        "sageattn": in_graph(stubs.sageattn, "sageattn"),
        "sageattn_varlen": stubs.sageattn_varlen,
        "npu_fusion_attention": in_graph(stubs.npu_fusion_attention, "npu_fusion_attention"),
        "xla_flash_attention": in_graph(stubs.flash_attention, "flash_attention"),
        "xops": stubs,
        **{f"sageattn{name[5:]}": in_graph(stubs.sageattn, f"sageattn{name[5:]}") for name in sage},
    }
    for name, function in functions.items():
        monkeypatch.setattr(dispatch, name, function, raising=False)
    kernels = {
        "flash_hub": stubs.flash_attn_func,
        "flash_varlen_hub": stubs.flash_attn_varlen_func,
        "flash_4_hub": in_graph(stubs.flash_attn_4_func, "flash_attn_func"),
        "_flash_3_hub": stubs.flash_attn_3_func,
        "_flash_3_varlen_hub": stubs.flash_attn_varlen_func,
        "aiter_fa2_hub": in_graph(stubs.aiter_flash_attn_func, "flash_attn_func"),
        "sage_hub": in_graph(stubs.sageattn, "sageattn"),
        "sage_blackwell_hub": in_graph(stubs.sageattn_hnd, "sageattn3_blackwell"),
    }
    for name, function in kernels.items():
        kernel = dispatch._HUB_KERNELS_REGISTRY[dispatch.AttentionBackendName(name)]
        monkeypatch.setattr(kernel, "kernel_fn", function)


def dispatched(backend: str) -> Callable[..., Tensor]:
    name = dispatch.AttentionBackendName(backend)
    return by_tokens(dispatch.dispatch_attention_fn, backend=name)


def test_each_backend_is_here() -> None:
    names = {name.value for name in dispatch._AttentionBackendRegistry.list_backends()}
    assert names == {*REPLACED, *REFUSED, *UNKNOWN, *NOT_ON_A_CPU}


def test_backends_that_are_replaced() -> None:
    check([dispatched(backend) for backend in REPLACED])


@pytest.mark.parametrize("backend", [*REFUSED, *UNKNOWN])
@torch.no_grad()
def test_backends_that_are_refused(backend: str) -> None:
    model, inputs = spelled([dispatched(backend)]), {"latent": latent()}
    variant = compile_variants(model, inputs, {"sta": SPARSE})["sta"]
    (site,) = variant.report.refused
    assert "set_attention_backend('native')" in site.hint
    assert torch.equal(variant.run(**inputs), model(**inputs))
