"""The README's figures are those of the stored runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.whole_video import whole_video

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "results" / "h200"


def row(start: str) -> list[str]:
    """Cells of the one table row whose first cell starts like this, without units."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {start}")]
    return [re.sub(r" s$|x$", "", cell.strip()) for cell in line.strip("|").split("|")[1:]]


def test_steps_and_whole_videos():
    rows = json.loads((RESULTS / "hunyuan_quarter_steps.json").read_text())
    videos = {video["window"]: video for video in whole_video(rows)}
    inductor = next(r for r in rows if r.get("model") == "inductor")
    any_video = next(iter(videos.values()))
    found = row("inductor (cuDNN")
    assert found == ["", f"{inductor['step_ms']:.0f}", str(any_video["inductor_s"]), "1.00"]
    for start, name in (
        ('`backend="sta"`, as it is', "sta default"),
        ('`backend="sta"`, `window=(18', "sta (18,24,24)"),
    ):
        video = videos[name]
        keys = ("sparse_step_ms", "dense_step_ms", "seconds", "speedup")
        assert row(start) == [str(video[key]) for key in keys]
    assert f"the {any_video['dense_steps']} noisiest stay dense" in README


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


def test_every_stored_run_says_where_it_is_from():
    for path in RESULTS.glob("*.json"):
        stored = json.loads(path.read_text())
        head = stored[0] if isinstance(stored, list) else stored
        assert {"date", "device", "torch", "commit", "command"} <= head.keys(), path.name
