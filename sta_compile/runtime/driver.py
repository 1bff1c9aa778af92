"""The CUDA driver, through NVIDIA's Python bindings."""

from __future__ import annotations

from typing import Any

import torch

INVALID_CONTEXT = 201


def make_context_current(device: int) -> None:
    """torch's context, in the calling thread. A thread that only launches may have none."""
    cu = driver()
    handle = checked(cu.cuDeviceGet(device))
    checked(cu.cuCtxSetCurrent(checked(cu.cuDevicePrimaryCtxRetain(handle))))


def current_stream(device: int) -> int:
    """Handle of torch's current stream. What generated code of inductor calls: torch.cuda.current_stream makes an object."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def current_device() -> int:
    """Of torch, which has been initialised: torch.cuda.current_device would make sure of that each time."""
    return int(torch._C._cuda_getDevice())


def driver() -> Any:
    from cuda.bindings import driver

    return driver


def checked(result: tuple[Any, ...]) -> Any:
    """The first value of an answer; RuntimeError with the driver's name of its error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"the CUDA driver says {error.name}")
    return values[0] if values else None
