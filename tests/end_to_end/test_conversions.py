"""Layers pass tile order on to each other: the number of conversions does not depend on how many there are."""

from __future__ import annotations

import pytest
import torch

from tests.end_to_end.compiled import compile_variants
from tests.end_to_end.models import FAMILIES, Family, Size, hunyuan

GRID = (5, 9, 11)
OPTIONS = {"tile": (1, 2, 2), "window": (3, 5, 5)}


def conversions(family: Family, layers: int) -> int:
    case = family.case(2, GRID, layers)
    with torch.no_grad():
        report = compile_variants(case.model, case.inputs, {"sta": OPTIONS})["sta"].report
    assert len({site.name for site in report.replaced}) == layers * len(family.attention)
    assert not report.refused
    return report.conversions


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_two_layers_and_five(family):
    few, many = conversions(family, 2), conversions(family, 5)
    assert few == many > 0


@pytest.mark.parametrize(("dual", "single"), [(2, 5), (5, 2)])
def test_each_kind_of_layer_of_hunyuan_video(dual, single):
    def build(size: Size):
        return hunyuan(Size(size.batch, size.grid, dual), single_layers=single)

    family = Family("hunyuan", build, FAMILIES["hunyuan"].attention)
    case = family.case(2, GRID)
    with torch.no_grad():
        report = compile_variants(case.model, case.inputs, {"sta": OPTIONS})["sta"].report
    assert len(report.replaced) == dual + single
    assert report.conversions == conversions(FAMILIES["hunyuan"], 2)
