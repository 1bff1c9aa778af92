"""The `sta` operator library: one handle that every registration goes through.

Schemas are defined here by hand, so that lengths can be symbolic (`SymInt[]`). Inputs keep the
strides that the fake kernels saw: kernels read any strides, so inductor has no reason to copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.autograd import Info, make_autograd_impl

LIBRARY = torch.library.Library("sta", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def define(schema: str) -> None:
    LIBRARY.define(schema, tags=TAGS)


def register_autograd(
    name: str,
    backward: Callable[..., Any],
    setup_context: Callable[..., Any],
    kernel: Callable[..., Any],
    recorded: Callable[..., tuple[Any, ...]],
) -> None:
    """`torch.library.register_autograd`, but where no gradient is asked for `kernel` runs at once.

    PyTorch's autograd kernel of an operator dispatches a second time, from Python, which costs more host time than the
    rest of a call. A second dispatch is of use only if something else than the device's own kernel would answer it: a
    mode, a subclass, a function transform, a lazy negation. The keys that are left say whether there is.

    recorded: the arguments that a call gets where gradients are recorded.
    """
    op = getattr(torch.ops.sta, name).default
    recording = make_autograd_impl(op, Info(backward, setup_context))
    below = torch._C._after_autograd_keyset.remove(torch._C.DispatchKey.ADInplaceOrView)
    devices = torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CPU
    # By the bits of a set of keys, of which a process sees few: comparing keys takes longer than finding them.
    answered: dict[int, bool] = {}

    def autograd(keyset: Any, *arguments: Any) -> Any:
        bits = keyset.raw_repr()
        by_kernel = answered.get(bits)
        if by_kernel is None:
            by_kernel = answered[bits] = (keyset & below).highestPriorityTypeId() in devices
        asked = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if by_kernel and not asked:
            return kernel(*arguments)
        return recording(keyset, *(recorded(*arguments) if asked else arguments))

    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
