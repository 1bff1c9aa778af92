"""The C++ kernel without a GPU: it compiles by NVRTC alone, in little time, and ptxas has registers for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import astuple, replace

import pytest

from sta_compile import config
from sta_compile.codegen import cutlass_source, toolchain
from sta_compile.codegen.cutlass_blocks import BLOCKS
from sta_compile.codegen.cutlass_source import render
from sta_compile.errors import StaError
from sta_compile.runtime import build as building
from sta_compile.runtime.build import build, first_error, read_usage
from tests.codegen.usage import TABLE, cuobjdump, fp8_specs, specs, version

needs_nvrtc = pytest.mark.skipif(
    isinstance(toolchain.toolchain("nvrtc"), str), reason=str(toolchain.toolchain("nvrtc"))
)
SPEC = next(spec for spec in specs() if spec.head_dim == 128)


@pytest.fixture
def empty_cache(tmp_path):
    with config.patch(cache_dir=str(tmp_path)):
        yield


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", BLOCKS)
def test_usage_is_as_recorded(head_dim, empty_cache):
    recorded = json.loads(TABLE.read_text())
    assert set(recorded["kernels"]) == {spec.text() for spec in specs()}
    dtype = "fp16" if head_dim % 64 else "bf16"
    for spec in specs():
        if (spec.head_dim, spec.dtype) != (head_dim, dtype):
            continue
        start = time.monotonic()
        cubin = build(spec)
        assert time.monotonic() - start < 15
        assert cubin.code.startswith(b"\x7fELF")
        assert not serialised(cubin.log), spec.text()
        if version() == recorded["nvrtc"]:
            assert list(astuple(cubin.usage)) == recorded["kernels"][spec.text()]


def serialised(log):
    """ptxas then waits for each matrix product before the next one starts."""
    return "wgmma.mma_async instructions are serialized" in log


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [s for s in specs() if (s.head_dim, s.dtype) == (128, "bf16")],
    ids=lambda s: f"{s.direction} {s.precision}",
)
def test_consumers_keep_their_registers(spec, empty_cache):
    """What spills belongs to the producer, whose loads run ahead: none lies between a loop's matrix products, but for a
    thread's number, which the fp8 kernel reads again in each step, what its rare loops of shared rows keep, and what the
    kernel with tiers keeps from loop to loop."""
    lines = [
        line.split(";")[0].split()[1:]
        for line in sass_of(build(spec).code).splitlines()
        if ";" in line
    ]
    names = [next((x for x in line if not x.startswith("@")), "") for line in lines]
    products = [i for i, name in enumerate(names) if name.startswith(("HGMMA", "QGMMA"))]
    if spec.direction == "backward_rows":
        assert not products
        return
    spills = [i for i, name in enumerate(names) if name.startswith(("STL", "LDL"))]
    allowed = 48 if spec.precision == "tiered" else 12
    assert sum(products[0] < i < products[-1] for i in spills) <= allowed


@needs_nvrtc
def test_instructions(empty_cache):
    sass = sass_of(build(SPEC).code)
    for instruction in ("HGMMA.64x128x16.F32.BF16", "UTMALDG.4D", "USETMAXREG", "SYNCS"):
        assert instruction in sass


@needs_nvrtc
def test_instructions_of_fp8(empty_cache):
    """Weights come out of registers, and no byte is moved between them: the conversion writes the operand's words."""
    sass = sass_of(build(fp8_specs()[-1]).code)
    for instruction in ("QGMMA.64x128x32.F32.E4M3.E4M3", "QGMMA.64x72x32", "UTMALDG.4D"):
        assert instruction in sass
    lines = [line for line in sass.splitlines() if ";" in line]
    products = [i for i, line in enumerate(lines) if "QGMMA" in line]
    between = "\n".join(lines[products[0] : products[-1]])
    assert "PRMT" not in between
    assert between.count("SHFL") == 16  # of the rows' maxima, in four loops


def sass_of(code):
    pytest.importorskip("triton")
    return cuobjdump("-sass", code)


