"""Seconds of the first call at full depth and small width, on a CPU: flat inductor, and `sta_compile.compile`.

    python benchmarks/compile_time.py                    Wan 14B (40 layers) and HunyuanVideo (20 + 40)
    python benchmarks/compile_time.py --layers 8 wan     a smaller version

Each row is a process of its own. Cold ones have an empty cache; "second process" has the cache of the cold one; "artifacts"
has an empty cache, and what `torch.compiler.save_cache_artifacts()` of the cold one returned. `cpu` counts the seconds of
all threads and of the C++ compilers, which other load on the machine does not change. On a CPU artifacts hold no compiled
C++, so that part is done again; `cache_hits` says that the graphs were found. Prints one JSON object per line; all of them
go to $OUT/compile_time.json as well.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch._dynamo.utils import counters

HEADS, HEAD_DIM, GRID, TEXT = 2, 24, (3, 8, 10), 16
SPARSE = {"window": (1, 3, 3), "tile": (1, 2, 2), "min_tokens": 0}


def wan(layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=HEADS, attention_head_dim=HEAD_DIM,
        in_channels=4, out_channels=4, text_dim=TEXT, freq_dim=16, ffn_dim=32, num_layers=layers,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, GRID[0], 2 * GRID[1], 2 * GRID[2]),
        "timestep": torch.full((1,), 900),
        "encoder_hidden_states": torch.randn(1, 7, TEXT),
        "return_dict": False,
    }


def hunyuan(layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=HEADS, attention_head_dim=HEAD_DIM,
        num_layers=layers, num_single_layers=2 * layers, num_refiner_layers=2, mlp_ratio=2.0,
        patch_size=2, patch_size_t=1, guidance_embeds=True, text_embed_dim=TEXT,
        pooled_projection_dim=8, rope_axes_dim=(8, 8, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, GRID[0], 2 * GRID[1], 2 * GRID[2]),
        "timestep": torch.full((1,), 900),
        "encoder_hidden_states": torch.randn(1, 7, TEXT),
        "encoder_attention_mask": torch.ones(1, 7, dtype=torch.int64),
        "pooled_projections": torch.randn(1, 8),
        "guidance": torch.full((1,), 6000.0),
        "return_dict": False,
    }


MODELS = {"wan": (wan, 40), "hunyuan": (hunyuan, 20)}


def cpu_seconds() -> float:
    """Of this process and of the compilers that it has waited for."""
    own, children = (
        resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def first_call(name: str, layers: int, how: str, artifacts: str, save: bool) -> dict[str, Any]:
    """One cold or warm first call, in this process."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    build, _ = MODELS[name]
    model, inputs = build(layers)
    model.eval().requires_grad_(False)
    if how == "inductor":
        model.compile(backend="inductor")
    else:
        import sta_compile

        sta_compile.compile(model, noise="0..1000", **SPARSE)
    if artifacts and not save:
        torch.compiler.load_cache_artifacts(Path(artifacts).read_bytes())
    wall, cpu = time.perf_counter(), cpu_seconds()
    with torch.no_grad():
        out = model(**inputs)[0]
    row: dict[str, Any] = {
        "wall_s": round(time.perf_counter() - wall, 2),
        "cpu_s": round(cpu_seconds() - cpu, 2),
        "sum": out.double().sum().item(),
        "cache_hits": counters["aot_autograd"]["autograd_cache_hit"],
    }
    if how != "inductor":
        import sta_compile

        reports = sta_compile.reports()
        row["stages_s"] = round(sum(sum(r.seconds.values()) for r in reports), 2)
        row["replaced"] = sum(len(r.replaced) for r in reports)
    if save:
        stored = torch.compiler.save_cache_artifacts()
        assert stored is not None
        Path(artifacts).write_bytes(stored[0])
    return row


def process(folder: Path, *arguments: str) -> dict[str, Any]:
    """`first_call` in a process whose caches are in `folder`."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--one", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def compare(name: str, layers: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        stored = str(root / "artifacts")
        for label, cache, arguments in (
            ("flat inductor, cold", "flat", ["inductor"]),
            ("sta_compile.compile, cold", "sta", ["sta", "--save", stored]),
            ("sta_compile.compile, second process", "sta", ["sta"]),
            ("sta_compile.compile, artifacts", "fresh", ["sta", "--load", stored]),
        ):
            row = process(root / cache, name, "--layers", str(layers), "--how", *arguments)
            rows.append({"model": name, "layers": layers, "run": label, **row})
            print(json.dumps(rows[-1]), flush=True)
    flat, cold, second, fresh = rows
    rows.append(
        {
            "model": name,
            "layers": layers,
            "flat_over_cold": round(flat["cpu_s"] / cold["cpu_s"], 2),
            "cold_over_second": round(cold["cpu_s"] / second["cpu_s"], 2),
            "cold_over_artifacts": round(cold["cpu_s"] / fresh["cpu_s"], 2),
            "stages_share": round(cold["stages_s"] / cold["wall_s"], 3),
            "equal": cold["sum"] == second["sum"] == fresh["sum"],
        }
    )
    print(json.dumps(rows[-1]), flush=True)
    return rows


def header() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(),
        "device": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "benchmarks/compile_time.py", *sys.argv[1:]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--one", action="store_true", help="one first call in this process")
    parser.add_argument("--how", default="sta")
    parser.add_argument("--save", default="")
    parser.add_argument("--load", default="")
    args = parser.parse_args()
    if args.one:
        (name,) = args.models
        given = args.save or args.load
        print(json.dumps(first_call(name, args.layers, args.how, given, bool(args.save))))
        return
    rows = [header()]
    for name in args.models:
        rows += compare(name, args.layers or MODELS[name][1])
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "compile_time.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
