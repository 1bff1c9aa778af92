"""Runs C++ kernels through the CUDA driver: load once for a device, then launch on torch's current stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..codegen.cutlass_blocks import shared_bytes
from ..codegen.cutlass_source import ENTRY
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from .build import build
from .cutlass_bind import Arguments, maps_of, may_be_dense, numbers, thread_blocks
from .driver import INVALID_CONTEXT, checked, driver, make_context_current
from .runner import Start
from .tensors import Tensors


@dataclass(frozen=True)
class Loaded:
    """function: the driver's handle. shared: dynamic shared memory of a block, in bytes."""

    function: Any
    shared: int
    device: int


class CutlassRunner:
    def compile(self, spec: KernelSpec) -> object:
        return build(spec)

    def build(self, spec: KernelSpec, device: int) -> Loaded:
        code = build(spec).code
        shared = shared_bytes(spec.head_dim, spec.blocks)
        cu = driver()
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with torch.cuda.device(device):
            make_context_current(device)
            module = checked(cu.cuModuleLoadData(code))
            function = checked(cu.cuModuleGetFunction(module, ENTRY.encode()))
            checked(cu.cuFuncSetAttribute(function, attribute, shared))
        return Loaded(function, shared, device)

    def bind(
        self, spec: KernelSpec, binary: Loaded, tensors: Tensors, geometry: Geometry, scale: float
    ) -> Start:
        batch, heads, _, _ = tensors.q.shape
        grid = batch * heads * sum(thread_blocks(spec, geometry, may_be_dense(tensors))), 1, 1
        arguments = Arguments(maps_of(spec, tensors), numbers(spec, tensors, geometry, scale))
        threads, launch = 32 * spec.blocks.warps, driver().cuLaunchKernel
        function, shared, device = binary.function, binary.shared, binary.device
        block = threads, 1, 1

        def start(tensors: Tensors) -> None:
            stream = torch.cuda.current_stream(device).cuda_stream
            given = arguments.of(tensors)
            (error,) = launch(function, *grid, *block, shared, stream, given.address, 0)
            if error == INVALID_CONTEXT:  # the first driver call of this thread
                make_context_current(device)
                (error,) = launch(function, *grid, *block, shared, stream, given.address, 0)
            if error:
                raise RuntimeError(f"cuLaunchKernel says {error.name}")

        return start
