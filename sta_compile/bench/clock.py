"""The clock of a GPU's multiprocessors, from NVIDIA's management library. Only read, never set."""

from __future__ import annotations

import ctypes

import torch

_OF_MULTIPROCESSORS = 1  # NVML_CLOCK_SM


class Clock:
    """Of one device."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    def megahertz(self) -> list[float]:
        """One number, or none if the driver has no answer."""
        value = ctypes.c_uint()
        failed = self._library.nvmlDeviceGetClockInfo(
            self._handle, _OF_MULTIPROCESSORS, ctypes.byref(value)
        )
        return [] if failed else [float(value.value)]


def clock_of(device: torch.device) -> Clock | None:
    """None where the library, or the device in it, can't be found."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(
        name.encode(), ctypes.byref(handle)
    ):
        return None
    return Clock(library, handle)
