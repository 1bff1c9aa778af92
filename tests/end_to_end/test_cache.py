"""A second process finds what the first compiled, runs it with no planning state, and still reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import json, torch, sta_compile
from torch._dynamo.utils import counters
from tests.end_to_end.tiny import TinyVideo
model = TinyVideo()
latent = torch.randn(1, 4, 3, 5, 7, generator=torch.Generator().manual_seed(0))
window = json.loads(WINDOW)
options = {"window": tuple(window), "tile": (1, 2, 2), "min_tokens": 0, "dense_above": None}
with torch.no_grad():
    out = torch.compile(model, backend="sta", fullgraph=True, options=options)(latent)
(report,) = sta_compile.reports()
print(json.dumps({
    "sum": out.double().sum().item(),
    "replaced": len(report.replaced),
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
}))
"""


def run(folder, window) -> dict:
    program = PROGRAM.replace("WINDOW", repr(json.dumps(window)))
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_with_a_warm_cache(tmp_path):
    first, second = run(tmp_path, (1, 2, 2)), run(tmp_path, (1, 2, 2))
    assert (first["hits"], second["hits"]) == (0, 1)
    assert second["sum"] == first["sum"]
    assert first["replaced"] == second["replaced"] == 1
    other = run(tmp_path, (1, 3, 3))
    assert other["hits"] == 0
    assert other["sum"] != first["sum"]
