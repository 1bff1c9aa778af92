"""Tokens are reordered on the way in and out, and so is each table once: not in every layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.end_to_end.compiled import compile_variants
from tests.random_dits.check import check
from tests.random_dits.dit import HELD, Dit

ONCE = (
    Dit(positions="in every block"),
    Dit(beside="control"),
    Dit(beside="second stream"),
    Dit(modulation="per token"),
    Dit(modulation="frames expanded", held=HELD[2]),
    Dit(modulation="frames apart"),
    Dit(modulation="frames apart", text=(0, 5)),
    Dit(bodies=(("in blocks", "table_of_frames"),)),
    Dit(held=HELD[1], rope="pairs written"),
    Dit(text=(2, 3), rope="in place", rope_of_text="written"),
    Dit(text=(2, 3), joined=False, rope="complex", rope_of_text="padded"),
    Dit(bodies=(("in blocks", "scaled_by_kind"),)),
    Dit(modulation="first frame", text=(0, 5), rope="complex"),
    Dit(beside="residuals", positions="in every block", held=HELD[2]),
)


@torch.no_grad()
def conversions(dit: Dit) -> int:
    return compile_variants(dit.build(), dit.inputs(), {"sta": dit.options})[
        "sta"
    ].report.conversions


@pytest.mark.parametrize("dit", ONCE, ids=repr)
def test_layers_pass_tile_order_on(dit: Dit) -> None:
    few, many = check(replace(dit, layers=3)).conversions, conversions(replace(dit, layers=8))
    assert few == many


def test_what_needs_the_grid_is_converted_around() -> None:
    """A convolution in every layer: two conversions each, and the rest of the layer keeps its order."""
    dit = Dit(feed_forward="conv2d", rope="complex", positions="in every block")
    few, many = (check(replace(dit, layers=layers)).conversions for layers in (2, 3))
    assert many == few + 2
