"""The README's figures are those of the stored runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "results" / "h200"


def row(start: str) -> list[str]:
    """Cells of the one table row whose first cell starts like this, without units."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {start}")]
    return [re.sub(r" s$|x$", "", cell.strip()) for cell in line.strip("|").split("|")[1:]]


def test_steps_and_whole_videos():
    rows = json.loads((RESULTS / "hunyuan_quarter.json").read_text())
    inductor = next(r for r in rows if r.get("model") == "inductor")
    videos = {r["schedule"]: r for r in rows if "schedule" in r}
    before = 50 * inductor["step_ms"]
    cells = ["", f"{inductor['step_ms']:.0f}", f"{before / 1e3:.1f}", "1.00"]
    assert row("inductor (cuDNN") == cells
    for start, name in (
        ('`backend="sta"`, as it is', "sta default"),
        ('`backend="sta"`, `window=(18', "sta (18,24,24)"),
    ):
        video = videos[name]
        assert video["steps"] == len(video["step_s"]) == 50
        dense, sparse = (
            1e3 * median(part)
            for part in (
                video["step_s"][: video["dense_steps"]],
                video["step_s"][video["dense_steps"] :],
            )
        )
        speedup = before / 1e3 / video["seconds"]
        found = [f"{sparse:.0f}", f"{dense:.0f}", f"{video['seconds']:.1f}", f"{speedup:.2f}"]
        assert row(start) == found
        assert video["share_of_predicted"] >= 0.99
        assert f"the {video['dense_steps']} noisiest stay dense" in README


def test_the_operator_alone():
    rows = json.loads((RESULTS / "attention.json").read_text())
    found = {r["workload"]: r for r in rows if "workload" in r}
    for start, name in (
        ("window (3,3,3) tiles", "W1 333"),
        ("window (5,5,5) tiles", "W1 555"),
        ("full window", "W1 full"),
    ):
        ms, rate = found[name]["ms"]["sta"], found[name]["tflops"]["sta"]
        assert row(start) == [f"{ms:.1f}", f"{rate:.0f}"]
    full = found["W1 full"]
    for cell, values, digits in zip(
        row("SDPA, cuDNN"), (full["ms"], full["tflops"]), (1, 0), strict=True
    ):
        assert cell == " / ".join(f"{values[peer]:.{digits}f}" for peer in ("cudnn", "flash"))


def test_the_first_call():
    """Half of flat inductor's time, a quarter of that in a second process, and 5 % for the stages, at most."""
    rows = json.loads((ROOT / "results" / "cpu" / "compile_time.json").read_text())
    for start, model in (("Wan, 40", "wan"), ("HunyuanVideo, 60", "hunyuan")):
        runs = {
            r["run"].removeprefix("sta_compile.compile, "): r
            for r in rows
            if "run" in r and r["model"] == model
        }
        flat, cold, second = (runs[n] for n in ("flat inductor, cold", "cold", "second process"))
        assert row(start) == [f"{r['cpu_s']:.1f}" for r in (flat, cold, second)]
        assert flat["cpu_s"] > 2 * cold["cpu_s"] > 8 * second["cpu_s"]
        assert cold["stages_s"] < 0.05 * cold["cpu_s"]
        assert f"{cold['stages_s']:.1f} s" in README


def test_every_stored_run_says_where_it_is_from():
    for path in RESULTS.glob("*.json"):
        stored = json.loads(path.read_text())
        head = stored[0] if isinstance(stored, list) else stored
        assert {"date", "device", "torch", "commit", "command"} <= head.keys(), path.name


def test_the_backward_pass():
    rows = json.loads((RESULTS / "kernels.json").read_text())
    found = {r["workload"]: r for r in rows if "workload" in r}
    ms, rate = (found["W1 333 backward"][name]["sta"] for name in ("ms", "tflops"))
    assert f"took {ms:.1f} ms on Hopper ({rate:.0f} TFLOP/s" in README


def test_fp8():
    rows = json.loads((RESULTS / "attention.json").read_text())
    found = {r["workload"]: r["ms"] for r in rows if "workload" in r}
    full, sparse = found["W1 full fp8"], found["W1 333 fp8"]
    text = " ".join(README.split())
    assert f"took {full['sta']:.1f} ms instead of {full['sta native']:.1f}" in text
    assert f"(3,3,3) tiles {sparse['sta']:.1f} instead of {sparse['sta native']:.1f}" in text
