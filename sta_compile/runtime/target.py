"""Which device is this, and what is it good for?

AMD GPUs call themselves "cuda" in torch and report capabilities such as (9, 5) that look like
NVIDIA's, so `torch.version.hip` decides before any capability is read.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..ir.target import Target


@lru_cache(maxsize=64)
def detect(device: torch.device) -> Target:
    """The target of a torch device; `.unsupported` says why it is not sped up."""
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
        )
    return Target(kind, name=kind, unsupported=f"there are no kernels for {kind} devices yet")
