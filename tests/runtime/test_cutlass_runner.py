"""C++ kernels on a driver that only writes down what it is told: parameters, tensor maps, launches."""

from __future__ import annotations

import ctypes
import struct
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sta_compile.codegen.cutlass_layout import FORWARD
from sta_compile.codegen.cutlass_programs import program_of
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import cutlass_parameters, cutlass_problem, cutlass_runner
from sta_compile.runtime import driver as driver_module
from sta_compile.runtime.build import Cubin, Usage
from sta_compile.runtime.cutlass_runner import CutlassRunner
from sta_compile.runtime.tensors import Tensors
from tests.codegen.usage import specs

SPEC = next(spec for spec in specs() if spec.head_dim == 72 and spec.dtype == "fp16")


class Error(int):
    name = "CUDA_ERROR_ODD"


class Names:
    """Every attribute is its own name, as for an enumeration; called, it gives back its argument."""

    def __init__(self, name=""):
        self._name = name

    def __getattr__(self, name):
        return Names(name)

    def __call__(self, value):
        return value

    def __repr__(self):
        return self._name


class Driver(Names):
    def __init__(self):
        super().__init__("driver")
        self.maps, self.launches, self.attributes, self.contexts = [], [], [], 0
        self.answers = []  # of launches to come

    def cuModuleLoadData(self, code):
        assert code == b"code"
        return Error(0), "module"

    def cuModuleGetFunction(self, module, name):
        assert (module, name) == ("module", b"sta_attention_forward")
        return Error(0), "function"

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((function, repr(attribute), value))
        return (Error(0),)

    def cuDeviceGet(self, index):
        return Error(0), index

    def cuDevicePrimaryCtxRetain(self, device):
        return Error(0), f"context of {device}"

    def cuCtxSetCurrent(self, context):
        self.contexts += 1
        return (Error(0),)

    def cuTensorMapEncodeTiled(self, *arguments):
        self.maps.append(arguments)
        return Error(0), SimpleNamespace(opaque=[len(self.maps)] * 16)

    def cuLaunchKernel(self, *arguments):
        *arguments, address, extra = arguments
        (pointer,) = (ctypes.c_void_p * 1).from_address(address)
        assert pointer % 64 == 0
        assert extra == 0
        self.launches.append((*arguments, ctypes.string_at(pointer, FORWARD.size)))
        return (self.answers.pop(0) if self.answers else Error(0),)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    for module in (cutlass_parameters, cutlass_runner, driver_module):
        monkeypatch.setattr(module, "driver", lambda: made)
    monkeypatch.setattr(
        cutlass_runner, "build", lambda spec: Cubin(b"code", Usage(168, 0, 0, 0), "")
    )
    cutlass_parameters._encoding.cache_clear()
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(cutlass_runner, "current_stream", lambda device: 77)
    yield made
    cutlass_parameters._encoding.cache_clear()


def problem(batch=2, token_major=True):
    grid = 7, 9, 11
    text = AttentionSpec(("video",), tiles=(3, 1, 3), window=(1, 1, 3)).text()
    geometry = geometry_of([7 * 9 * 11], grid, text)

    def vectors():
        if token_major:
            return torch.zeros(batch, 693, 3, 72, dtype=torch.float16).transpose(1, 2)
        return torch.zeros(batch, 3, 693, 72, dtype=torch.float16)

    q, k, v, out = (vectors() for _ in range(4))
    return Tensors(q, k, v, out, torch.zeros(batch, 3, 693)), geometry


def started(driver, tensors, geometry):
    runner = CutlassRunner()
    return runner.bind(SPEC, runner.build(SPEC, 1), tensors, geometry, 0.5)


