"""Device code: what blocks of queries and of keys are known by where tiers are chosen (sta_compile/tiers/statistics.py).

A program of `query_statistics` has one row of queries of one head; one of `key_statistics` has a few key blocks of one head
and adds up their covariances of keys and values. Each reads its tokens once. Sums over a compact group of tokens are
products with a matrix of zeros and ones, on tensor cores. `runs` are (start, length) of blocks in tokens of the video,
`groups` the compact group of each of its tokens, `sizes` float32 [blocks, groups].

Strides of tokens, heads and samples come in units of UNIT = 8 elements, as in forward.py.
"""

import triton
import triton.language as tl

SHRINK = tl.constexpr(2.0**-8)  # squares of numbers below 4000 are finite in fp16


@triton.jit
def load_tokens(base, tokens, stride, end, columns, D: tl.constexpr):
    """[tokens, columns] as they are, zeros from `end` on; and which of them there are"""
    inside = tokens < end
    mask = inside[:, None]
    if columns.shape[0] != D:
        mask = mask & (columns[None, :] < D)
    at = tokens.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(base + at, mask=mask, other=0.0), inside


@triton.jit
def members(groups_ptr, tokens, inside, GROUPS: tl.constexpr):
    """bool [GROUPS, tokens]: is a token of a group?"""
    group = tl.load(groups_ptr + tokens, mask=inside, other=255).to(tl.int32)
    return tl.arange(0, GROUPS)[:, None] == group[None, :]


@triton.jit
def size_of(x):
    x = x.to(tl.float32)
    return tl.sum(tl.sum(x * x, 1), 0)


