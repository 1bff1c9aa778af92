"""Who measures kernels: a model that is compiled with mode="max-autotune" or inductor's option, and nobody else."""

from __future__ import annotations

import pytest
import torch

import sta_compile
from sta_compile import tune_kernels as tuning
from tests.end_to_end.tiny import TinyVideo

MEASURED = "measured on 3x4x6 tokens: triton ... 0.1 ms, of 2 measured"


@pytest.mark.parametrize(
    ("how", "asked"),
    [
        ({}, 0),
        ({"mode": "max-autotune"}, 1),
        ({"max_autotune": True}, 1),
        ({"options": {"max_autotune": False}}, 0),
    ],
)
def test_who_measures(stages_only, monkeypatch, how, asked):
    versions = []
    monkeypatch.setattr(
        tuning, "tune_kernels", lambda gm, version: versions.append(version) or (MEASURED,)
    )
    model = sta_compile.compile(TinyVideo(), min_tokens=0, dense_above=None, **how)
    model(torch.randn(1, 4, 3, 4, 6))
    assert len(versions) == asked
    assert all(version.startswith("sta_compile 0") for version in versions)
    (report,) = sta_compile.reports()
    assert report.measured == (MEASURED,) * asked
    assert (MEASURED in str(report)) == bool(asked)
    assert ("measure kernels" in report.seconds) == bool(asked)
