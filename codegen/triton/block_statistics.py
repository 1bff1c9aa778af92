"""Device code: what blocks of queries and of keys are known by where tiers are chosen (sta_compile/tiers/statistics.py).

A program of `query_statistics` has one row of queries of one head; one of `key_statistics` has a few key blocks of one head
and adds up their covariances of keys and values. Sums over a compact group of tokens are products with a matrix of zeros
and ones, on tensor cores. `runs` are (start, length) of blocks in tokens of the video, `groups` the group of each of its
tokens, `sizes` float32 [blocks, groups].

Strides of tokens, heads and samples come in units of UNIT = 8 elements, as in forward.py.
"""

import triton
import triton.language as tl

from .quantize import load_rows


@triton.jit
def members(groups_ptr, tokens, inside, GROUPS: tl.constexpr):
    """bool [tokens, GROUPS]: is a token of a group?"""
    group = tl.load(groups_ptr + tokens, mask=inside, other=255).to(tl.int32)
    return group[:, None] == tl.arange(0, GROUPS)[None, :]


@triton.jit
def sums(of_group, x):
    """float32 [GROUPS, columns] of x [tokens, columns]: exact of 16-bit values, of float32 with 11 significant bits."""
    return tl.dot(tl.trans(of_group.to(x.dtype)), x)


