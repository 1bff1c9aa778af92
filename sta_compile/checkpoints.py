"""Blocks that are run by `torch.utils.checkpoint` while no graph is: they stay exact, and a report says so.

Where a graph holds the checkpoint, what it computes anew in the backward pass is the same. Where a graph break has put it
into Python it calls the block again after the call of the model, when nothing is known of that any more: with a window in
the forward pass only, gradients would be of another function.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch.utils.checkpoint
from torch import nn

from .report import RefusedSite, Report

_REASON = (
    "its block is run by torch.utils.checkpoint outside of any graph, and would be computed anew without a window in the "
    "backward pass"
)
_HINT = (
    "move what breaks the graph out of the loop over the blocks (TORCH_LOGS=graph_breaks names it), so that the graph holds "
    "the checkpoint; or train without gradient checkpointing"
)


def in_checkpoint() -> bool:
    """Does torch.utils.checkpoint run the caller, in Python?"""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def report_of(model: nn.Module, blocks: Collection[nn.Module]) -> Report:
    """That these blocks of a model stay as they are."""
    names = [name for name, module in model.named_modules() if module in blocks]
    refused = [RefusedSite(name, _REASON, _HINT, grid_known=False) for name in names]
    return Report(type(model).__name__, refused=refused, reason=_REASON, hint=_HINT)
