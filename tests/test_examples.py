"""Every example runs, and says what its text promises; inductor, which takes minutes, runs for the README's lines alone."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example's main() in this process, from a clean state, and returns what it prints."""
    monkeypatch.setenv("COLUMNS", "120")
    torch._dynamo.reset()

    def call(name, *arguments):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(arguments))
        return capsys.readouterr().out

    yield call
    torch._dynamo.reset()


def test_each_example_has_a_main_and_a_test_here():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    here = Path(__file__).read_text()
    assert names
    for name in names:
        assert "def main(" in (EXAMPLES / f"{name}.py").read_text()
        assert f'run("{name}"' in here


def test_inspect_a_plan(run, tmp_path):
    out = run("inspect_a_plan", "30x48x80", "18,24,24", "--picture", str(tmp_path / "window.png"))
    assert "9.0% of all (query, key) pairs" in out
    assert (tmp_path / "window.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "arguments", "missing"),
    [
        ("demo", [], ["matplotlib"]),
        ("demo", [], ["diffusers", "matplotlib"]),
        ("compile_a_model", [], ["diffusers"]),
        ("regional_compile", [], ["diffusers"]),
        ("diffusers_pipeline", [], ["diffusers", "transformers"]),
        ("inspect_a_plan", ["5x6x8", "auto", "--picture", "window.png"], ["matplotlib"]),
    ],
)
def test_a_missing_package_is_one_line(monkeypatch, name, arguments, missing):
    for package in missing:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    what = f"this needs {' and '.join(missing)}; run pip install {' '.join(missing)}"
    assert stopped.value.code == f"sta_compile: {what}"


@pytest.mark.usefixtures("stages_only")
@pytest.mark.filterwarnings("ignore:sta. ")
def test_compile_a_model(run):
    out = run("compile_a_model")
    assert "2 of 2 self-attentions over 9x24x40 tokens" in out
    assert "difference from the dense model" in out


@pytest.mark.usefixtures("stages_only")
@pytest.mark.filterwarnings("ignore:sta. ")
def test_diffusers_pipeline(run):
    out = run("diffusers_pipeline", "--steps", "3")
    assert "2 of 2 self-attentions over 5x12x16 tokens" in out
    rows = [line for line in out.splitlines() if line.startswith("│") and line.count("│") == 4]
    assert len(rows) == 17


@pytest.mark.usefixtures("stages_only")
@pytest.mark.filterwarnings("ignore:sta. ")
def test_regional_compile(run):
    out = run("regional_compile")
    assert "over 9x24x40 tokens" in out
    assert "over 9x40x24 tokens" in out


@pytest.mark.slow
@pytest.mark.usefixtures("stages_only")
def test_demo(run, tmp_path):
    out = run("demo", "--layers", "1", "--picture", str(tmp_path / "window.png"))
    assert "1 of 1 self-attentions over 9x16x22 tokens" in out
    assert "2 of 2 self-attentions over 9x16x22 tokens" in out
    assert (tmp_path / "window.png").exists()
    for row in ("eager", "inductor", 'sta, window="full"', "sta, as it is"):
        assert row in out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sta. ")
def test_the_readmes_ten_lines(capsys):
    readme = (EXAMPLES.parent / "README.md").read_text()
    code, shown = readme.split("```python\n")[1].split("```")[0], readme.split("```\n╭")[1]
    torch._dynamo.reset()
    exec(compile(code, "README.md", "exec"), {})
    torch._dynamo.reset()
    printed = capsys.readouterr().out
    for line in shown.split("```")[0].splitlines()[1:-1]:
        assert line in printed, line
