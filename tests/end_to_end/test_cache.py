"""A second process finds what the first compiled, runs it with no planning state, and still reports.

How much time that saves is in results/cpu/compile_time.json; here what it saves is counted, which no load changes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import json, sys, torch, sta_compile
from pathlib import Path
from torch._dynamo.utils import counters
from tests.end_to_end.tiny import TinyVideo
windows, save, load = json.loads(sys.argv[1])
if load:
    torch.compiler.load_cache_artifacts(Path(load).read_bytes())
latent = torch.randn(1, 4, 3, 5, 7, generator=torch.Generator().manual_seed(0))
found = []
for window in windows:
    torch._dynamo.reset()
    sta_compile.reset_reports()
    counters.clear()
    model = TinyVideo(layers=4)
    options = {"window": tuple(window), "tile": (1, 2, 2), "min_tokens": 0, "dense_above": None}
    sta_compile.compile(model, **options)
    with torch.no_grad():
        out = model(latent)
    (report,) = sta_compile.reports()
    counts = {**counters["aot_autograd"], **counters["inductor"]}
    found.append({
        "sum": out.double().sum().item(),
        "replaced": len(report.replaced),
        "found": counts.get("autograd_cache_hit", 0),
        "missed": counts.get("autograd_cache_miss", 0) + counts.get("fxgraph_cache_miss", 0),
    })
if save:
    Path(save).write_bytes(torch.compiler.save_cache_artifacts()[0])
print(json.dumps(found))
"""
WINDOW, OTHER = (1, 2, 2), (1, 3, 3)


def run(
    folder: Path, *windows: tuple[int, int, int], save: str = "", load: str = ""
) -> list[dict[str, Any]]:
    """What each window finds and misses, in one process whose caches are in a folder."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "PYTHONWARNINGS": "ignore",
    }
    given = json.dumps([windows, save, load])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_the_first_process_compiled(tmp_path: Path) -> None:
    """By a second one with its caches, and by one that has empty caches and the artifacts of torch.compiler."""
    stored = str(tmp_path / "artifacts")
    (first,) = run(tmp_path / "first", WINDOW, save=stored)
    assert first["found"] == 0
    assert first["missed"] > 0
    assert first["replaced"] == 1  # of all layers, whose one body is compiled once
    second, other = run(tmp_path / "first", WINDOW, OTHER)
    assert second == {**first, "found": 1, "missed": 0}
    assert other["found"] == 0
    assert other["sum"] != first["sum"]
    assert run(tmp_path / "second", WINDOW, load=stored) == [second]
