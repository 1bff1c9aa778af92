"""Which code has led to this compile: what Dynamo made, or a model's own, of which no graph sees what it does to tensors.

Private torch APIs, tested on 2.11 and 2.13: the names of what Dynamo's code calls (`__compiled_fn_...`, `__resume_at_...`).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_OF_DYNAMO = ("__compiled_fn_", "__resume_at_")
_LIBRARIES = ("torch", "sta_compile", "contextlib", "functools")


def called_from_python(model: torch.nn.Module) -> bool:
    """Is a part of `model` compiled that code of the model calls which Dynamo has given up?"""
    frame: Any = sys._getframe(1)
    call = torch.nn.Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is call and frame.f_locals.get("self") is model:
            return False
        library = frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES
        if not library and not any(n.startswith(_OF_DYNAMO) for n in frame.f_code.co_names):
            return True
        frame = frame.f_back
    return True
