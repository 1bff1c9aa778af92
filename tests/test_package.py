"""The package as others get it: what importing it costs, what a wheel holds, how torch finds the backend."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(code, folder, *arguments):
    """The JSON that a fresh process prints, started in a folder that holds no package."""
    command = [sys.executable, *arguments, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_is_light_and_registers_the_operators(tmp_path):
    loaded = run(
        """
import json, sys, torch
before = set(sys.modules)
import sta_compile, sta_compile.backend
torch.ops.sta.attention, torch.ops.sta.tile, torch.ops.sta.untile
heavy = ("torch._inductor", "torch._dynamo", "networkx", "rich", "jinja2", "cutlass_library")
new = set(sys.modules) - before
print(json.dumps(sorted(m for m in new if any(m == h or m.startswith(h + ".") for h in heavy))))
""",
        tmp_path,
    )
    assert loaded == []


def test_every_public_name_is_there(tmp_path):
    names = run(
        """
import json, sta_compile
print(json.dumps([name for name in sta_compile.__all__ if getattr(sta_compile, name) is None]))
""",
        tmp_path,
    )
    assert names == []


def test_names_do_not_depend_on_what_was_imported_before(tmp_path):
    """A submodule that is imported becomes an attribute: none may hide a public function."""
    kinds = run(
        """
import importlib, json, pkgutil, sta_compile
for module in pkgutil.iter_modules(sta_compile.__path__):
    if module.name not in ("__main__", "demo"):
        importlib.import_module("sta_compile." + module.name)
names = ("explain", "reports", "reset_reports", "token_grid", "dense_above")
print(json.dumps({name: type(getattr(sta_compile, name)).__name__ for name in names}))
""",
        tmp_path,
    )
    assert set(kinds.values()) == {"function"}


def test_import_and_cpu_work_without_triton_and_optional_packages(tmp_path):
    ok = run(
        """
import json, sys
for name in ("triton", "diffusers", "matplotlib", "cutlass_library", "flash_attn"):
    sys.modules[name] = None
import torch, sta_compile
q = torch.randn(1, 2, 24, 8)
spec = "v1 roles=video tiles=1,1,1 window=full kernel=auto"
out, _ = torch.ops.sta.attention(q, q, q, None, None, [24], [2, 3, 4], spec, 8 ** -0.5)
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
print(json.dumps(torch.allclose(out, expected, atol=1e-5)))
""",
        tmp_path,
    )
    assert ok is True


def test_torch_finds_the_backend_without_an_import(tmp_path):
    found = run(
        """
import json, sys, torch
backends = torch._dynamo.list_backends()
print(json.dumps(["sta" in backends, "sta_compile" in sys.modules]))
""",
        tmp_path,
    )
    assert found == [True, False]


@pytest.mark.slow
def test_a_wheel_works_elsewhere(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*build, str(tmp_path), str(ROOT)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    sources = {
        f"{package}/{path.relative_to(folder)}"
        for package, folder in (
            ("sta_compile", ROOT / "sta_compile"),
            ("sta_compile/codegen", ROOT / "codegen"),
            ("sta_compile/cutlass_templates", ROOT / "cutlass_templates"),
        )
        for pattern in ("*.py", "py.typed", "*.jinja", "*.cuh", "freestanding/**/*")
        for path in folder.rglob(pattern)
        if "__pycache__" not in path.parts and path.is_file()
    }
    assert sources <= names, sources - names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"sta_compile"}
    place = run(
        """
import json, sys
sys.path.insert(0, "site")
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(f).lower()]
import sta_compile.codegen, sta_compile.cutlass_templates
print(json.dumps([sta_compile.codegen.__file__, sta_compile.cutlass_templates.__file__]))
""",
        tmp_path,
    )
    assert all(Path(each).is_relative_to(tmp_path / "site") for each in place)


def test_files_stay_readable():
    files = [*ROOT.glob("sta_compile/**/*.py"), *ROOT.glob("codegen/**/*.py")]
    files += [*ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.py")]
    long = {
        str(f.relative_to(ROOT)): n for f in files if (n := len(f.read_text().splitlines())) > 400
    }
    assert long == {}
    assert not [f for f in files if f.stem in ("utils", "helpers", "misc")]


def test_modules_say_what_they_answer():
    for path in ROOT.glob("sta_compile/**/*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_versions_agree():
    from sta_compile import __version__

    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == __version__
