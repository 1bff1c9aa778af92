"""Device code: q, k, v to e4m3 for the Hopper kernel, with the scales that it takes off again.

Three kernels in a row. `key_statistics` reads k and v once, a chunk of tokens in each program; `key_scales` adds the chunks
up in order, so that the result is the same in every run; `quantize` reads all three and writes. A scale takes the largest
magnitude to 448: of a row for q, of a head for k without its mean, of a head and channel for v. Rows of k are permuted in
each 16 and v is transposed, as the kernel multiplies them (cutlass_templates/sm90/key_bytes.cuh); what pads them to
multiples of 16 is zero. Keys that `shown` hides count nowhere and become zeros.

Strides of tokens, heads and samples come in units of UNIT = 8 elements, as in forward.py.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
LEAST_SCALE = tl.constexpr(2.0**-100)
STATISTICS = 4  # rows of [head_dim] of a chunk: sum, least and largest of k, largest magnitude of v


@triton.jit
def inverse(scale):
    """As sta_compile.tiers.formats: 0 for scales that have none."""
    return tl.where(
        scale < LEAST_SCALE, 0.0, tl.div_rn(1.0, tl.where(scale < LEAST_SCALE, 1.0, scale))
    )


@triton.jit
def to_e4m3(x, ROUND: tl.constexpr):
    """Bytes of e4m3, saturating as the hardware does. ROUND: in Triton's interpreter, which only cuts off."""
    if ROUND:
        size = tl.minimum(tl.abs(x), LARGEST)
        exponent = ((size.to(tl.int32, bitcast=True) >> 23) & 255) - 127
        step = ((tl.maximum(exponent, -6) - 3 + 127) << 23).to(tl.float32, bitcast=True)
        middle = step * 12582912.0  # 1.5 * 2^23: its neighbours are `step` apart
        rounded = ((size + middle) - middle).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        sign = ((x.to(tl.int32, bitcast=True) >> 24) & 128).to(tl.uint8)
        return tl.where(x == x, rounded, 127) | sign
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def load_rows(base, tokens, stride, count, columns, shown, D: tl.constexpr):
    """float32 [tokens, columns]; zeros where there is none, or it is hidden. shown: None or of this sample."""
    inside = tokens < count
    if shown is not None:
        inside = inside & (tl.load(shown + tokens, mask=inside, other=0) != 0)
    mask = inside[:, None]
    if columns.shape[0] != D:
        mask = mask & (columns[None, :] < D)
    rows = tl.load(
        base + tokens.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0
    )
    return rows.to(tl.float32), inside


@triton.jit(
    do_not_specialize=[
        "kv_heads",
        "k_batch",
        "k_head",
        "k_token",
        "v_batch",
        "v_head",
        "v_token",
        "tokens",
        "chunks",
    ]
)
def key_statistics(
    k_ptr,
    v_ptr,
    shown_ptr,
    partial_ptr,
    kv_heads,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    tokens,
    chunks,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """partial: float32 [samples * heads, chunks, STATISTICS, D_PADDED]"""
    chunk, head = tl.program_id(0), tl.program_id(1)
    sample = head // kv_heads
    k_ptr += (sample.to(tl.int64) * k_batch + (head % kv_heads).to(tl.int64) * k_head) * UNIT
    v_ptr += (sample.to(tl.int64) * v_batch + (head % kv_heads).to(tl.int64) * v_head) * UNIT
    if shown_ptr is not None:
        shown_ptr += sample.to(tl.int64) * tokens
    columns = tl.arange(0, D_PADDED)
    total = tl.zeros([BLOCK, D_PADDED], tl.float32)
    least = tl.full([BLOCK, D_PADDED], float("inf"), tl.float32)
    most = tl.full([BLOCK, D_PADDED], -float("inf"), tl.float32)
    size = tl.zeros([BLOCK, D_PADDED], tl.float32)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, tokens), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        k, inside = load_rows(k_ptr, rows, k_token * UNIT, tokens, columns, shown_ptr, D)
        v, _ = load_rows(v_ptr, rows, v_token * UNIT, tokens, columns, shown_ptr, D)
        total += k
        least = tl.minimum(least, tl.where(inside[:, None], k, float("inf")))
        most = tl.maximum(most, tl.where(inside[:, None], k, -float("inf")))
        size = tl.maximum(size, tl.abs(v))
    partial_ptr += (head * chunks + chunk).to(tl.int64) * (4 * D_PADDED) + columns
    tl.store(partial_ptr, tl.sum(total, 0))
    tl.store(partial_ptr + D_PADDED, tl.min(least, 0))
    tl.store(partial_ptr + 2 * D_PADDED, tl.max(most, 0))
    tl.store(partial_ptr + 3 * D_PADDED, tl.max(size, 0))


