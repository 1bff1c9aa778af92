from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sta_compile.codegen.blocks import Choice
from sta_compile.codegen.emitter import Problem
from sta_compile.codegen.select import select
from sta_compile.codegen.tensor_map import tensor_map
from sta_compile.codegen.triton_forward import fastest
from sta_compile.ir.kernel_spec import Blocks
from sta_compile.ir.target import Target

HOPPER = Problem(Target.cuda(90), "bf16", 128, 1, "i32", True, 0.1, ((384, 300), (256, 1)))


def test_tma_first_then_pointers():
    specs, reasons = select(HOPPER, "triton")
    assert [spec.loads for spec in specs] == ["tma", "pointer"]
    assert reasons == ()
    assert specs[0].text() == (
        "triton forward sm90 bf16 d128 128x128 warps=8 stages=3 tma contexts=1 lengths=i32 dense"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": Target.cuda(75)}, "older than 8.0"),
        ({"target": Target("hip", unsupported="AMD")}, "hip devices"),
        ({"head_dim": 36}, "multiple of 8"),
        ({"head_dim": 264}, "multiple of 8"),
        ({"dtype": "torch.float64"}, "torch.float64 is not one of"),
        ({"contexts": 5}, "more than 4"),
        ({"scale": -1.0}, "not positive"),
        ({"direction": "backward"}, "no backward"),
    ],
)
def test_refusals_have_a_reason(change, reason):
    specs, reasons = select(replace(HOPPER, **change), "auto")
    assert not specs
    assert any(reason in text for text in reasons)


@pytest.mark.parametrize(
    "change", [{"mapped": False}, {"head_dim": 96}, {"dtype": "fp32"}, {"target": Target.cuda(89)}]
)
def test_pointers_where_tma_does_not_fit(change):
    specs, reasons = select(replace(HOPPER, **change), "triton")
    assert [spec.loads for spec in specs] == ["pointer"]
    assert len(reasons) == 1


def test_many_segments_have_blocks_of_their_own():
    """On workstation GPUs more than two segments need registers that the larger blocks have not left."""
    desk = replace(HOPPER, target=Target.cuda(120))
    for contexts, keys in ((0, 32), (2, 32), (3, 16), (4, 16)):
        specs, _ = select(replace(desk, contexts=contexts), "triton")
        assert [(spec.loads, spec.blocks.n) for spec in specs] == [("tma", keys), ("pointer", 32)]
    specs, reasons = select(replace(desk, head_dim=256), "triton")
    assert [spec.loads for spec in specs] == ["pointer"]
    assert "no blocks for TMA at head dim 256" in reasons[0]


def test_blocks_weigh_padded_rows():
    wide, narrow = Choice(Blocks(128, 128, 8, 3)), Choice(Blocks(64, 128, 4, 3), 0.9)
    assert fastest((wide, narrow), ((384, 300),)) == wide.blocks
    assert fastest((wide, narrow), ((432, 220),)) == narrow.blocks  # 512 rows or 448 / 0.9
    assert fastest((wide, narrow), ((432, 220), (256, 10_000))) == wide.blocks


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([8, 16]),
    st.sampled_from(["bhnd", "bnhd", "fused", "sequence"]),
)
def test_a_tensor_map_addresses_every_vector(batch, heads, tokens, head_dim, layout):
    shape = batch, heads, tokens, head_dim
    if layout == "bhnd":
        x = torch.arange(batch * heads * tokens * head_dim).view(shape)
    elif layout == "sequence":
        x = torch.arange(tokens * batch * heads * head_dim).view(tokens, batch, heads, head_dim)
        x = x.permute(1, 2, 0, 3)
    else:
        parts = 3 if layout == "fused" else 1
        x = torch.arange(batch * tokens * parts * heads * head_dim)
        x = x.view(batch, tokens, parts, heads, head_dim)[:, :, -1].transpose(1, 2)
    found = tensor_map(tuple(x.shape), x.stride(), 2, 0)
    if layout == "sequence" and batch > 1:
        assert found is None
        return
    assert found is not None
    for b in range(batch):
        for h in range(heads):
            for n in range(tokens):
                row = b * found.row_batch + h * found.row_head + n
                assert row < found.rows
                assert h * found.col_head + head_dim <= found.cols
                offset = row * found.stride + h * found.col_head
                assert offset == (x[b, h, n, 0] - x[0, 0, 0, 0]).item()


def test_tensor_map_needs_16_bytes_and_unit_stride():
    assert tensor_map((1, 2, 9, 40), (720, 360, 40, 1), 2, 0) is not None
    assert tensor_map((1, 2, 9, 36), (648, 324, 36, 1), 2, 0) is None
    assert tensor_map((1, 2, 9, 40), (720, 360, 40, 1), 2, 8) is None
    assert tensor_map((1, 2, 9, 40), (720, 1, 80, 2), 2, 0) is None
    assert tensor_map((1, 2, 9, 40), (0, 0, 0, 1), 2, 0) is None
