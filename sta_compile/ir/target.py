"""The device that a kernel is made for, as a value: no torch, so that plans can name any GPU."""

from __future__ import annotations

from dataclasses import dataclass

# Shared memory in bytes that one block may use, by compute capability: what the driver reports as
# the opt-in maximum. Others get the smallest of these.
SHARED_MEMORY = {
    80: 166_912,
    86: 101_376,
    87: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    110: 232_448,
    120: 101_376,
    121: 101_376,
}

# Name, and the first and last compute capability that has it.
FEATURES = (
    ("mma", 80, 999),
    ("cp.async", 80, 999),
    ("fp8", 89, 999),
    ("tma", 90, 999),
    ("wgmma", 90, 90),
    ("setmaxnreg", 90, 999),
    ("tcgen05", 100, 110),
    ("fp4", 100, 999),
)


@dataclass(frozen=True)
class Target:
    """kind: "cuda" (NVIDIA only), "hip", "xpu", "mps", "cpu", ...; the rest is for kind "cuda".

    capability: 10 * major + minor, 90 for Hopper. sm_count, l2_cache (bytes): 0 for a GPU that is not there.
    shared_memory: bytes that one block may use. unsupported: why nothing is sped up, or "".
    """

    kind: str
    capability: int = 0
    sm_count: int = 0
    shared_memory: int = 0
    name: str = ""
    unsupported: str = ""
    l2_cache: int = 0

    @property
    def features(self) -> tuple[str, ...]:
        """Instructions that kernels are chosen by: matrix products, and the unit that loads boxes of a tensor."""
        found = [name for name, first, last in FEATURES if first <= self.capability <= last]
        return tuple(found)

    @staticmethod
    def cuda(
        capability: int,
        sm_count: int = 0,
        name: str = "",
        shared_memory: int = 0,
        l2_cache: int = 0,
    ) -> Target:
        """An NVIDIA GPU by capability; nothing needs to be plugged in."""
        old = capability < 80
        return Target(
            "cuda",
            capability,
            sm_count,
            shared_memory or SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values())),
            name or f"sm_{capability}",
            f"compute capability {capability / 10} is older than 8.0 (Ampere)" if old else "",
            l2_cache,
        )