@triton.jit(do_not_specialize=["kv_heads", "tokens", "chunks"])
def key_scales(
    partial_ptr,
    count_ptr,
    mean_ptr,
    k_scale_ptr,
    v_scale_ptr,
    kv_heads,
    tokens,
    chunks,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    K_LARGEST: tl.constexpr,
):
    """mean: float32 [samples * heads, D_PADDED]. count: keys of each sample that are shown, None for all.

    K_LARGEST: what k's largest magnitude becomes.
    """
    head = tl.program_id(0)
    columns = tl.arange(0, D_PADDED)
    total = tl.zeros([BLOCK, D_PADDED], tl.float32)
    least = tl.full([BLOCK, D_PADDED], float("inf"), tl.float32)
    most = tl.full([BLOCK, D_PADDED], -float("inf"), tl.float32)
    size = tl.zeros([BLOCK, D_PADDED], tl.float32)
    for start in range(0, chunks, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        at = (
            partial_ptr
            + (head * chunks + rows).to(tl.int64)[:, None] * (4 * D_PADDED)
            + columns[None, :]
        )
        inside = (rows < chunks)[:, None]
        total += tl.load(at, mask=inside, other=0.0)
        least = tl.minimum(least, tl.load(at + D_PADDED, mask=inside, other=float("inf")))
        most = tl.maximum(most, tl.load(at + 2 * D_PADDED, mask=inside, other=-float("inf")))
        size = tl.maximum(size, tl.load(at + 3 * D_PADDED, mask=inside, other=0.0))
    count = tokens
    if count_ptr is not None:
        count = tl.load(count_ptr + head // kv_heads)
    mean = tl.div_rn(
        tl.sum(total, 0), tl.maximum(count, 1).to(tl.float32) + tl.zeros([D_PADDED], tl.float32)
    )
    # Rounding keeps order: what is largest before the mean is taken off is largest after it.
    span = tl.maximum(tl.max(most, 0) - mean, mean - tl.min(least, 0))
    largest = tl.max(tl.where((columns < D) & (count > 0), span, 0.0), 0)
    tl.store(mean_ptr + head * D_PADDED + columns, mean)
    tl.store(k_scale_ptr + head, tl.div_rn(largest, K_LARGEST))
    of_v = tl.div_rn(tl.max(size, 0), LARGEST + tl.zeros([D_PADDED], tl.float32))
    tl.store(v_scale_ptr + head * D + columns, of_v, mask=columns < D)


@triton.jit
def store_rows(base, at, inside, rows, columns, D: tl.constexpr):
    mask = inside[:, None]
    if columns.shape[0] != D:
        mask = mask & (columns[None, :] < D)
    tl.store(base + at[:, None] * D + columns[None, :], rows, mask=mask)


@triton.jit
def quantize_queries(
    q_ptr,
    stride,
    mean,
    q8_ptr,
    q_scale_ptr,
    shift_ptr,
    scale,
    rows,
    count,
    before,
    columns,
    D: tl.constexpr,
    ROUND: tl.constexpr,
):
    """before: rows of the heads before this one."""
    q, inside = load_rows(q_ptr, rows, stride, count, columns, None, D)
    size = tl.div_rn(tl.max(tl.abs(q), 1), LARGEST + tl.zeros([rows.shape[0]], tl.float32))
    at = before + rows
    tl.store(shift_ptr + at, tl.sum(q * mean[None, :], 1) * scale, mask=inside)
    tl.store(q_scale_ptr + at, size, mask=inside)
    store_rows(q8_ptr, at, inside, to_e4m3(q * inverse(size)[:, None], ROUND), columns, D)


@triton.jit
def token_of(rows, place, sources_ptr, sixteens, count):
    """The token at a place of the sixteen that each row is in; `count`, which is none, where it has fewer."""
    sixteen = rows >> 4
    if sources_ptr is None:
        return sixteen * 16 + place
    else:  # an early return would leave the rest to be compiled
        there = sixteen < sixteens
        first = tl.load(sources_ptr + 2 * sixteen, mask=there, other=0)
        number = tl.load(sources_ptr + 2 * sixteen + 1, mask=there, other=0)
        return tl.where(place < number, first + place, count)


@triton.jit
def quantize_keys(
    k_ptr,
    stride,
    mean,
    size,
    shown_ptr,
    sources_ptr,
    k8_ptr,
    rows,
    count,
    before,
    padded,
    columns,
    D: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Row 8n + 2t + i of each 16 is key 4t + 2n + i. before, padded: rows of k8 before this head, and of it."""
    place = (rows >> 1 & 3) * 4 + (rows >> 3 & 1) * 2 + (rows & 1)
    keys = token_of(rows, place, sources_ptr, padded >> 4, count)
    k, shown = load_rows(k_ptr, keys, stride, count, columns, shown_ptr, D)
    k = tl.where(shown[:, None], k - mean[None, :], 0.0)
    store_rows(k8_ptr, before + rows, rows < padded, to_e4m3(k * inverse(size), ROUND), columns, D)


@triton.jit
def quantize_values(
    v_ptr,
    stride,
    size,
    shown_ptr,
    sources_ptr,
    v8_ptr,
    padded,
    rows,
    count,
    columns,
    D: tl.constexpr,
    ROUND: tl.constexpr,
):
    values = token_of(rows, rows & 15, sources_ptr, padded >> 4, count)
    v, _ = load_rows(v_ptr, values, stride, count, columns, shown_ptr, D)
    v8 = tl.trans(to_e4m3(v * inverse(size)[None, :], ROUND))
    at = v8_ptr + columns.to(tl.int64)[:, None] * padded + rows[None, :]
    tl.store(at, v8, mask=(columns < D)[:, None] & (rows < padded)[None, :])


INTEGERS = (
    "heads kv_heads q_batch q_head q_token k_batch k_head k_token v_batch v_head v_token queries tokens sixteens "
    "query_blocks key_blocks samples"
).split()


@triton.jit(do_not_specialize=INTEGERS)
def quantize(
    q_ptr,
    k_ptr,
    v_ptr,
    shown_ptr,
    sources_ptr,
    mean_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q8_ptr,
    k8_ptr,
    v8_ptr,
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
    ROUND: tl.constexpr,
):
    """Programs: blocks of BLOCK queries, then of KEYS keys and of KEYS values. sixteens: of k8's rows and v8's columns.

    sources: int32 [sixteens, 2], (first token, how many) of each sixteen; None where they follow each other.
    """
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
            q8_ptr,
            q_scale_ptr,
            shift_ptr,
            scale,
            program % query_blocks * BLOCK + tl.arange(0, BLOCK),
            queries,
            head.to(tl.int64) * queries,
            columns,
            D,
            ROUND,
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
                sources_ptr,
                k8_ptr,
                rows,
                tokens,
                head.to(tl.int64) * (sixteens * 16),
                sixteens * 16,
                columns,
                D,
                ROUND,
            )
        else:
            of_columns = tl.load(v_scale_ptr + head * D + columns, mask=columns < D, other=0.0)
            columns_of_head = v8_ptr + head.to(tl.int64) * D * (sixteens * 16)
            quantize_values(
                v_ptr + (sample * v_batch + of_sample * v_head) * UNIT,
                v_token * UNIT,
                of_columns,
                shown_ptr,
                sources_ptr,
                columns_of_head,
                sixteens * 16,
                rows,
                tokens,
                columns,
                D,
                ROUND,
            )
