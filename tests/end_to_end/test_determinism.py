"""The same inputs give the same bits: in two processes with cold caches, and under torch's deterministic algorithms."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch._dynamo.backends.debugging import aot_eager

from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo

ROOT = Path(__file__).parents[2]


def digest_of(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def digests() -> list[str]:
    families = (of_family(name) for name in ("wan", "hunyuan"))
    return [through_inductor(), of_a_gradient(), *families]


@torch.no_grad()
def of_family(name: str) -> str:
    """Of what the stages make of a diffusers model: the graphs' text, and their output with and without torch's flag."""
    from tests.end_to_end.compiled import compile_variants
    from tests.end_to_end.models import FAMILIES

    case = FAMILIES[name].case(2, (3, 5, 7), layers=1)
    variant = compile_variants(case.model, case.inputs, {"sta": SPARSE})["sta"]
    outputs = []
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic)
        outputs.append(variant.run(**case.inputs)[0])
    assert torch.equal(*outputs)
    return digest_of(*outputs) + hashlib.sha256(variant.gm.code.encode()).hexdigest()


@torch.no_grad()
def through_inductor() -> str:
    """Of the output of a compiled model."""
    torch.use_deterministic_algorithms(True)
    options = {**SPARSE, "min_tokens": 0, "dense_above": None}
    return digest_of(torch.compile(TinyVideo(), backend="sta", options=options)(latent()))


def of_a_gradient() -> str:
    """Of keys' weights, through the operator's backward pass and what AOTAutograd makes of the graph."""
    from tests.end_to_end.compiled import compile_variants

    torch.use_deterministic_algorithms(True)
    model = TinyVideo(layers=2)
    variants = compile_variants(model, {"latent": latent()}, {"sta": SPARSE}, finish=aot_eager)
    variants["sta"].run(latent=latent()).square().mean().backward()
    gradient = model.blocks[0].attn.to_k.weight.grad
    assert gradient is not None
    return digest_of(gradient)


def latent() -> torch.Tensor:
    return torch.randn(2, CHANNELS, 3, 5, 7, generator=torch.Generator().manual_seed(5))


def test_two_processes_with_cold_caches_agree(tmp_path: Path) -> None:
    """Sets of Python have another order in each process."""
    found = []
    for name in ("1", "2"):
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name),
            "PYTHONHASHSEED": name,
        }
        code = "from tests.end_to_end.test_determinism import digests; print(digests())"
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        found.append(run.stdout.strip().splitlines()[-1])
    assert found[0] == found[1]
