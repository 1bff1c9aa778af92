"""Runs Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from ..ir.tiling import Tiling
from ..ir.trade import EXACT, Trade
from ..ir.window import Window
from .quantize_nvfp4 import conversion, empty_nvfp4, quantized_nvfp4, warm_up_nvfp4
from .runner import Start
from .tensors import Nvfp4Tensors, Tensors, stand_ins
from .triton_bind import bind


class TritonRunner:
    def compile(self, spec: KernelSpec) -> object:
        from ..codegen.triton.build import cross_compile

        return cross_compile(spec)

    def build(self, spec: KernelSpec, device: int) -> Any:
        """Triton's own compiled kernel. Triton keeps binaries on disk by itself."""
        from ..codegen.triton import build, forward

        tensors = stand_ins(spec)
        one = (1, 1, 1)
        lengths = 16, *(16,) * spec.contexts
        roles = ("video", *("context",) * spec.contexts)
        tiling, window = Tiling((1, 1, 16), one), Window(one)
        geometry = Geometry(lengths, roles, tiling, window, (window,) * spec.head_windows)
        given: Tensors | Nvfp4Tensors = tensors
        if spec.precision == "nvfp4":
            given = empty_nvfp4(tensors)
            warm_up_nvfp4(spec, device)
        values = bind(spec, given, geometry, 1.0).arguments(given)
        constants, options = build.constants(spec).values(), build.options(spec)
        with torch.cuda.device(device):
            compiled = forward.attention_forward.warmup(*values, *constants, grid=(1,), **options)
            compiled._init_handles()
        return compiled

    def bind(
        self,
        spec: KernelSpec,
        binary: Any,
        tensors: Tensors,
        geometry: Geometry,
        scale: float,
        trade: Trade = EXACT,
    ) -> Start:
        from ..codegen.triton.build import constants

        low, convert = spec.precision == "nvfp4", conversion(spec.arch)
        binding = bind(spec, empty_nvfp4(tensors, "meta") if low else tensors, geometry, scale)
        start, fixed = binary[(binding.programs, 1, 1)], tuple(constants(spec).values())

        def launch(tensors: Tensors) -> None:
            given = quantized_nvfp4(tensors, geometry, scale, convert) if low else tensors
            start(*binding.arguments(given), *fixed)

        return launch
