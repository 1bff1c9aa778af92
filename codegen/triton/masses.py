"""Device code: how much of all weights has each key block? For a router (sta_compile/tiers/predict.py).

After block_statistics.py. `centers` takes the mean of all keys. `gains` says of each pair of a group of queries and a block
what the weights of its keys are beside that of their mean. `attend` is attention of the groups over blocks, and over the
keys beside the video, `average` its mean over the groups of a row. Then comes route.py. All programs add up in one order:
each run gives the same bits.

docs/tiers.md derives what is computed. Groups of queries are [groups, rows] in memory.
"""

import os

import triton
import triton.language as tl

from .quantize import load_rows

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
MASS_LIMIT = tl.constexpr(57.0)  # 2^114 is finite: deviations of scores beyond count as this
NUMBERS = 6  # of a key block: total, rest, spread_v, between_v of key_statistics; noise and |mean_v|^2 of `centers`


@triton.jit
def power(x):
    """2^x, 0 where that is no normal number: a third of the instructions of tl.exp2."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def load_tile(base, rows, count, columns, D: tl.constexpr):
    """Of a contiguous [count, D], as it is; zeros elsewhere."""
    mask = (rows < count)[:, None]
    if columns.shape[0] != D:
        mask = mask & (columns[None, :] < D)
    return tl.load(base + rows[:, None] * D + columns[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["blocks", "tokens"])
def centers(
    mean_k_ptr,
    mean_v_ptr,
    runs_ptr,
    numbers_ptr,
    center_ptr,
    blocks,
    tokens,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """center: float32 [samples * heads, D_PADDED], the mean of all keys. tokens: of all blocks."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, D_PADDED)
    mean_k_ptr += head.to(tl.int64) * blocks * D
    mean_v_ptr += head.to(tl.int64) * blocks * D
    total = tl.zeros([BLOCK, D_PADDED], tl.float32)
    for start in range(0, blocks, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        count = tl.load(runs_ptr + 2 * rows + 1, mask=rows < blocks, other=0).to(tl.float32)
        total += count[:, None] * load_tile(mean_k_ptr, rows, blocks, columns, D).to(tl.float32)
    center = tl.sum(total, 0) / tl.maximum(tokens, 1)
    tl.store(center_ptr + head * D_PADDED + columns, center)
    every = heads.to(tl.int64) * blocks
    for start in range(0, blocks, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        k = load_tile(mean_k_ptr, rows, blocks, columns, D).to(tl.float32) - center[None, :]
        v = load_tile(mean_v_ptr, rows, blocks, columns, D).to(tl.float32)
        at = numbers_ptr + head.to(tl.int64) * blocks + rows
        total_k = tl.load(at, mask=rows < blocks, other=0.0)
        tl.store(at + 4 * every, total_k + tl.sum(k * k, 1), mask=rows < blocks)
        tl.store(at + 5 * every, tl.sum(v * v, 1), mask=rows < blocks)


@triton.jit(do_not_specialize=["share", "rows", "blocks", "sheets"])
def gains(
    q_ptr,
    size_ptr,
    offsets_ptr,
    numbers_ptr,
    runs_ptr,
    parts_ptr,
    gain_ptr,
    uneven_ptr,
    scale,
    share,
    rows,
    blocks,
    sheets,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    K_GROUPS: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """share: query heads of a key head. gain, uneven: float16 [samples * heads, Q_GROUPS * rows, sheets * WIDTH], as in
    sta_compile/tiers/predict.py, gain in powers of two, uneven of the means of groups."""
    head = tl.program_id(2)
    key_head = (head // share).to(tl.int64)  # heads of a sample are a multiple of share
    at = tl.program_id(1) * M + tl.arange(0, M)
    there = at < rows * Q_GROUPS
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = block < blocks
    columns = tl.arange(0, D_PADDED)
    every = (tl.num_programs(2) // share).to(tl.int64) * blocks
    base = head.to(tl.int64) * rows * Q_GROUPS
    q = load_tile(q_ptr + base * D, at, rows * Q_GROUPS, columns, D)
    size = tl.load(size_ptr + head.to(tl.int64) * rows + at % rows)
    n = tl.maximum(tl.load(runs_ptr + 2 * block + 1, mask=inside, other=0), 1).to(tl.float32)
    offsets_ptr += key_head * K_GROUPS * blocks * D
    parts_ptr += key_head * K_GROUPS * blocks + block
    sums = tl.zeros([M, BLOCK], tl.float32)
    squares = tl.zeros([M, BLOCK], tl.float32)
    for group in range(K_GROUPS):
        x = load_tile(offsets_ptr + group * blocks.to(tl.int64) * D, block, blocks, columns, D)
        part = tl.load(parts_ptr + group * blocks, mask=inside, other=0.0)
        apart = tl.dot(q, tl.trans(x)) * (scale * LOG2_E)
        weight = power(tl.minimum(apart, MASS_LIMIT))
        counted = part[None, :] * weight
        sums += counted
        squares += counted * weight
    rest = tl.load(numbers_ptr + every + key_head * blocks + block, mask=inside, other=0.0)
    most = tl.log2(tl.maximum(n * (1.0 / K_GROUPS), 1.0))
    within = (size * (scale * scale / D * 0.5 * LOG2_E))[:, None] * rest[None, :]
    sums = tl.maximum(sums, 1e-30)
    gain = tl.log2(sums) + tl.minimum(within, most[None, :])
    uneven = squares * power(-2.0 * tl.log2(sums))
    keep = (base + at)[:, None] * (sheets * WIDTH).to(tl.int64) + block[None, :]
    tl.store(gain_ptr + keep, tl.minimum(gain, 6e4), mask=there[:, None])
    tl.store(uneven_ptr + keep, tl.minimum(uneven, 6e4), mask=there[:, None])


@triton.jit
def add_up(log_mass, k, v, top, total, seen, out):
    """A step of online softmax: log_mass [M, N], in powers of two; k, v [N, columns]."""
    new = tl.maximum(top, tl.max(log_mass, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)
    decay = power(top - safe)
    weight = power(log_mass - safe[:, None])
    rounded = weight.to(k.dtype)
    total = total * decay + tl.sum(weight, 1)
    seen = tl.dot(rounded, k, seen * decay[:, None])
    out = tl.dot(rounded, v, out * decay[:, None])
    return new, total, seen, out


INTEGERS = (
    "heads share rows blocks sheets keys_before beside video shown_stride "
    "k_batch k_head k_token v_batch v_head v_token"
).split()


@triton.jit(do_not_specialize=INTEGERS)
def attend(
    q_ptr,
    spread_ptr,
    mean_k_ptr,
    mean_v_ptr,
    slope_ptr,
    runs_ptr,
    center_ptr,
    k_ptr,
    v_ptr,
    shown_ptr,
    gain_ptr,
    total_ptr,
    product_ptr,
    own_ptr,
    out_ptr,
    scale,
    heads,
    share,
    rows,
    blocks,
    sheets,
    keys_before,
    beside,
    video,
    shown_stride,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
):
    """k, v: the whole sequences, of which `beside` keys are not the video's, keys_before of them before it; shown: bytes
    [samples, shown_stride] or None.

    total: float32 [samples * heads, Q_GROUPS * rows], log2 of all weights. With seen, the mean of the keys less the center:
    product [..., D], -2 spread * seen; own: float32, the sum of spread * seen^2. out: [..., D].
    """
    head = tl.program_id(1)
    sample = (head // heads).to(tl.int64)
    key_head = (head // share).to(tl.int64)
    at = tl.program_id(0) * M + tl.arange(0, M)
    there = at < rows * Q_GROUPS
    columns = tl.arange(0, D_PADDED)
    base = head.to(tl.int64) * rows * Q_GROUPS
    q = load_tile(q_ptr + base * D, at, rows * Q_GROUPS, columns, D)
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    seen = tl.zeros([M, D_PADDED], tl.float32)
    out = tl.zeros([M, D_PADDED], tl.float32)
    mean_k_ptr += key_head * blocks * D
    mean_v_ptr += key_head * blocks * D
    of_gain = gain_ptr + (base + at)[:, None] * (sheets * WIDTH).to(tl.int64)
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        n = tl.load(runs_ptr + 2 * block + 1, mask=block < blocks, other=0).to(tl.float32)
        gain = tl.load(of_gain + block[None, :], mask=there[:, None], other=0.0).to(tl.float32)
        mean_k = load_tile(mean_k_ptr, block, blocks, columns, D)
        mean_v = load_tile(mean_v_ptr, block, blocks, columns, D)
        log_n = tl.where(n > 0, tl.log2(tl.maximum(n, 1.0)), -float("inf"))
        log_mass = tl.dot(q, tl.trans(mean_k)) * (scale * LOG2_E) + (gain + log_n[None, :])
        top, total, seen, out = add_up(log_mass, mean_k, mean_v, top, total, seen, out)
    slope = load_tile(slope_ptr + key_head * D * D, tl.arange(0, D_PADDED), D, columns, D)
    out += total[:, None] * tl.dot(q, slope)
    of_sample = key_head % (heads // share)
    k_ptr += (sample * k_batch + of_sample * k_head) * UNIT
    v_ptr += (sample * v_batch + of_sample * v_head) * UNIT
    if shown_ptr is not None:
        shown_ptr += sample * shown_stride
    end = beside + video
    for start in range(0, beside, BLOCK):
        key = start + tl.arange(0, BLOCK)
        key = tl.where(key < beside, tl.where(key < keys_before, key, key + video), end)
        k, inside = load_rows(k_ptr, key, k_token * UNIT, end, columns, shown_ptr, D)
        v, _ = load_rows(v_ptr, key, v_token * UNIT, end, columns, shown_ptr, D)
        k = k.to(q.dtype)
        scores = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
        scores = tl.where(inside[None, :], scores, -float("inf"))
        top, total, seen, out = add_up(scores, k, v.to(q.dtype), top, total, seen, out)
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    tl.store(total_ptr + base + at, top + tl.log2(total), mask=there)
    center = tl.load(center_ptr + key_head * D_PADDED + columns)
    seen = seen * inverse[:, None] - center[None, :]
    spread = load_tile(spread_ptr + base * D, at, rows * Q_GROUPS, columns, D).to(tl.float32)
    tl.store(own_ptr + base + at, tl.sum(spread * seen * seen, 1), mask=there)
    wide = there[:, None] & (columns < D)[None, :]
    place = (base + at)[:, None] * D + columns[None, :]
    tl.store(product_ptr + place, -2.0 * spread * seen, mask=wide)
    tl.store(out_ptr + place, out * inverse[:, None], mask=wide)


@triton.jit(do_not_specialize=["rows"])
def average(
    out_ptr,
    runs_ptr,
    sizes_ptr,
    mean_ptr,
    size_ptr,
    energy_ptr,
    rows,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Over the groups of rows. mean: [samples * heads, rows, D]; size: float32 [samples * heads, rows], |mean|^2. energy:
    alike, the mean of |out|^2 times the queries of a row."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, D_PADDED)
    there = row < rows
    length = tl.load(runs_ptr + 2 * row + 1, mask=there, other=0).to(tl.float32)
    mean = tl.zeros([BLOCK, D_PADDED], tl.float32)
    energy = tl.zeros([BLOCK], tl.float32)
    for group in tl.static_range(Q_GROUPS):
        x = load_tile(out_ptr + (head * Q_GROUPS + group) * rows * D, row, rows, columns, D)
        x = x.to(tl.float32)
        tokens = tl.load(sizes_ptr + row * Q_GROUPS + group, mask=there, other=0.0)
        mean += (tokens / tl.maximum(length, 1.0))[:, None] * x
        energy += tokens * tl.sum(x * x, 1)
    wide = there[:, None] & (columns < D)[None, :]
    place = head * rows + row
    tl.store(mean_ptr + place[:, None] * D + columns[None, :], mean, mask=wide)
    tl.store(size_ptr + place, tl.sum(mean * mean, 1), mask=there)
    tl.store(energy_ptr + place, energy, mask=there)