@needs_nvrtc
def test_a_second_build_comes_from_the_disk(empty_cache, monkeypatch):
    first = build(SPEC)
    monkeypatch.setattr(building, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build(SPEC) == first


@needs_nvrtc
def test_no_headers_but_those_of_cutlass():
    """A search path of our own folders and CUTLASS, where there is neither a toolkit nor CCCL."""
    tools = toolchain.toolchain("nvrtc")
    assert [folder.name for folder in tools.include[:2]] == ["cutlass_templates", "freestanding"]
    assert "cutlass_library" in str(tools.include[2])
    assert len(tools.include) == 3


@pytest.mark.skipif(isinstance(toolchain.toolchain("nvcc"), str), reason="no nvcc")
@pytest.mark.slow
def test_nvcc_where_it_is_asked_for(empty_cache):
    with config.patch(compiler="nvcc"):
        cubin = build(SPEC)
    assert cubin.code.startswith(b"\x7fELF")
    assert cubin.usage.registers == 128


@needs_nvrtc
def test_an_error_is_the_compilers_first_one(empty_cache):
    odd = replace(SPEC, blocks=replace(SPEC.blocks, n=200))  # not a multiple of 16 keys
    with pytest.raises(StaError, match=r"key_loader.cuh\(\d+\): error: static assertion"):
        build(odd)


def test_first_error():
    log = "a warning\nk.cu(3): error: no\nk.cu(4): error: more"
    assert first_error(log) == "k.cu(3): error: no"
    assert first_error("") == ""


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(building, "toolchain", lambda _: "the package nvidia-cutlass is missing")
    with pytest.raises(StaError, match="nvidia-cutlass is missing; install it or pass kernel="):
        build(SPEC)


@pytest.mark.parametrize(
    ("module", "package"),
    [("cuda", "cuda-bindings"), ("cutlass_library", "nvidia-cutlass"), ("jinja2", "jinja2")],
)
def test_without_a_package_the_emitter_refuses(module, package):
    code = f"""
import sys
sys.modules[{module!r}] = None
from importlib.util import find_spec as real
import importlib.util
def find_spec(name, *rest):
    if name.split(".")[0] == {module!r}:
        if "." in name:
            raise ModuleNotFoundError(name)
        return None
    return real(name, *rest)
importlib.util.find_spec = find_spec
from sta_compile.codegen.toolchain import missing
print(missing())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"the package {package} is not installed" in done.stdout, done.stderr


def test_usage_of_a_log():
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "    24 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 16 bytes smem\n"
    )
    assert astuple(read_usage(log)) == (168, 84, 24, 16)


def test_the_preamble_holds_all_that_depends_on_the_spec(tmp_path):
    texts = {render(spec, (tmp_path,)).text for spec in specs()}
    assert len(texts) == len(specs())
    text = render(SPEC, (tmp_path,)).text
    assert "kKeys = 128;" in text
    assert "MMA_64x128x16_F32BF16BF16_SS" in text
    assert re.search(r"offsetof\(sta::Parameters, problem.scale\) == 720\)", text)


def test_headers_are_known_by_content(tmp_path):
    def of(text):
        cutlass_source._headers.cache_clear()
        return cutlass_source._headers(cutlass_source._includes(text), (tmp_path,))

    text = '#include "a.h"\n'
    absent = of(text)
    (tmp_path / "a.h").write_text('#  include <b.h>\n#include CUDA_STD_HEADER(c)\n#include "a.h"\n')
    first = of(text)
    (tmp_path / "b.h").write_text("int b;")
    second = of(text)
    (tmp_path / "b.h").write_text("int c;")
    third = of(text)
    (tmp_path / "cuda/std").mkdir(parents=True)
    (tmp_path / "cuda/std/c").write_text("")
    fourth = of(text)
    assert len({absent, first, second, third, fourth}) == 5
    (tmp_path / "other.h").write_text("nobody includes this")
    assert of(text) == fourth