@triton.jit
def of_tokens(of_group, means, dtype: tl.constexpr):
    """float32 [tokens, columns]: the mean of each token's group, rounded to dtype"""
    return tl.dot(of_group.to(dtype), means.to(dtype))


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
    [samples * heads, rows, GROUPS, D]. size: float32 [samples * heads, rows]."""
    row, head = tl.program_id(0), tl.program_id(1)
    sample = (head // heads).to(tl.int64)
    q_ptr += (sample * batch_stride + (head % heads).to(tl.int64) * head_stride) * UNIT
    q_ptr += first.to(tl.int64) * token_stride * UNIT
    start = tl.load(runs_ptr + 2 * row)
    end = start + tl.load(runs_ptr + 2 * row + 1)
    columns, group = tl.arange(0, D_PADDED), tl.arange(0, PADDED)
    total = tl.zeros([PADDED, D_PADDED], tl.float32)
    length = 0.0
    for at in tl.static_range(0, LENGTH, BLOCK):
        tokens = start + at + tl.arange(0, BLOCK)
        x, inside = load_rows(q_ptr, tokens, token_stride * UNIT, end, columns, None, D)
        of_group = members(groups_ptr, tokens, inside, PADDED)
        total += sums(of_group, x.to(q_ptr.dtype.element_ty))
        length += tl.sum(tl.sum(x * x, 1), 0)
    count = tl.load(sizes_ptr + row * GROUPS + group, mask=group < GROUPS, other=0.0)
    inverse = (1.0 / tl.maximum(count, 1.0))[:, None]
    means = (total * inverse).to(q_ptr.dtype.element_ty)
    squares = tl.zeros([PADDED, D_PADDED], tl.float32)
    for at in tl.static_range(0, LENGTH, BLOCK):
        tokens = start + at + tl.arange(0, BLOCK)
        x, inside = load_rows(q_ptr, tokens, token_stride * UNIT, end, columns, None, D)
        of_group = members(groups_ptr, tokens, inside, PADDED)
        x -= of_tokens(of_group, means, q_ptr.dtype.element_ty)
        squares += sums(of_group, x * x)
    place = (head * rows + row).to(tl.int64)
    at = (place * GROUPS + group)[:, None] * D + columns[None, :]
    mask = (group < GROUPS)[:, None] & (columns < D)[None, :]
    tl.store(means_ptr + at, means, mask=mask)
    tl.store(spread_ptr + at, squares * inverse, mask=mask)
    tl.store(size_ptr + place, length / tl.maximum(end - start, 1))


INTEGERS = "kv_heads k_batch k_head k_token v_batch v_head v_token first blocks chunks".split()


@triton.jit(do_not_specialize=INTEGERS)
def key_statistics(
    k_ptr,
    v_ptr,
    runs_ptr,
    groups_ptr,
    sizes_ptr,
    mean_k_ptr,
    mean_v_ptr,
    offsets_ptr,
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
    BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
):
    """mean_k, mean_v: [samples * heads, blocks, D]. offsets: [samples * heads, GROUPS, blocks, D]. numbers: float32
    [4, samples * heads, blocks], total, rest, spread_v, between_v. cross: float32 [samples * heads, chunks, D_PADDED,
    D_PADDED], sums over the keys of CHUNK blocks. LENGTH: of the longest block."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    sample, of_sample = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    k_ptr += (sample * k_batch + of_sample * k_head + first.to(tl.int64) * k_token) * UNIT
    v_ptr += (sample * v_batch + of_sample * v_head + first.to(tl.int64) * v_token) * UNIT
    columns, group = tl.arange(0, D_PADDED), tl.arange(0, PADDED)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    cross = tl.zeros([D_PADDED, D_PADDED], tl.float32)
    every = tl.num_programs(1).to(tl.int64) * blocks
    mask = (group < GROUPS)[:, None] & (columns < D)[None, :]
    for block in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, blocks)):
        start = tl.load(runs_ptr + 2 * block)
        count = tl.load(runs_ptr + 2 * block + 1)
        size = tl.load(sizes_ptr + block * GROUPS + group, mask=group < GROUPS, other=0.0)
        inverse = (1.0 / tl.maximum(size, 1.0))[:, None]
        n = 1.0 / tl.maximum(count, 1).to(tl.float32)
        offsets = tl.zeros([PADDED, D_PADDED], tl.float32)
        between = tl.zeros([PADDED, D_PADDED], tl.float32)
        for at in tl.static_range(0, LENGTH, BLOCK):
            tokens = start + at + tl.arange(0, BLOCK)
            k, inside = load_rows(k_ptr, tokens, k_token * UNIT, start + count, columns, None, D)
            v, _ = load_rows(v_ptr, tokens, v_token * UNIT, start + count, columns, None, D)
            of_group = members(groups_ptr, tokens, inside, PADDED)
            offsets += sums(of_group, k.to(dtype))
            between += sums(of_group, v.to(dtype))
        mean_k, mean_v = tl.sum(offsets, 0) * n, tl.sum(between, 0) * n
        there = (size > 0)[:, None]
        offsets = tl.where(there, offsets * inverse - mean_k[None, :], 0.0).to(dtype)
        between = tl.where(there, between * inverse - mean_v[None, :], 0.0)
        place = (head * blocks + block).to(tl.int64)
        tl.store(mean_k_ptr + place * D + columns, mean_k, mask=columns < D)
        tl.store(mean_v_ptr + place * D + columns, mean_v, mask=columns < D)
        at = (head * GROUPS + group).to(tl.int64) * blocks + block
        tl.store(offsets_ptr + at[:, None] * D + columns[None, :], offsets, mask=mask)
        total, rest, spread_v = 0.0, 0.0, 0.0
        for at in tl.static_range(0, LENGTH, BLOCK):
            tokens = start + at + tl.arange(0, BLOCK)
            k, inside = load_rows(k_ptr, tokens, k_token * UNIT, start + count, columns, None, D)
            v, _ = load_rows(v_ptr, tokens, v_token * UNIT, start + count, columns, None, D)
            of_group = members(groups_ptr, tokens, inside, PADDED)
            k = tl.where(inside[:, None], k - mean_k[None, :], 0.0)
            v = tl.where(inside[:, None], v - mean_v[None, :], 0.0)
            total += tl.sum(tl.sum(k * k, 1), 0)
            spread_v += tl.sum(tl.sum(v * v, 1), 0)
            cross += tl.dot(tl.trans(k.to(dtype)), v.to(dtype))
            k -= of_tokens(of_group, offsets, dtype)
            rest += tl.sum(tl.sum(k * k, 1), 0)
        numbers = numbers_ptr + place
        tl.store(numbers, total * n)
        tl.store(numbers + every, rest * n)
        tl.store(numbers + 2 * every, spread_v * n)
        tl.store(numbers + 3 * every, tl.sum(tl.sum(between * between, 1) * size, 0) * n)
    square = tl.arange(0, D_PADDED)[:, None] * D_PADDED + columns[None, :]
    cross_ptr += (head * chunks + chunk).to(tl.int64) * (D_PADDED * D_PADDED)
    tl.store(cross_ptr + square, cross)
