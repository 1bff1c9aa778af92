"""Compiles a random video transformer and compares it with the definition.

python -c "from tests.random_dits.check import *; print(check(Dit(rope='complex')))"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from sta_compile._trace import trace
from sta_compile.noise_plan import conventions
from sta_compile.pipeline import rewrite
from sta_compile.report import Report
from sta_compile.settings import Settings
from tests.end_to_end.compiled import DEFAULTS, Options, relative_error
from tests.end_to_end.oracle import site_mask
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
    report, found = captured(model, inputs, {**DEFAULTS, **dit.options})
    assert "internal error" not in report.reason, report.reason
    names = [site.name for site in report.replaced]
    missing = must_be_replaced(dit) - set(names)
    reasons = [(site.name, site.reason) for site in report.refused] or report.reason
    assert not missing, f"{sorted(missing)} stay dense: {reasons}"
    if not names:
        assert report.reason, "no reason is given"
    expected = by_definition(model, report, inputs)
    assert found.shape == expected.shape
    assert found.stride() == plain.stride(), f"strides {found.stride()}, were {plain.stride()}"
    error = relative_error(found, expected)
    assert error < TOLERANCE, f"differs by {error} where {names} are replaced"
    return report


def captured(model: RandomDit, inputs: dict[str, Any], options: Options) -> tuple[Report, Tensor]:
    """What the stages say of the model's graph, and what the edited graph returns.

    Dynamo stops once it has the graph: its guards and bytecode, which take as long, are not what is tested.
    """
    found: list[tuple[Report, Tensor]] = []

    def visit(gm: GraphModule, given: Sequence[Any]) -> None:
        edited, report = rewrite(gm, given, Settings.resolve(options)[0])
        found.append((report, edited(*given)[0]))

    torch._dynamo.reset()
    conventions.clear()
    trace(model, (), inputs, visit, fullgraph=True)
    (only,) = found
    return only


def by_definition(model: RandomDit, report: Report, inputs: dict[str, Tensor]) -> Tensor:
    """The eager model whose replaced attentions see the windows of the report."""
    twin = model.dit.build()
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
        seen[rows, rows] = site_mask(site)
        # A body is known by its first call, and stands for the blocks after it.
        named = site.name.startswith("blocks.") and site.calls > 1
        first_block = int(site.name.split(".")[1]) if named else 0
        after = twin.blocks[first_block : first_block + site.calls] if named else ()
        for module in [block.attn for block in after] or [modules[site.name]]:
            module.seen = seen
    return twin(**inputs)
