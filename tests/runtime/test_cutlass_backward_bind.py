"""Parameters and thread blocks of the backward kernels, without a GPU."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch

from sta_compile.codegen.cutlass_backward import plan
from sta_compile.codegen.cutlass_programs import program_of
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import cutlass_parameters
from sta_compile.runtime.cutlass_backward_bind import bind_gradients
from sta_compile.runtime.launch import Call
from sta_compile.runtime.launch_backward import _tensors
from tests.codegen.usage import problem_of

TEXT = AttentionSpec(("context", "video", "keys"), tiles=(3, 1, 3), window=(1, 1, 3)).text()


@pytest.fixture(autouse=True)
def maps(monkeypatch):
    """What the driver was asked to encode."""
    made = []

    def encode(m, address):
        made.append((m, address))
        return bytes(128)

    monkeypatch.setattr(cutlass_parameters, "encode", encode)
    return made


def problem():
    """300 tokens of text, 7x9x11 of video, 40 keys; six heads over three."""
    q, dout = (torch.zeros(2, 993, 6, 72, dtype=torch.float16).transpose(1, 2) for _ in range(2))
    k, v = (torch.zeros(2, 1033, 3, 72, dtype=torch.float16).transpose(1, 2) for _ in range(2))
    lengths = torch.ones(2, 2, dtype=torch.int32)
    call = Call(q, k, v, lengths, None, [300, 693, 40], (7, 9, 11), TEXT, 0.5)
    flags = lengths, None, None, None, None
    tensors = _tensors(call, torch.zeros_like(q), torch.zeros(2, 6, 993), dout, flags, adds=True)
    return tensors, geometry_of([300, 693, 40], (7, 9, 11), TEXT)


def parameters(step, tensors, geometry):
    binding = bind_gradients(*step, tensors, geometry, 0.5)
    given = binding.arguments.of(tensors)
    (address,) = (ctypes.c_void_p * 1).from_address(given.address)
    layout = program_of(step.spec).entries[step.entry]
    raw = ctypes.string_at(address, layout.size)
    found = {}
    for name, kind, number in layout.fields:
        values = struct.unpack_from(f"<{number}{kind}", raw, layout.offsets[name])
        found[name] = values[0] if number == 1 else values
    return binding.blocks, found


def test_blocks_that_own_keys(maps):
    tensors, geometry = problem()
    step = plan(problem_of("fp16", 72), deterministic=False)[1]
    blocks, found = parameters(step, tensors, geometry)
    # Text: 3 + 1 blocks of 128 keys. Nine tiles of up to 3x9x4 tokens, one block each. Two samples, three heads.
    assert blocks == 2 * 3 * (3 + 1 + 9)
    assert (found["kv_heads"], found["tile_blocks"], found["problem.context_blocks"]) == (3, 1, 4)
    assert found["part_rows"] == 2 * 6 * 993
    assert found["dq_sum"] == tensors.dq_sum.data_ptr()
    assert tensors.dq_sum.shape == (2, 2 * 6 * 993, 64)
    assert found["dk.data"] == tensors.dk.data_ptr()
    assert (found["dv.batch"], found["dv.head"], found["dv.token"]) == tensors.dv.stride()[:3]
    assert found["softmax_scale"] == 0.5
    assert found["problem.lengths"] == tensors.key_lengths.data_ptr()
    assert found["problem.dense"] == 0
    addresses = [tensors.q, tensors.dout, tensors.k, tensors.v, tensors.q, tensors.dout]
    assert [address for _, address in maps] == [x.data_ptr() for x in addresses]
    assert [m.box[1] for m, _ in maps] == [64, 64, 64, 64, 16, 16]


def test_blocks_that_own_queries(maps):
    tensors, geometry = problem()
    step = plan(problem_of("fp16", 72), deterministic=True)[2]
    blocks, found = parameters(step, tensors, geometry)
    assert step.spec.blocks.m == 192
    # Text: 2 blocks of 192 rows. Three frame tiles of 297, 198 and 198 rows in groups of 16.
    assert blocks == 2 * 6 * (2 + 2 + 2 + 2)
    assert found["dq.data"] == tensors.dq.data_ptr()
    assert found["statistics"] == tensors.statistics.data_ptr()
    assert [m.box[1] for m, _ in maps] == [16, 16, 64, 64, 16, 16]


def test_rows(maps):
    tensors, geometry = problem()
    steps = plan(problem_of("fp16", 72), deterministic=False)
    rows = 2 * 6 * 993
    before, found = parameters(steps[0], tensors, geometry)
    assert before == -(-(rows + 1) // 16)
    assert (found["batch_heads"], found["heads"], found["queries"]) == (12, 6, 993)
    assert found["lse"] == tensors.lse.data_ptr()
    after, found = parameters(steps[2], tensors, geometry)
    assert after == -(-rows // 16)
    assert found["dq_sum"] == tensors.dq_sum.data_ptr()
    assert maps == []
