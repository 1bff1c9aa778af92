"""Our stages are a small part of a compile: 40 layers of Wan, full depth and small width."""

from __future__ import annotations

import torch

from tests.end_to_end.compiled import compile_variants
from tests.end_to_end.models import FAMILIES

# On an idle core they take about one second, beside ten of Dynamo's and minutes of inductor's.
SECONDS = 5.0


def test_forty_layers():
    case = FAMILIES["wan"].case(1, (5, 9, 11), layers=40)
    options = {"window": (2, 3, 4), "tile": (2, 3, 4)}
    with torch.no_grad():
        variant = compile_variants(case.model, case.inputs, {"sparse": options})["sparse"]
    assert len(variant.report.replaced) == 40
    assert variant.report.conversions == 4
    assert sum(variant.report.seconds.values()) < SECONDS, variant.report.seconds
