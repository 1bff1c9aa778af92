"""mode="max-autotune": measures the kernels of a rewritten graph's attentions, and writes what it chooses into the graph."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.fx

from ._torch import graph_modules, without_fake_mode
from .ir.attention_spec import AttentionSpec
from .runtime.tune import Measure, tune
from .warm_kernels import request_of

log = logging.getLogger(__name__)
SPEC = 7  # of the operator's arguments


def tune_kernels(
    gm: torch.fx.GraphModule, version: str, measure: Measure | None = None
) -> tuple[str, ...]:
    """What was measured, a line for each kind of attention; nothing where there is nothing to choose from."""
    lines: dict[str, None] = {}
    for module in graph_modules(gm):
        for node in module.graph.nodes:
            if node.target is not torch.ops.sta.attention.default:
                continue
            request = request_of(node)
            with without_fake_mode(), torch.no_grad():
                tuned = tune(request, version, measure)
            if tuned is None:
                continue
            spec = replace(AttentionSpec.parse(str(node.args[SPEC])), choice=tuned.choice)
            node.update_arg(SPEC, spec.text())
            assert request.geometry is not None
            grid = "x".join(map(str, request.geometry.tiling.grid))
            lines[f"measured on {grid} tokens: {tuned.text()}"] = None
        module.recompile()
    for line in lines:
        log.info("%s", line)
    return tuple(lines)
