"""The same inputs give the same bits: in two processes with cold caches, and under torch's deterministic algorithms."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo

ROOT = Path(__file__).parents[2]


def digest() -> str:
    """Of the output and a gradient of a compiled model."""
    torch.use_deterministic_algorithms(True)
    model = TinyVideo(layers=2)
    latent = torch.randn(2, CHANNELS, 3, 5, 7, generator=torch.Generator().manual_seed(5))
    options = {**SPARSE, "min_tokens": 0, "dense_above": None}
    out = torch.compile(model, backend="sta", options=options)(latent)
    out.square().mean().backward()
    gradient = model.blocks[0].attn.to_k.weight.grad
    assert gradient is not None
    found = hashlib.sha256()
    for tensor in (out.detach(), gradient):
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def test_two_processes_with_cold_caches_agree(tmp_path: Path) -> None:
    digests = []
    for name in ("first", "second"):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name)}
        code = "from tests.end_to_end.test_determinism import digest; print(digest())"
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        digests.append(run.stdout.strip().splitlines()[-1])
    assert digests[0] == digests[1]
