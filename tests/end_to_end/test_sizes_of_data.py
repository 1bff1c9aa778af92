"""Models whose graphs break or have sizes that depend on data, by the one call that people make: `sta_compile.compile`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import sta_compile
from sta_compile.coverage.row import Size
from sta_compile.coverage.zoo import rows
from sta_compile.explanation import Explanation
from tests.end_to_end.compiled import DEFAULTS, relative_error
from tests.end_to_end.masked import masked, tensors

OPTIONS = {**DEFAULTS, "tile": (1, 2, 2), "window": (1, 3, 3)}


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("HunyuanVideo15Transformer3DModel (T2V)", 2),
        ("HunyuanVideoFramepackTransformer3DModel", 1),
        ("ZImageTransformer2DModel", 2),
        ("WanAnimate2Transformer3DModel (reference pass)", 2),
    ],
)
def test_every_site_is_replaced(name: str, batch: int, stages_only: None) -> None:
    """Nested regions serve several layers each, and are given up where a block's size is not known."""
    (row,) = rows(name)
    size = Size(batch, (2, 6, 7))
    built = row.at(size)
    exact = tensors(built.model(**built.inputs))
    sta_compile.compile(built.model, **OPTIONS)
    found = tensors(built.model(**built.inputs))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(tensors(built.model(**built.inputs))[0], found[0])
    replaced = Explanation(tuple(sta_compile.reports())).replaced
    sta_compile.restore(built.model)
    assert {kind(site.name) for site in replaced} == {kind(site) for site in built.sites}
    every = [dataclasses.replace(replaced[0], name=site) for site in built.sites]
    expected = masked(built, size, every)
    assert relative_error(found[0], expected[0]) < 1e-5
    assert relative_error(expected[0], exact[0]) > 1e-3


def kind(site: str) -> str:
    """A site without the number of its layer."""
    return ".".join(part for part in site.split(".") if not part.isdigit())
