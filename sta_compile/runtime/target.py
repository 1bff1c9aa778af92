"""Which device is this, and what is it good for?

AMD GPUs call themselves "cuda" in torch and report capabilities such as (9, 5) that look like
NVIDIA's, so `torch.version.hip` decides before any capability is read.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import config
from ..errors import StaError
from ..ir.target import Target


def target(device: torch.device | str | None = None) -> Target:
    """What kernels are made for on a device; by default the GPU that the option `target` names, else the current device.

    `STA_TARGET=sm_90` examines and builds for a Hopper GPU on a machine that has none.
    """
    if device is not None:
        try:
            return detect(torch.device(device))
        except (RuntimeError, TypeError, AssertionError) as error:  # the last: torch without CUDA
            reason = str(error).partition("\n")[0]
            raise StaError(
                f"{device!r} is no device here ({reason}); pass 'cuda', 'cuda:0' or 'cpu', or set STA_TARGET=sm_90 for a "
                "GPU that is not there"
            ) from error
    if config.target != "auto":
        return _named(config.target)
    return detect(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def detect(device: torch.device) -> Target:
    """The target of a torch device; `.unsupported` says why it is not sped up. Tensors on meta are on the named target."""
    if device.type == "meta" and config.target != "auto":
        return _named(config.target)
    return _detect(device)


@lru_cache(maxsize=64)
def _named(architecture: str) -> Target:
    return Target.cuda(int(architecture.removeprefix("sm_")))


@lru_cache(maxsize=64)
def _detect(device: torch.device) -> Target:
    kind = device.type
    if kind == "cuda" and torch.version.hip:
        return Target("hip", name="AMD GPU", unsupported="AMD GPUs (HIP) are not supported yet")
    if kind == "cuda":
        p = torch.cuda.get_device_properties(device)
        return Target.cuda(
            10 * p.major + p.minor,
            p.multi_processor_count,
            p.name,
            getattr(p, "shared_memory_per_block_optin", 0),
            getattr(p, "L2_cache_size", 0),
        )
    return Target(kind, name=kind, unsupported=f"there are no kernels for {kind} devices yet")
