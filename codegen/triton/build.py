"""From a KernelSpec to the kernel's compile-time arguments, and to a binary without a GPU.

`constants` is what a launch passes as tl.constexpr; `cross_compile` makes the same binary for any
NVIDIA architecture on any machine, which is how CI checks registers, shared memory and instructions.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...ir.kernel_spec import STRIDE_UNIT, KernelSpec
from .forward import attention_forward

POINTERS = ("q_ptr", "k_ptr", "v_ptr", "out_ptr")
DESCRIPTORS = ("q_desc", "k_desc", "v_desc")
VIDEO_MASK = ("video_mask_ptr", "shown_ptr")
GROUP_SCALES = ("q_scales_ptr", "k_scales_ptr")
SCALES = (*GROUP_SCALES, "q_scale_ptr", "k_scale_ptr", "v_scale_ptr", "shift_ptr")


def constants(spec: KernelSpec) -> dict[str, Any]:
    """The tl.constexpr arguments of `attention_forward`, in its order."""
    return {
        "D": spec.head_dim,
        "D_PADDED": spec.padded_head_dim,
        "BLOCK_M": spec.blocks.m,
        "BLOCK_N": spec.blocks.n,
        "CONTEXTS": spec.contexts,
        "UNIT": STRIDE_UNIT,
        "TMA": spec.loads == "tma",
        "PRECISION": precision(spec),
        "STAGES": spec.blocks.stages,
        # Keys that are gathered one by one: in NVFP4 they take more registers.
        "REST_N": min(spec.blocks.n, 32) if spec.precision == "nvfp4" else spec.blocks.n,
    }


def precision(spec: KernelSpec) -> str:
    """How products are taken: of numbers as they are, of NVFP4, or of what NVFP4 stands for on a GPU without it."""
    if spec.precision == "nvfp4":
        if spec.arch < 100:
            return "bf16"
        old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
        return "fp4_added" if old and spec.arch < 120 else "fp4"
    # Three TF32 products give fp32 accuracy; one would lose 13 bits.
    return "tf32x3" if spec.dtype == "fp32" else "tf32"


def options(spec: KernelSpec) -> dict[str, int]:
    return {
        "num_warps": spec.blocks.warps,
        "num_stages": spec.blocks.stages,
        "enable_fp_fusion": True,
    }


def cross_compile(spec: KernelSpec) -> Any:
    """The compiled kernel: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata.shared`. Needs no GPU."""
    fixed = constants(spec)
    dtype, name = spec.dtype, dict.fromkeys
    signature: dict[str, str] = name(attention_forward.arg_names, "i32")
    signature |= name(fixed, "constexpr") | name(POINTERS, f"*{dtype}")
    quantized = spec.precision == "nvfp4"
    if quantized:
        signature |= name(("q_ptr", "k_ptr"), "*u8") | name(("v_ptr", *GROUP_SCALES), "*fp8e4nv")
        signature |= name(SCALES[2:], "*fp32")
    signature |= {"lse_ptr": "*fp32", "scale": "fp32", "lengths_ptr": f"*{spec.lengths}"}
    signature |= name(("dense_ptr", "mask_ptr", *VIDEO_MASK), "*u8")
    signature["windows_ptr"] = "*i32"
    for which, (rows, columns), pointer in zip(DESCRIPTORS, spec.boxes, POINTERS, strict=False):
        signature[which] = f"tensordesc<{signature[pointer][1:]}[{rows},{columns}]>"
    absent = list(DESCRIPTORS[len(spec.boxes) :] if spec.loads == "tma" else DESCRIPTORS)
    absent += [] if spec.lengths else ["lengths_ptr"]
    absent += [] if spec.dense else ["dense_ptr"]
    absent += [] if spec.masked else ["mask_ptr"]
    absent += [] if spec.video_masked else list(VIDEO_MASK)
    absent += [] if spec.head_windows else ["windows_ptr"]
    absent += [] if quantized else list(SCALES)
    fixed |= dict.fromkeys(absent)
    signature |= name(absent, "constexpr")
    order = {argument: index for index, argument in enumerate(attention_forward.arg_names)}
    aligned = (*POINTERS, "lse_ptr", *(SCALES if quantized else ()))
    source = ASTSource(
        attention_forward,
        signature={argument: signature[argument] for argument in order},
        constexprs={(order[key],): value for key, value in fixed.items()},
        attrs={(order[key],): [["tt.divisibility", 16]] for key in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", spec.arch, 32), options=options(spec))