@triton.jit(
    do_not_specialize=["heads", "batch_stride", "head_stride", "token_stride", "first", "rows"]
)
def query_statistics(
    q_ptr,
    runs_ptr,
    groups_ptr,
    sizes_ptr,
    means_ptr,
    spread_ptr,
    size_ptr,
    heads,
    batch_stride,
    head_stride,
    token_stride,
    first,
    rows,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
):
    """first: the video's first query. PADDED: GROUPS, at least 16. LENGTH: of the longest row. means, spread:
    [samples * heads, GROUPS, rows, D]. size: float32 [samples * heads, rows]."""
    row, head = tl.program_id(0), tl.program_id(1)
    sample = (head // heads).to(tl.int64)
    q_ptr += (sample * batch_stride + (head % heads).to(tl.int64) * head_stride) * UNIT
    q_ptr += first.to(tl.int64) * token_stride * UNIT
    start = tl.load(runs_ptr + 2 * row)
    end = start + tl.load(runs_ptr + 2 * row + 1)
    columns, group = tl.arange(0, D_PADDED), tl.arange(0, PADDED)
    means = tl.zeros([PADDED, D_PADDED], tl.float32)
    squares = tl.zeros([PADDED, D_PADDED], tl.float32)
    for at in tl.static_range(0, LENGTH, BLOCK):
        tokens = start + at + tl.arange(0, BLOCK)
        x, inside = load_tokens(q_ptr, tokens, token_stride * UNIT, end, columns, D)
        of_group = members(groups_ptr, tokens, inside, PADDED).to(x.dtype)
        means = tl.dot(of_group, x, means)
        square = x.to(tl.float32)
        square = (square * square * SHRINK).to(x.dtype)
        squares = tl.dot(of_group, square, squares)
    length = tl.sum(tl.sum(squares, 1), 0) / SHRINK
    count = tl.load(sizes_ptr + row * GROUPS + group, mask=group < GROUPS, other=0.0)
    inverse = (1.0 / tl.maximum(count, 1.0))[:, None]
    means *= inverse
    spread = tl.maximum(squares * (inverse / SHRINK) - means * means, 0.0)
    at = ((head * GROUPS + group).to(tl.int64) * rows + row)[:, None] * D + columns[None, :]
    mask = (group < GROUPS)[:, None] & (columns < D)[None, :]
    tl.store(means_ptr + at, means, mask=mask)
    tl.store(spread_ptr + at, spread, mask=mask)
    tl.store(size_ptr + (head * rows + row).to(tl.int64), length / tl.maximum(end - start, 1))


INTEGERS = "kv_heads k_batch k_head k_token v_batch v_head v_token first blocks chunks".split()


@triton.jit(do_not_specialize=INTEGERS)
def key_statistics(
    k_ptr,
    v_ptr,
    runs_ptr,
    groups_ptr,
    mean_k_ptr,
    mean_v_ptr,
    offsets_ptr,
    parts_ptr,
    numbers_ptr,
    cross_ptr,
    kv_heads,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    first,
    blocks,
    chunks,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    LENGTH: tl.constexpr,
    COMPACT: tl.constexpr,
    STAND_OUT: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
):
    """mean_k, mean_v: [samples * heads, blocks, D]. offsets: [samples * heads, groups, blocks, D]; groups are COMPACT ones
    and STAND_OUT keys. parts: float32 [samples * heads, groups, blocks], their shares of a block's keys. numbers: float32
    [4, samples * heads, blocks], total, rest, spread_v, between_v. cross: float32 [samples * heads, chunks, D_PADDED,
    D_PADDED], sums over the keys of CHUNK blocks. LENGTH: a power of two that no block is longer than."""
    GROUPS: tl.constexpr = COMPACT + STAND_OUT
    chunk, head = tl.program_id(0), tl.program_id(1)
    sample, of_sample = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    k_ptr += (sample * k_batch + of_sample * k_head + first.to(tl.int64) * k_token) * UNIT
    v_ptr += (sample * v_batch + of_sample * v_head + first.to(tl.int64) * v_token) * UNIT
    columns, group = tl.arange(0, D_PADDED), tl.arange(0, PADDED)
    cross = tl.zeros([D_PADDED, D_PADDED], tl.float32)
    every = tl.num_programs(1).to(tl.int64) * blocks
    mask = (group < GROUPS)[:, None] & (columns < D)[None, :]
    for block in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, blocks)):
        start = tl.load(runs_ptr + 2 * block)
        count = tl.load(runs_ptr + 2 * block + 1)
        token = tl.arange(0, LENGTH)
        k, inside = load_tokens(k_ptr, start + token, k_token * UNIT, start + count, columns, D)
        v, _ = load_tokens(v_ptr, start + token, v_token * UNIT, start + count, columns, D)
        of_token = tl.load(groups_ptr + start + token, mask=inside, other=255).to(tl.int32)
        n = tl.maximum(count, 1).to(tl.float32)
        all_of_block = ((group == 0)[:, None] & inside[None, :]).to(k.dtype)
        mean_k = tl.sum(tl.dot(all_of_block, k), 0) / n
        mean_v = tl.sum(tl.dot(all_of_block, v), 0) / n
        cross = tl.dot(tl.trans(k), v, cross)
        cross -= (n * mean_k)[:, None] * mean_v[None, :]
        apart = k.to(tl.float32) - mean_k[None, :]
        far = tl.where(inside, tl.sum(apart * apart, 1), -1.0)
        total = tl.sum(tl.maximum(far, 0.0), 0) / n
        for index in tl.static_range(STAND_OUT):
            here = (token == tl.argmax(far, 0)) & (far >= 0.0)
            of_token = tl.where(here, COMPACT + index, of_token)
            far = tl.where(here, -1.0, far)
        of_group = group[:, None] == of_token[None, :]
        size = tl.sum(of_group.to(tl.float32), 1)
        inverse = (1.0 / tl.maximum(size, 1.0))[:, None]
        there = (size > 0)[:, None]
        offsets = tl.dot(of_group.to(k.dtype), k) * inverse - mean_k[None, :]
        offsets = tl.where(there, offsets, 0.0)
        between = tl.dot(of_group.to(v.dtype), v) * inverse - mean_v[None, :]
        between = tl.where(there, between, 0.0)
        spread_v = tl.maximum(size_of(v) / n - tl.sum(mean_v * mean_v, 0), 0.0)
        between_k = tl.sum(tl.sum(offsets * offsets, 1) * size, 0) / n
        between_v = tl.sum(tl.sum(between * between, 1) * size, 0) / n
        place = (head * blocks + block).to(tl.int64)
        tl.store(mean_k_ptr + place * D + columns, mean_k, mask=columns < D)
        tl.store(mean_v_ptr + place * D + columns, mean_v, mask=columns < D)
        at = (head * GROUPS + group).to(tl.int64) * blocks + block
        tl.store(offsets_ptr + at[:, None] * D + columns[None, :], offsets, mask=mask)
        tl.store(parts_ptr + at, size / n, mask=group < GROUPS)
        numbers = numbers_ptr + place
        tl.store(numbers, total)
        tl.store(numbers + every, tl.maximum(total - between_k, 0.0))
        tl.store(numbers + 2 * every, spread_v)
        tl.store(numbers + 3 * every, tl.minimum(between_v, spread_v))
    square = tl.arange(0, D_PADDED)[:, None] * D_PADDED + columns[None, :]
    cross_ptr += (head * chunks + chunk).to(tl.int64) * (D_PADDED * D_PADDED)
    tl.store(cross_ptr + square, cross)
