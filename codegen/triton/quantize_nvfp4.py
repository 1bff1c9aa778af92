"""Device code: q and k to NVFP4 and v to e4m3, for kernels that multiply in FP4 (quantized.py).

`key_statistics` and `key_scales` of quantize.py come before it. Rows of q and k are padded with zeros to D_PADDED channels,
so that they are whole groups of 16 and boxes of TMA; their float32 scale takes the largest magnitude of a row of q, or of a
head of k without its mean, to 6 * 448. v is transposed, and a scale of a channel takes its largest magnitude to 448. Keys
that `shown` hides become zeros.
"""

import triton
import triton.language as tl

from .e2m1 import quantize_groups
from .quantize import load_rows, quantize_values

LARGEST = 6.0 * 448.0
FULL = tl.constexpr(LARGEST)


@triton.jit
def store_groups(
    codes_ptr, scales_ptr, at, inside, x, scale, D: tl.constexpr, CONVERT: tl.constexpr
):
    """at: int64 [rows] of x [rows, D]. scale: as `quantize_groups`."""
    codes, scales = quantize_groups(x, scale, CONVERT)
    half, groups = tl.arange(0, D // 2), tl.arange(0, D // 16)
    mask = inside[:, None]
    tl.store(codes_ptr + at[:, None] * (D // 2) + half[None, :], codes, mask=mask)
    tl.store(scales_ptr + at[:, None] * (D // 16) + groups[None, :], scales, mask=mask)


@triton.jit
def quantize_queries(
    q_ptr,
    stride,
    mean,
    q4_ptr,
    q_scales_ptr,
    q_scale_ptr,
    shift_ptr,
    scale,
    rows,
    count,
    before,
    columns,
    D: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """before: rows of the heads before this one."""
    q, inside = load_rows(q_ptr, rows, stride, count, columns, None, D)
    size = tl.div_rn(tl.max(tl.abs(q), 1), FULL + tl.zeros([rows.shape[0]], tl.float32))
    at = before + rows
    tl.store(shift_ptr + at, tl.sum(q * mean[None, :], 1) * scale, mask=inside)
    tl.store(q_scale_ptr + at, size, mask=inside)
    store_groups(q4_ptr, q_scales_ptr, at, inside, q, size[:, None], columns.shape[0], CONVERT)


@triton.jit
def quantize_keys(
    k_ptr,
    stride,
    mean,
    size,
    shown_ptr,
    k4_ptr,
    k_scales_ptr,
    rows,
    count,
    before,
    columns,
    D: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """before: as `quantize_queries`."""
    k, shown = load_rows(k_ptr, rows, stride, count, columns, shown_ptr, D)
    k = tl.where(shown[:, None], k - mean[None, :], 0.0)
    sizes = size + tl.zeros([rows.shape[0], 1], tl.float32)
    at = before + rows
    store_groups(k4_ptr, k_scales_ptr, at, rows < count, k, sizes, columns.shape[0], CONVERT)


INTEGERS = (
    "heads kv_heads q_batch q_head q_token k_batch k_head k_token v_batch v_head v_token queries tokens sixteens "
    "query_blocks key_blocks samples"
).split()


@triton.jit(do_not_specialize=INTEGERS)
def quantize_nvfp4(
    q_ptr,
    k_ptr,
    v_ptr,
    shown_ptr,
    mean_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q4_ptr,
    k4_ptr,
    v8_ptr,
    q_scales_ptr,
    k_scales_ptr,
    q_scale_ptr,
    shift_ptr,
    scale,
    heads,
    kv_heads,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    queries,
    tokens,
    sixteens,
    query_blocks,
    key_blocks,
    samples,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """Programs: blocks of BLOCK queries, then of KEYS keys and of KEYS values. sixteens: of v8's columns."""
    program = tl.program_id(0)
    columns = tl.arange(0, D_PADDED)
    of_queries, of_keys = samples * heads * query_blocks, samples * kv_heads * key_blocks
    if program < of_queries:
        head = program // query_blocks
        sample, of_sample = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
        mean = tl.load(
            mean_ptr + (sample * kv_heads + of_sample // (heads // kv_heads)) * D_PADDED + columns
        )
        quantize_queries(
            q_ptr + (sample * q_batch + of_sample * q_head) * UNIT,
            q_token * UNIT,
            mean,
            q4_ptr,
            q_scales_ptr,
            q_scale_ptr,
            shift_ptr,
            scale,
            program % query_blocks * BLOCK + tl.arange(0, BLOCK),
            queries,
            head.to(tl.int64) * queries,
            columns,
            D,
            CONVERT,
        )
    else:
        program -= of_queries
        is_key = program < of_keys
        program %= of_keys
        head = program // key_blocks
        sample, of_sample = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
        if shown_ptr is not None:
            shown_ptr += sample * tokens
        rows = program % key_blocks * KEYS + tl.arange(0, KEYS)
        if is_key:
            of_head = tl.load(mean_ptr + head * D_PADDED + columns)
            quantize_keys(
                k_ptr + (sample * k_batch + of_sample * k_head) * UNIT,
                k_token * UNIT,
                of_head,
                tl.load(k_scale_ptr + head),
                shown_ptr,
                k4_ptr,
                k_scales_ptr,
                rows,
                tokens,
                head.to(tl.int64) * tokens,
                columns,
                D,
                CONVERT,
            )
        else:
            of_columns = tl.load(v_scale_ptr + head * D + columns, mask=columns < D, other=0.0)
            quantize_values(
                v_ptr + (sample * v_batch + of_sample * v_head) * UNIT,
                v_token * UNIT,
                of_columns,
                shown_ptr,
                None,
                v8_ptr + head.to(tl.int64) * D * (sixteens * 16),
                sixteens * 16,
                rows,
                tokens,
                columns,
                D,
                CONVERT == "none",
            )
