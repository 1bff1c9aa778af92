"""Device code: NVFP4 as sta_compile.tiers.formats defines it, bit for bit, on any GPU and in Triton's interpreter."""

import triton
import triton.language as tl

from .quantize import inverse, to_e4m3

GROUP = tl.constexpr(16)


@triton.jit
def encode(x):
    """uint8 codes of float32 values, 8 where the sign is set. Nearest, ties to even, at most 6; a NaN becomes 0."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.uint8) + (size >= 0.75).to(tl.uint8) + (size > 1.25).to(tl.uint8)
    code += (size >= 1.75).to(tl.uint8) + (size > 2.5).to(tl.uint8) + (size >= 3.5).to(tl.uint8)
    code += (size > 5.0).to(tl.uint8)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8).to(tl.uint8)


@triton.jit
def encode_pairs(low, high):
    """As `encode` by the instruction of Blackwell; `high` goes to the upper bits. Only the code of a NaN is another one."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b8 a, b, c, d;
        cvt.rn.satfinite.e2m1x2.f32 a, $5, $1;
        cvt.rn.satfinite.e2m1x2.f32 b, $6, $2;
        cvt.rn.satfinite.e2m1x2.f32 c, $7, $3;
        cvt.rn.satfinite.e2m1x2.f32 d, $8, $4;
        mov.b32 $0, {a, b, c, d};
        }""",
        "=r,f,f,f,f,f,f,f,f",
        [low, high],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def decode(codes, scales, OUT: tl.constexpr):
    """[rows, columns] of codes uint8 [rows, columns / 2], the first of two in the lower bits, and scales e4m3 [rows,
    columns / 16]: exact in bfloat16 and float32.
    """
    ROWS: tl.constexpr = codes.shape[0]
    GROUPS: tl.constexpr = scales.shape[1]
    code = tl.reshape(tl.join(codes & 15, codes >> 4), [ROWS, GROUPS, GROUP]).to(tl.int32)
    size = code & 7
    twice = tl.where(size < 2, size, (2 | (size & 1)) << tl.maximum((size >> 1) - 1, 0))
    value = twice.to(tl.float32) * tl.where(code < 8, 0.5, -0.5)
    value *= scales.to(tl.float32)[:, :, None]
    return tl.reshape(value, [ROWS, GROUPS * GROUP]).to(OUT)


@triton.jit
def quantize_groups(x, scale, CONVERT: tl.constexpr):
    """(codes uint8 [rows, columns / 2], scales as bytes of e4m3 [rows, columns / 16]) of float32 x [rows, columns].

    scale: float32 [rows, 1] that the result is to be multiplied by. A NaN takes its group along. CONVERT: "fp4" by
    instructions of Blackwell, "fp8" without those to e2m1, "none" in Triton's interpreter.
    """
    ROWS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1] // GROUP
    groups = tl.reshape(x, [ROWS, GROUPS, GROUP])
    most = tl.max(tl.abs(groups), 2)
    lost = tl.max((groups != groups).to(tl.int32), 2)
    sixth = tl.div_rn(most, tl.full([ROWS, GROUPS], 6.0, tl.float32)) * inverse(scale)
    sixth = tl.where(lost != 0, float("nan"), sixth)
    scales = to_e4m3(sixth, CONVERT == "none")
    rounded = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    scaled = groups * inverse(rounded)[:, :, None]
    low, high = tl.split(tl.reshape(scaled, [ROWS, GROUPS * GROUP // 2, 2]))
    if CONVERT == "fp4":
        codes = encode_pairs(low, high)
    else:
        codes = encode(low) | (encode(high) << 4)
    return codes, scales
