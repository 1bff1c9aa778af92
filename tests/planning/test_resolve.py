from __future__ import annotations

import pytest

from sta_compile.errors import StaError
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.planning.choose_tiles import plan_attention
from sta_compile.planning.resolve import resolve

ROLES = ("video", "context")


def test_explicit_tiles_and_window() -> None:
    plan = resolve(AttentionSpec(ROLES, tiles=(4, 5, 11), window=(3, 3, 3)), (21, 45, 80))
    assert plan == plan_attention((21, 45, 80), (15, 24, 24))


def test_full_window_is_all_tiles() -> None:
    plan = resolve(AttentionSpec(ROLES, tiles=(4, 5, 11), window="full"), (21, 45, 80))
    assert plan.window.tiles == (4, 5, 11)
    assert plan.is_full


def test_a_request_is_planned_for_the_grid() -> None:
    spec = AttentionSpec.parse("v1 roles=video request=2,3,4 tile=2,3,4 kernel=auto")
    assert resolve(spec, (7, 13, 17)) == plan_attention((7, 13, 17), (2, 3, 4), (2, 3, 4))
    assert resolve(spec, (17, 13, 7)) == plan_attention((17, 13, 7), (2, 3, 4), (2, 3, 4))


def test_tiles_that_the_grid_has_not() -> None:
    with pytest.raises(StaError):
        resolve(AttentionSpec(ROLES, tiles=(4, 5, 11), window="full"), (3, 45, 80))