def fields_of(raw):
    found = {
        name.removeprefix("problem."): struct.unpack_from(
            f"<{number}{kind}", raw, FORWARD.offsets[name]
        )
        for name, kind, number in FORWARD.fields
    }
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def test_parameters_and_launch(driver):
    tensors, geometry = problem()
    started(driver, tensors, geometry)(tensors)
    shared = program_of(SPEC).shared
    assert driver.attributes == [
        ("function", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", shared)
    ]
    (*launch, raw) = driver.launches[0]
    # Frame tiles of 3, 2 and 2, a window over all cols: three runs of 297, 198 and 198 rows, 5 + 4 + 4 units, each frame
    # tile with a window of its own, three units a block.
    assert launch == ["function", (2 + 2 + 2) * 3 * 2, 1, 1, 512, 1, 1, shared, 77]
    found = fields_of(raw)
    assert found["out.data"] == tensors.out.data_ptr()
    assert found["lse"] == tensors.lse.data_ptr()
    assert found["lengths"] == found["dense"] == found["length_bytes"] == 0
    assert (found["out.batch"], found["out.head"], found["out.token"]) == tensors.out.stride()[:3]
    assert found["scale"] == pytest.approx(0.5 * 1.4426950408889634)
    assert (found["batch_heads"], found["heads"], found["queries"]) == (6, 3, 693)
    assert found["axis"] == (7, 3, 2, 1, 9, 1, 9, 0, 11, 3, 3, 2)
    assert found["groups"] == (3, 0, 1, 3, 1, 0, 1, 1, 3, 1, 3, 1)
    assert (found["context_blocks"], found["video_blocks"], found["contexts"]) == (0, 6, 0)
    assert found["slab_blocks"][::3] == (2, 2, 2)
    assert found["by_heads"] == (3, -(-(2**33) // 3), 1)
    # Maps in their order, each 16 words of its number.
    assert struct.unpack_from("<80Q", raw) == tuple(n for n in (1, 2, 3, 4, 5) for _ in range(16))


@pytest.mark.parametrize("token_major", [True, False])
def test_tensor_maps(driver, token_major):
    tensors, geometry = problem(token_major=token_major)
    started(driver, tensors, geometry)(tensors)
    n = SPEC.blocks.n
    boxes = [(tensors.q, 16), (tensors.k, n), (tensors.v, n), (tensors.k, 16), (tensors.v, 16)]
    for made, (x, rows) in zip(driver.maps, boxes, strict=True):
        kind, rank, address, sizes, strides, box, steps, *how = made
        assert repr(kind) == "CU_TENSOR_MAP_DATA_TYPE_FLOAT16"
        assert (rank, address) == (4, x.data_ptr())
        assert sizes == [72, 693, 3, 2]
        assert strides == [2 * x.stride(2), 2 * x.stride(1), 2 * x.stride(0)]
        assert box == [64, rows, 1, 1]
        assert steps == [1, 1, 1, 1]
        assert "SWIZZLE_128B" in repr(how[1])


def test_what_is_beside_the_video(driver):
    text = AttentionSpec(("context", "video", "keys"), tiles=(3, 1, 3), window=(1, 1, 3)).text()
    geometry = geometry_of([300, 693, 40], (7, 9, 11), text)
    q, out = (torch.zeros(2, 993, 6, 72, dtype=torch.float16).transpose(1, 2) for _ in range(2))
    k, v = (torch.zeros(2, 1033, 3, 72, dtype=torch.float16).transpose(1, 2) for _ in range(2))
    lengths, dense = torch.ones(2, 2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    masks = (
        torch.ones(2, 340, dtype=torch.bool),
        torch.ones(2, 693, dtype=torch.bool),
        dense.clone(),
    )
    tensors = Tensors(q, k, v, out, torch.zeros(2, 6, 993), lengths, dense, *masks)
    start = started(driver, tensors, geometry)
    start(tensors)
    (*launch, raw) = driver.launches[0]
    found = fields_of(raw)
    assert (
        launch[1] == (2 + 6) * 6 * 2
    )  # 300 rows of text; the video's 6 are more than 693 rows in one need
    assert (found["context_blocks"], found["video_blocks"], found["contexts"]) == (2, 6, 2)
    assert (found["lengths"], found["dense"]) == (lengths.data_ptr(), dense.data_ptr())
    assert found["length_bytes"] == 8
    pointers = tuple(found[name] for name in ("key_mask", "video_mask", "shown"))
    assert pointers == tuple(x.data_ptr() for x in masks)
    assert (found["context_keys"], found["context_column"]) == (340, (0, 300, 0, 0))
    assert found["by_share"] == (2, 2**31, 0)
    assert (found["video_key"], found["video_query"]) == (300, 300)
    assert found["context_key"] == (0, 993, 0, 0)
    assert found["context_length"] == (300, 40, 0, 0)
    assert found["context_query"] == (0, 993, 0, 0)
    assert found["context_rows"] == (300, 0, 0, 0)
    other = torch.ones(2, dtype=torch.bool)
    start(tensors._replace(dense=other))
    assert fields_of(driver.launches[1][-1])["dense"] == other.data_ptr()


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_divisors(value, dividend):
    _, multiplier, shift = cutlass_problem.divisor(value)
    assert multiplier < 2**32
    quotient = dividend if value == 1 else (dividend * multiplier >> 32) >> shift
    assert quotient == dividend // value


def test_axes_of_one_get_a_stride_that_the_driver_takes(driver):
    tensors, geometry = problem(batch=1)
    odd = tensors.q.as_strided(tensors.q.shape, (5, *tensors.q.stride()[1:]))
    tensors = tensors._replace(q=odd)
    started(driver, tensors, geometry)(tensors)
    assert driver.maps[0][4] == [2 * 216, 2 * 72, 144]


def test_the_same_addresses_are_described_once(driver):
    tensors, geometry = problem()
    start = started(driver, tensors, geometry)
    start(tensors)
    start(tensors)
    assert len(driver.maps) == 5
    assert driver.launches[0] == driver.launches[1]
    out = torch.zeros_like(tensors.out)
    start(tensors._replace(out=out))
    assert len(driver.maps) == 5
    assert fields_of(driver.launches[2][-1])["out.data"] == out.data_ptr()
    start(tensors._replace(k=tensors.k.clone()))
    assert len(driver.maps) == 7  # k and its tail


def test_what_is_kept_is_bounded(driver, monkeypatch):
    monkeypatch.setattr(cutlass_parameters, "MOST_KEPT", 8)
    tensors, geometry = problem()
    start = started(driver, tensors, geometry)
    copies = [tensors._replace(q=tensors.q.clone(), k=tensors.k.clone()) for _ in range(20)]
    for copy in (*copies, *copies):
        start(copy)
    assert len(driver.launches) == 40
    assert [x[-1][:0] for x in driver.launches] == [b""] * 40
    arguments = start.__closure__
    kept = [
        c.cell_contents
        for c in arguments
        if isinstance(c.cell_contents, cutlass_parameters.Arguments)
    ]
    assert all(len(x._kept) <= 8 and len(x._encoded) <= 8 for x in kept)


def test_a_thread_without_a_context_gets_torchs(driver):
    tensors, geometry = problem()
    start = started(driver, tensors, geometry)
    before = driver.contexts
    driver.answers = [Error(201)]
    start(tensors)
    assert driver.contexts == before + 1
    assert len(driver.launches) == 2


def test_an_error_has_the_drivers_name(driver):
    tensors, geometry = problem()
    start = started(driver, tensors, geometry)
    driver.answers = [Error(1)]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ODD"):
        start(tensors)


def test_bindings_have_what_is_asked_of_them():
    """The names and numbers of the real bindings, without a driver."""
    bindings = pytest.importorskip("cuda.bindings.driver")
    cutlass_parameters._encoding.cache_clear()
    cu, kinds, how = cutlass_parameters._encoding()
    assert cu is bindings
    assert set(kinds) == {"bf16", "fp16", "fp8"}
    assert len(how) == 4
    names = "cuModuleLoadData cuModuleGetFunction cuFuncSetAttribute cuLaunchKernel cuDeviceGet"
    for name in (*names.split(), "cuTensorMapEncodeTiled", "cuDevicePrimaryCtxRetain"):
        assert callable(getattr(bindings, name))
    assert int(bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT) == driver_module.INVALID_CONTEXT
