"""Every example runs, and says what its text promises; inductor, which takes minutes, runs for the README's lines alone."""

from __future__ import annotations

import json
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
        ("moving_shapes", ["train"], ["diffusers"]),
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


@pytest.mark.usefixtures("stages_only")
@pytest.mark.filterwarnings("ignore:sta. ")
def test_moving_shapes(run, tmp_path):
    weights = str(tmp_path / "weights.pt")
    out = run("moving_shapes", "train", "--steps", "3", "--weights", weights)
    assert "3 steps, loss" in out
    files = "--frames", str(tmp_path / "frames.png"), "--json", str(tmp_path / "table.json")
    run(
        "moving_shapes",
        "compare",
        "--weights",
        weights,
        "--videos",
        "1",
        *files,
        "--windows",
        "9,12,16",
        "3,3,4",
    )
    full, all_of_it, window = json.loads((tmp_path / "table.json").read_text())
    assert full["window"] == "full"
    assert all_of_it["psnr"] > 60  # of all 9x12x16 tokens: the dense model again
    assert window["psnr"] < all_of_it["psnr"]
    assert window["ssim"] < 1
    assert (tmp_path / "frames.png").read_bytes().startswith(b"\x89PNG")


def test_moving_shapes_bounce_and_measure():
    module = runpy.run_path(str(EXAMPLES / "moving_shapes.py"))
    assert module["bounced"](torch.tensor([-1.5, 0.5, 1.5, 3.0])).tolist() == [-0.5, 0.5, 0.5, -1.0]
    prompts = module["scenes"](2, torch.device("cpu"), torch.Generator().manual_seed(0))
    video = module["render"](prompts, (5, 24, 32))
    assert video.shape == (2, 3, 5, 24, 32)
    assert video.abs().max() <= 1
    assert not video[:, :, 0].equal(video[:, :, 4])
    assert module["ssim"](video, video) == pytest.approx(1)
    assert module["psnr"](video, video + 0.2) == pytest.approx(
        20, abs=1e-3
    )  # 10 log10(2^2 / 0.2^2)


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
