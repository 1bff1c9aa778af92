"""What a whole video gains, from the steps that were measured.

    python benchmarks/whole_video.py [results/h200/hunyuan_quarter_steps.json]

A sampling schedule has noisy steps, which stay dense, and sparse ones. The time of a dense step is the measured rest of the
model and the dense kernel of each layer; that of a sparse step was measured as such. Text encoder and VAE are not in it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)

from sta_compile.planning.noise import parse_noise
from sta_compile.planning.noise_schedule import dense_steps

STEPS, SHIFT, LAYERS, DENSE_ABOVE = 50, 7.0, 15, 0.95
RESULTS = Path(__file__).parent.parent / "results" / "h200" / "hunyuan_quarter_steps.json"


def whole_video(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per window: seconds of the schedule with inductor and with sta."""
    merged = {key: value for row in rows if "model" not in row for key, value in row.items()}
    models = {row["model"]: row for row in rows if "model" in row}
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(STEPS)
    convention = parse_noise("0..1000")
    assert convention is not None
    timesteps = [float(int(t)) for t in scheduler.timesteps]
    dense = sum(dense_steps(convention, timesteps, DENSE_ABOVE))
    before = STEPS * models["inductor"]["step_ms"] / 1e3
    out = []
    for name, row in models.items():
        if name == "inductor":
            continue
        dense_ms = merged["rest_ms"] + LAYERS * merged["attention_ms"][f"{name} dense"]
        seconds = (dense * dense_ms + (STEPS - dense) * row["step_ms"]) / 1e3
        out.append(
            {
                "window": name,
                "dense_steps": dense,
                "dense_step_ms": round(dense_ms),
                "sparse_step_ms": round(row["step_ms"]),
                "seconds": round(seconds, 1),
                "inductor_s": round(before, 1),
                "speedup": round(before / seconds, 2),
            }
        )
    return out


def main(arguments: list[str]) -> None:
    path = Path(arguments[0]) if arguments else RESULTS
    for row in whole_video(json.loads(path.read_text())):
        print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
