"""Targets: of devices, of GPUs that are not there, and what is built for them."""

from __future__ import annotations

import pytest
import torch

import sta_compile
from sta_compile import config
from sta_compile.codegen import cutlass_forward, toolchain
from sta_compile.codegen.select import select
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.target import Target
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime import launch, prepare, say
from sta_compile.runtime.target import _detect, detect

SPEC = AttentionSpec(("video",), tiles=(3, 4, 4), window=(1, 3, 3)).text()
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(launch, "_failed", {})
    monkeypatch.setattr(say, "_said", set())
    monkeypatch.setattr(cutlass_forward, "missing", lambda: "")
    select.cache_clear()
    yield
    select.cache_clear()


def test_the_public_target_is_the_current_device():
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert sta_compile.target() == detect(torch.device(kind))
    assert sta_compile.target("cpu").kind == "cpu"


def test_a_gpu_that_is_not_there():
    with config.patch(target="9.0"):
        target = sta_compile.target()
        assert target == Target.cuda(90) == detect(torch.device("meta"))
        assert {"tma", "wgmma", "setmaxnreg"} <= set(target.features)
        assert target.shared_memory == 232_448
        assert sta_compile.target("cpu").kind == "cpu"  # tensors run where they are
    assert detect(torch.device("meta")).unsupported
    with config.patch(target="sm_75"):
        assert "older than 8.0" in sta_compile.target().unsupported


def test_features():
    assert Target.cuda(80).features == ("mma", "cp.async")
    assert "fp8" in Target.cuda(89).features
    assert "wgmma" not in Target.cuda(100).features
    assert "tcgen05" in Target.cuda(100).features
    assert "tcgen05" not in Target.cuda(120).features


def test_a_devices_own_numbers(monkeypatch):
    class Properties:
        major, minor, name, multi_processor_count = 9, 0, "NVIDIA H200", 132
        shared_memory_per_block_optin, L2_cache_size = 232448, 60 * 2**20

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    _detect.cache_clear()
    target = detect(torch.device("cuda", 0))
    _detect.cache_clear()
    assert (target.sm_count, target.l2_cache) == (132, 60 * 2**20)
    assert (target.name, target.capability) == ("NVIDIA H200", 90)


class Compiler:
    """Takes the place of the emitters' runners; `bad`: blocks whose kernels don't compile."""

    def __init__(self, bad=()):
        self.compiled, self.bad = [], bad

    def compile(self, spec):
        self.compiled.append(spec)
        if spec.blocks.n in self.bad:
            raise RuntimeError("no registers left")


def prepared(monkeypatch, compiler, geometry=None, head_dim=128, **options):
    monkeypatch.setattr(prepare, "runner_of", lambda emitter: compiler)
    with config.patch(target="sm_90"):
        shape, device = (1, 2, 1536, head_dim), torch.device("meta")
        request = prepare.Request(shape, 2, 1536, BF16, device, geometry, 0, **options)
        return prepare.prepare(request)


def test_prepare_compiles_the_one_kernel_of_a_known_grid(monkeypatch):
    compiler = Compiler()
    geometry = geometry_of([1536], (6, 16, 16), SPEC)
    (text,) = prepared(monkeypatch, compiler, geometry)
    assert text.startswith("cutlass forward sm90 bf16 d128")
    assert [spec.text() for spec in compiler.compiled] == [text]


def test_prepare_compiles_all_that_an_unknown_grid_may_need(monkeypatch):
    compiler = Compiler()
    texts = prepared(monkeypatch, compiler)
    assert [spec.text() for spec in compiler.compiled] == list(texts)
    assert len(texts) == 1
    compiler = Compiler()
    texts = prepared(monkeypatch, compiler, kernel="triton")
    assert [spec.blocks.m for spec in compiler.compiled] == [128, 64]


def test_prepare_goes_on_to_the_next_emitter(monkeypatch):
    compiler = Compiler(bad={192})
    with pytest.warns(RuntimeWarning, match="192x192.*no registers left"):
        texts = prepared(monkeypatch, compiler, head_dim=64)
    assert [text.split()[0] for text in texts] == ["triton"]


def test_prepare_where_there_is_nothing_to_build():
    shape = (1, 2, 192, 64)
    for device in ("cpu", "meta"):
        assert (
            prepare.prepare(prepare.Request(shape, 2, 192, BF16, torch.device(device), None, 0))
            == ()
        )
    with config.patch(target="sm_90"):
        device = torch.device("meta")
        assert (
            prepare.prepare(
                prepare.Request(shape, 2, 192, BF16, device, None, 0, kernel="reference")
            )
            == ()
        )


@pytest.mark.slow
@pytest.mark.skipif(isinstance(toolchain.toolchain(), str), reason=str(toolchain.toolchain()))
def test_a_machine_without_a_gpu_fills_the_cache(tmp_path):
    geometry = geometry_of([1536], (6, 16, 16), SPEC)
    shape, device = (1, 2, 1536, 64), torch.device("meta")
    with config.patch(target="sm_90", cache_dir=str(tmp_path)):
        assert len(prepare.prepare(prepare.Request(shape, 2, 1536, BF16, device, geometry, 0))) == 1
    assert len(list(tmp_path.glob("sta_kernels/*.sta"))) == 1
