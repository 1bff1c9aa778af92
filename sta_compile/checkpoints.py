"""Blocks that a checkpoint runs while no graph holds it: they stay exact, and a report says so.

Where a graph holds the checkpoint, what it computes anew in the backward pass is the same. Where Python runs it, as behind a
graph break, it calls the block again after the call of the model, when nothing that was compiled for it runs any more. With
a window in the forward pass only, gradients would be of another function. Checkpoints are torch.utils.checkpoint, and any
autograd.Function that runs blocks: its backward pass is the model's own.

What a checkpoint calls again as it is compiled, such as a block that is compiled by itself, has its window both times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any, TypeVar

import torch._dynamo.eval_frame
import torch.utils.checkpoint
from torch import nn

from .model_call import current
from .report import RefusedSite, Report

REASON = (
    "its block is run by torch.utils.checkpoint or an autograd.Function outside of any graph, and would be computed anew "
    "without a window in the backward pass"
)
HINT = (
    "move what breaks the graph out of the loop over the blocks (TORCH_LOGS=graph_breaks names it), so that the graph holds "
    "the checkpoint; or train without gradient checkpointing"
)
# By identity: a code object with a dict among its constants has no hash, as Dynamo's resume functions can have.
_entries: dict[int, CodeType] = {}
T = TypeVar("T", bound=Callable[..., Any])


def entry(call: T) -> T:
    """Decorates the function that runs a compiled model: a checkpoint around all of it calls it again."""
    _entries[id(call.__code__)] = call.__code__
    return call


def computed_anew() -> bool:
    """Does a checkpoint in Python run the caller, and may it run it again without what is compiled now?

    So it is in a model's call with gradients. A model that `torch.compile` compiled does not say whether it has any: they
    are off in the forward of every autograd.Function.
    """
    call = current()
    if call is not None and not call.may_train:
        return False
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        checkpoint = code.co_filename == torch.utils.checkpoint.__file__
        if checkpoint or _is_of_function(code):
            return True
        if id(code) in _entries or (call is None and _is_compiled_call(code)):
            return False
        frame = frame.f_back
    return False


_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


def _is_of_function(code: CodeType) -> bool:
    """Does a torch.autograd.Function run it? From torch 2.14 on its `apply` has no frame, so its `forward` is looked for,
    which Dynamo may have compiled."""
    if _APPLY is not None or "forward" not in code.co_name:
        return code is _APPLY
    left = [torch.autograd.Function]
    while left:
        function = left.pop()
        own = getattr(function.forward, "__code__", None)
        if own is not None and _place(own) == _place(code):
            return True
        left += function.__subclasses__()
    return False


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_filename, code.co_firstlineno


def _is_compiled_call(code: CodeType) -> bool:
    """Of what torch.compile returns?"""
    file = torch._dynamo.eval_frame.__file__
    return code.co_name == "compile_wrapper" and code.co_filename == file


def report_of(model: nn.Module, blocks: Collection[nn.Module]) -> Report:
    """That these blocks of a model stay as they are."""
    names = [name for name, module in model.named_modules() if module in blocks]
    refused = [RefusedSite(name, REASON, HINT, grid_known=False) for name in names]
    return Report(type(model).__name__, refused=refused, reason=REASON, hint=HINT)
