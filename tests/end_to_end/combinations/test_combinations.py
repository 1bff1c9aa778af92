"""What people combine with a compiled model: weights x offload x LoRA. Each cell replaces its attention and is right."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import sta_compile
from sta_compile import _torch
from tests.end_to_end.combinations.adapters import add_lora, hot_swap
from tests.end_to_end.combinations.offloads import OFFLOADS
from tests.end_to_end.combinations.weights import AFTER_LORA, WEIGHTS, plain
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import randomize
from tests.end_to_end.oracle import Oracle, window_mask

GRID = (3, 6, 8)
OPTIONS = {"window": (1, 3, 3), "tile": (1, 2, 2), "min_tokens": 0, "dense_above": None}
# LoRA is loaded into layers that have their own hooks already or not, which is the same for most kinds of weights.
CELLS = [
    (weights, offload, lora)
    for weights in (*WEIGHTS, *AFTER_LORA)
    for offload in OFFLOADS
    for lora in ("without LoRA", "LoRA")
    if not (offload == "group, leaves" and lora == "LoRA" and weights not in ("fp32", *AFTER_LORA))
]
# Products of bf16 and fp16, whose sums depend on how rows are grouped.
TOLERANCE = {"bf16": 2e-2, "bitsandbytes nf4": 2e-3, "bitsandbytes int8": 2e-3}


def wan() -> nn.Module:
    """Its widths are multiples of 32 and 64, the blocks of the quantisers."""
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=4,
        out_channels=4, text_dim=64, freq_dim=32, ffn_dim=64, num_layers=1, cross_attn_norm=True,
        rope_max_seq_len=64,
    )  # fmt: skip
    randomize(model)
    return model.eval().requires_grad_(False)


def inputs(dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    frames, rows, cols = GRID
    return {
        "hidden_states": randn(1, 4, frames, 2 * rows, 2 * cols),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": randn(1, 7, 64),
        "return_dict": False,
    }


def masked(model: nn.Module, site: Any, arguments: dict[str, Any]) -> Tensor:
    mask = window_mask(site.grid, site.tiles, site.window)
    with Oracle(model, ["blocks.0.attn1"], mask) as oracle:
        (out,) = model.forward(**arguments)
    assert oracle.calls == 1
    return out


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The edited graphs run as they are: seconds less for each cell, and the numbers are eager's."""
    monkeypatch.setattr(_torch, "compile_with_inductor", lambda gm, inputs, **_: gm.forward)


@pytest.mark.parametrize(("weights", "offload", "lora"), CELLS)
@torch.no_grad()
def test_cell(weights: str, offload: str, lora: str) -> None:
    """Replaced, right, names of weights unchanged, compiled once; with LoRA also after a hot swap."""
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    model, arguments = wan(), inputs(dtype)
    WEIGHTS.get(weights, plain)(model.eval())
    if lora == "LoRA":
        add_lora(model)
    AFTER_LORA.get(weights, plain)(model)
    OFFLOADS[offload](model.eval())
    keys = list(model.state_dict())
    (exact,) = model(
        **arguments
    )  # bitsandbytes packs its weights here, and unpacks them for a state dict

    torch._dynamo.reset()
    sta_compile.reset_reports()
    sta_compile.compile(model, **OPTIONS)
    (out,) = model(**arguments)
    sites = [site for report in sta_compile.reports() for site in report.replaced]
    assert [site.grid for site in sites] == [GRID]
    tolerance = TOLERANCE.get(weights, 1e-5)
    assert relative_error(out, masked(model, sites[0], arguments)) < tolerance

    # A swap asks for a state dict, for which bitsandbytes unpacks 4-bit weights of a CPU: they are other tensors then.
    unpacked = weights == "bitsandbytes nf4" and lora == "LoRA"
    graphs = len(sta_compile.reports())
    with torch._dynamo.config.patch(error_on_recompile=not unpacked):
        if lora == "LoRA":
            hot_swap(model, seed=4)
            before = out
            (out,) = model(**arguments)
            assert relative_error(out, before) > 1e-3
            assert relative_error(out, masked(model, sites[0], arguments)) < tolerance
        model(**arguments)
    assert unpacked or len(sta_compile.reports()) == graphs
    sta_compile.restore(model)
    if lora == "without LoRA":
        assert relative_error(model(**arguments)[0], exact) <= TOLERANCE.get(weights, 0)
    assert list(model.state_dict()) == keys
