"""Packages with a window of their own: NATTEN's neighbourhoods, and FastVideo's kernel for sliding tiles."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..inputs import Contestant, Inputs, differentiated
from .peer import missing, needs_gpu, neighbourhood


@dataclass(frozen=True)
class Natten:
    name: str = "natten"
    dense: bool = False

    def refuse(self, inputs: Inputs) -> str:
        if inputs.workload.text:
            return "it has no text tokens"
        return needs_gpu(inputs) or missing("natten", "natten")

    def prepare(self, inputs: Inputs) -> Contestant:
        from natten import na3d

        pattern = neighbourhood(inputs)
        grid = inputs.workload.grid
        q, k, v = (x.transpose(1, 2) for x in inputs.token_major)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            volumes = (x.transpose(1, 2).unflatten(1, grid) for x in (q, k, v))
            out: Tensor = na3d(*volumes, kernel_size=pattern.window, scale=inputs.scale)
            return out.flatten(1, 3).transpose(1, 2)

        if inputs.workload.backward:
            return differentiated(self.name, pattern, attention, (q, k, v), inputs.dout)
        return Contestant(
            self.name, pattern, lambda: attention(q, k, v), lambda: (attention(q, k, v),)
        )


@dataclass(frozen=True)
class FastVideo:
    """Its Hopper kernel is compiled for three grids, all in tiles of 6x8x8 tokens."""

    name: str = "fastvideo STA"
    dense: bool = False

    def refuse(self, inputs: Inputs) -> str:
        w = inputs.workload
        if w.text or w.backward or w.head_dim != 128:
            return "it is measured forward, without text, with heads of 128"
        grids = ((30, 48, 80), (36, 48, 48), (18, 48, 80))
        if w.grid not in grids or w.tiling.extents != (6, 8, 8):
            return "its grids are 30x48x80, 36x48x48 and 18x48x80 tokens in tiles of 6x8x8"
        return needs_gpu(inputs) or missing("fastvideo_kernel", "fastvideo-kernel")

    def prepare(self, inputs: Inputs) -> Contestant:
        from fastvideo_kernel import sliding_tile_attention

        w = inputs.workload
        q, k, v = inputs.head_major
        windows = [w.tile_window.effective(w.tiling)] * w.heads
        shape = "x".join(map(str, w.grid))

        def attention() -> Tensor:
            out: Tensor = sliding_tile_attention(q, k, v, windows, 0, False, shape)
            return out

        return Contestant(self.name, w.pattern, attention, lambda: (attention(),))
