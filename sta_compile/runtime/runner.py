"""What every emitter's kernels have in common when they run: compile, build, bind, start.

A binary serves all calls of its KernelSpec. Binding fixes what calls of the same shapes and strides share, so that a
start only reads addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from ..ir.trade import EXACT, Trade
from .tensors import Tensors

# Launches on the current device and stream, on tensors like those it was bound with; may be called from several threads.
Start = Callable[[Any], None]


class Runner(Protocol):
    """Any of these may raise whatever went wrong: another emitter's kernel then takes over."""

    def compile(self, spec: KernelSpec) -> object:
        """Compiles for the spec's architecture; needs no GPU. What has a cache on disk is kept there."""

    def build(self, spec: KernelSpec, device: int) -> Any:
        """Compiles, or finds compiled, and loads; launches nothing. The result is what `bind` takes."""

    def bind(
        self,
        spec: KernelSpec,
        binary: Any,
        tensors: Tensors,
        geometry: Geometry,
        scale: float,
        trade: Trade = EXACT,
    ) -> Start:
        """The tensors are read for their shapes and strides only. trade: of kernels with tiers."""


def runner_of(emitter: str) -> Runner:
    """By KernelSpec.emitter."""
    if emitter == "cutlass":
        from .cutlass_runner import CutlassRunner

        return CutlassRunner()
    from .triton_runner import TritonRunner

    return TritonRunner()
