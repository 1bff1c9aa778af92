"""The fp8 kernel's parameters and tensor maps, and the order of its launches, without a GPU."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch

from sta_compile.codegen.cutlass_layout import FORWARD_FP8
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import cutlass_parameters
from sta_compile.runtime.cutlass_bind import bind_fp8
from sta_compile.runtime.quantize import empty
from sta_compile.runtime.tensors import Tensors
from tests.codegen.usage import fp8_specs

SPEC = next(spec for spec in fp8_specs() if spec.head_dim == 80)


@pytest.fixture
def maps(monkeypatch):
    """What the driver was asked to encode."""
    made = []
    monkeypatch.setattr(cutlass_parameters, "encode", lambda *x: made.append(x) or bytes(128))
    return made


def problem():
    """300 tokens of text, 7x9x11 of video; six heads over three."""
    text = AttentionSpec(("context", "video"), tiles=(3, 1, 3), window=(1, 1, 3)).text()
    q = torch.zeros(2, 993, 6, 80, dtype=torch.bfloat16).transpose(1, 2)
    k, v = (torch.zeros(2, 993, 3, 80, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    tensors = Tensors(q, k, v, torch.zeros_like(q), torch.zeros(2, 6, 993))
    return tensors, geometry_of([300, 693], (7, 9, 11), text)


def test_parameters_and_maps(maps):
    tensors, geometry = problem()
    made = empty(tensors)
    binding = bind_fp8(SPEC, empty(tensors, device="meta"), geometry, 0.5)
    (address,) = (ctypes.c_void_p * 1).from_address(binding.arguments.of(made).address)
    raw = ctypes.string_at(address, FORWARD_FP8.size)

    def read(name, kind):
        return struct.unpack_from(f"<{kind}", raw, FORWARD_FP8.offsets[name])[0]

    for name in ("lse", "q_scale", "k_scale", "v_scale", "shift"):
        assert read(name, "Q") == getattr(made, name).data_ptr()
    assert read("out.data", "Q") == tensors.out.data_ptr()
    assert (read("out.token", "q"), read("out.head", "q")) == (480, 80)
    assert read("kv_heads", "i") == 3
    assert read("problem.scale", "f") == pytest.approx(0.5 * 1.4426950408889634)
    boxes = [(m.sizes, m.strides, m.box, m.swizzled) for m, _ in maps]
    columns = 1008  # tokens, padded to a multiple of 16
    of_k = (80, columns, 3, 2), (80, 80 * columns, 3 * 80 * columns)
    of_v = (993, 80, 3, 2), (columns, 80 * columns, 3 * 80 * columns)
    assert boxes == [
        ((80, 993, 6, 2), (80, 80 * 993, 80 * 993 * 6), (128, 16, 1, 1), True),
        (*of_k, (128, 128, 1, 1), True),
        (*of_v, (128, 80, 1, 1), True),
        (*of_k, (128, 16, 1, 1), True),
        (*of_v, (16, 80, 1, 1), False),
    ]
    assert [at for _, at in maps] == [
        x.data_ptr() for x in (made.q, made.k, made.v, made.k, made.v)
    ]
    assert {m.kind for m, _ in maps} == {"fp8"}
