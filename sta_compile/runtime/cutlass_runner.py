"""Runs C++ kernels through the CUDA driver: load once for a device, then launch on torch's current stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..codegen.cutlass_programs import program_of
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from ..ir.trade import EXACT, Trade
from .build import build
from .cutlass_backward_bind import bind_gradients
from .cutlass_bind import Binding, bind_forward, bind_fp8, bind_tiers
from .driver import INVALID_CONTEXT, checked, current_stream, driver, make_context_current
from .quantize import empty, quantized, warm_up
from .runner import Start
from .tensors import GradientTensors, Tensors
from .tiered import TierPlan, empty_tiered, plan_of, tiered, warm_up_tiers


@dataclass(frozen=True)
class Loaded:
    """functions: the driver's handles, by entry. shared: dynamic shared memory of a block, in bytes."""

    functions: dict[str, Any]
    shared: int
    device: int


class CutlassRunner:
    def compile(self, spec: KernelSpec) -> object:
        return build(spec)

    def build(self, spec: KernelSpec, device: int) -> Loaded:
        code, program = build(spec).code, program_of(spec)
        cu = driver()
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with torch.cuda.device(device):
            make_context_current(device)
            module = checked(cu.cuModuleLoadData(code))
            functions = {
                entry: checked(cu.cuModuleGetFunction(module, entry.encode()))
                for entry in program.entries
            }
            for function in functions.values():
                if program.shared:
                    checked(cu.cuFuncSetAttribute(function, attribute, program.shared))
            if spec.precision != "native":
                warm_up(spec, device)
            if spec.precision == "tiered":
                warm_up_tiers(spec, device)
        return Loaded(functions, program.shared, device)

    def bind(
        self,
        spec: KernelSpec,
        binary: Loaded,
        tensors: Tensors,
        geometry: Geometry,
        scale: float,
        trade: Trade = EXACT,
    ) -> Start:
        (function,) = binary.functions.values()
        if spec.precision == "tiered":
            plan = plan_of(spec, tensors, geometry)
            start = start_of_tiers(spec, binary, tensors, plan, scale)
            return lambda given: start(tiered(given, plan, scale, trade))
        if spec.precision == "fp8":
            binding = bind_fp8(spec, empty(tensors, device="meta"), geometry, scale)
            launch = _start(spec, binary, function, binding)
            return lambda given: launch(quantized(given, geometry, scale))
        return _start(spec, binary, function, bind_forward(spec, tensors, geometry, scale))

    def bind_gradients(
        self,
        spec: KernelSpec,
        binary: Loaded,
        entry: str,
        tensors: GradientTensors,
        geometry: Geometry,
        scale: float,
    ) -> Start:
        """entry: which kernel of the binary."""
        binding = bind_gradients(spec, entry, tensors, geometry, scale)
        return _start(spec, binary, binary.functions[entry], binding)


def start_of_tiers(
    spec: KernelSpec, binary: Loaded, tensors: Tensors, plan: TierPlan, scale: float
) -> Start:
    """Of the kernel alone: it takes TieredTensors."""
    (function,) = binary.functions.values()
    binding = bind_tiers(spec, empty_tiered(tensors, plan), plan.geometry, scale)
    return _start(spec, binary, function, binding)


def _start(spec: KernelSpec, binary: Loaded, function: Any, binding: Binding) -> Start:
    launch, device, arguments = driver().cuLaunchKernel, binary.device, binding.arguments
    how = binding.blocks, 1, 1, 32 * spec.blocks.warps, 1, 1, binary.shared

    def start(tensors: tuple[torch.Tensor | None, ...]) -> None:
        stream = current_stream(device)
        given = arguments.of(tensors)
        (error,) = launch(function, *how, stream, given.address, 0)
        if error == INVALID_CONTEXT:  # the first driver call of this thread
            make_context_current(device)
            (error,) = launch(function, *how, stream, given.address, 0)
        if error:
            raise RuntimeError(f"cuLaunchKernel says {error.name}")

    return start
