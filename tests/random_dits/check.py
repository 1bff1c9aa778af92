"""Compiles a random video transformer and compares it with the definition.

python -c "from tests.random_dits.check import *; print(check(Dit(rope='complex')))"
"""

from __future__ import annotations

import torch
from torch import Tensor

from sta_compile.report import Report
from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.oracle import window_mask
from tests.random_dits.bodies import MOVED
from tests.random_dits.dit import Dit
from tests.random_dits.model import RandomDit

__all__ = ["Dit", "check", "must_be_replaced"]
TOLERANCE = 2e-5


def must_be_replaced(dit: Dit) -> set[str]:
    """Attentions that have no reason to stay dense."""
    if not dit.shows_grid or any(name in MOVED for _, name in dit.bodies):
        return set()
    if dit.region == "nested":
        return {"blocks.0.attn"}
    return {f"blocks.{layer}.attn" for layer in range(dit.layers)}


@torch.no_grad()
def check(dit: Dit) -> Report:
    """Runs a transformer with sparse windows. Fails where it raises inside, differs from the definition, or leaves an
    attention dense without a reason or need."""
    model, inputs = dit.build(), dit.inputs()
    plain = model(**inputs)
    variant = compile_variants(model, inputs, {"sta": dit.options})["sta"]
    report = variant.report
    assert "internal error" not in report.reason, report.reason
    names = [site.name for site in report.replaced]
    missing = must_be_replaced(dit) - set(names)
    reasons = [(site.name, site.reason) for site in report.refused] or report.reason
    assert not missing, f"{sorted(missing)} stay dense: {reasons}"
    if not names:
        assert report.reason, "no reason is given"
    found = variant.run(**inputs)
    expected = by_definition(model, report, inputs)
    assert found.shape == expected.shape
    assert found.stride() == plain.stride(), f"strides {found.stride()}, were {plain.stride()}"
    error = relative_error(found, expected)
    assert error < TOLERANCE, f"differs by {error} where {names} are replaced"
    return report


def by_definition(model: RandomDit, report: Report, inputs: dict[str, Tensor]) -> Tensor:
    """The eager model whose replaced attentions see the windows of the report."""
    dit, twin = model.dit, model.dit.build()
    twin.load_state_dict(model.state_dict())
    modules = dict(twin.named_modules())
    for site in report.replaced:
        assert site.grid is not None
        assert site.tiles is not None
        assert site.window is not None
        roles = [role for role, _ in site.segments]
        assert [size for _, size in site.segments if _ is not None]
        sizes = [size or 0 for _, size in site.segments]
        video = roles.index("video")
        first, total = sum(sizes[:video]), sum(sizes)
        seen = torch.ones(total, total, dtype=torch.bool)
        rows = slice(first, first + sizes[video])
        seen[rows, rows] = window_mask(site.grid, site.tiles, site.window)
        named = twin.blocks if dit.region == "nested" and site.name.startswith("blocks") else None
        for module in [block.attn for block in named] if named else [modules[site.name]]:
            module.seen = seen
    return twin(**inputs)
