"""Device code: how much of all weights has each key block? For a router (sta_compile/tiers/predict.py).

After block_statistics.py. `centers` takes the mean of all keys. `gains` says of each pair of a group of queries and a block
what the weights of its keys are beside that of their mean. `attend` is attention of the groups over blocks, and over the
keys beside the video. Then comes route.py. All programs add up in one order: each run gives the same bits.

docs/tiers.md derives what is computed. Rows of a tile of queries are (row, group), the group fastest.
"""

import triton
import triton.language as tl

from .quantize import load_rows

MASS_LIMIT = tl.constexpr(40.0)  # e^80 is finite: deviations of scores beyond count as this
NUMBERS = 6  # of a key block: total, rest, spread_v, between_v of key_statistics; noise and |mean_v|^2 of `centers`


@triton.jit
def log_of_mean(variance, log_n):
    beyond = tl.sqrt(2.0 * variance * log_n) - log_n
    return tl.maximum(tl.where(variance <= 2.0 * log_n, 0.5 * variance, beyond), 0.0)


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


@triton.jit(do_not_specialize=["share", "rows", "blocks"])
def gains(
    q_ptr,
    size_ptr,
    offsets_ptr,
    numbers_ptr,
    runs_ptr,
    sizes_ptr,
    gain_ptr,
    uneven_ptr,
    scale,
    share,
    rows,
    blocks,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    K_GROUPS: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """share: query heads of a key head. gain, uneven: float16 [samples * heads, rows * Q_GROUPS, blocks], as in
    sta_compile/tiers/predict.py, uneven of the means of groups."""
    head = tl.program_id(2)
    key_head = (head // share).to(tl.int64)  # heads of a sample are a multiple of share
    at = tl.program_id(1) * M + tl.arange(0, M)
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = block < blocks
    columns = tl.arange(0, D_PADDED)
    every = (tl.num_programs(2) // share).to(tl.int64) * blocks
    base = head.to(tl.int64) * rows * Q_GROUPS
    q = load_tile(q_ptr + base * D, at, rows * Q_GROUPS, columns, D)
    row = at // Q_GROUPS
    size = tl.load(size_ptr + head.to(tl.int64) * rows + row, mask=row < rows, other=0.0)
    n = tl.load(runs_ptr + 2 * block + 1, mask=inside, other=0).to(tl.float32)
    offsets_ptr += key_head * K_GROUPS * blocks * D
    sums = tl.zeros([M, BLOCK], tl.float32)
    squares = tl.zeros([M, BLOCK], tl.float32)
    for group in range(K_GROUPS):
        x = load_tile(offsets_ptr + group * blocks.to(tl.int64) * D, block, blocks, columns, D)
        part = tl.load(sizes_ptr + block * K_GROUPS + group, mask=inside, other=0.0)
        part = part / tl.maximum(n, 1.0)
        weight = tl.exp(tl.minimum(scale * tl.dot(q, tl.trans(x)), MASS_LIMIT))
        sums += part[None, :] * weight
        squares += part[None, :] * (weight * weight)
    rest = tl.load(numbers_ptr + every + key_head * blocks + block, mask=inside, other=0.0)
    of_group = tl.log(tl.maximum(n / K_GROUPS, 1.0))
    within = (size * (scale * scale / D))[:, None] * rest[None, :]
    sums = tl.maximum(sums, 1e-30)
    gain = tl.log(sums) + log_of_mean(within, of_group[None, :])
    keep = (base + at)[:, None] * blocks + block[None, :]
    mask = (row < rows)[:, None] & inside[None, :]
    tl.store(gain_ptr + keep, tl.minimum(gain, 6e4), mask=mask)
    tl.store(uneven_ptr + keep, tl.minimum(squares / (sums * sums), 6e4), mask=mask)


@triton.jit
def add_up(log_mass, k, v, top, total, seen, out):
    """A step of online softmax: log_mass [M, N]; k, v [N, columns]."""
    new = tl.maximum(top, tl.max(log_mass, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)
    decay = tl.exp(top - safe)
    weight = tl.exp(log_mass - safe[:, None])
    rounded = weight.to(k.dtype)
    total = total * decay + tl.sum(weight, 1)
    seen = tl.dot(rounded, k, seen * decay[:, None])
    out = tl.dot(rounded, v, out * decay[:, None])
    return new, total, seen, out


INTEGERS = (
    "heads share rows blocks keys_before beside video shown_stride k_batch k_head k_token v_batch v_head v_token"
).split()


@triton.jit(do_not_specialize=INTEGERS)
def attend(
    q_ptr,
    spread_ptr,
    row_runs_ptr,
    row_sizes_ptr,
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
    energy_ptr,
    scale,
    heads,
    share,
    rows,
    blocks,
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """k, v: the whole sequences, of which `beside` keys are not the video's, keys_before of them before it; shown: bytes
    [samples, shown_stride] or None.

    total: float32 [samples * heads, rows * Q_GROUPS], ln of all weights. With seen, the mean of the keys less the center:
    product [..., D], spread * seen; own: float32, the sum of spread * seen^2. out: [samples * heads, rows, D], of a row.
    energy: float32 [samples * heads, rows], the mean of |out of a group|^2.
    """
    head = tl.program_id(1)
    sample = (head // heads).to(tl.int64)
    key_head = (head // share).to(tl.int64)
    M: tl.constexpr = ROWS * Q_GROUPS
    first = tl.program_id(0) * ROWS
    at = first * Q_GROUPS + tl.arange(0, M)
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
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        inside = block < blocks
        n = tl.load(runs_ptr + 2 * block + 1, mask=inside, other=0).to(tl.float32)
        keep = (base + at)[:, None] * blocks + block[None, :]
        gain = tl.load(gain_ptr + keep, mask=there[:, None] & inside[None, :], other=0.0)
        mean_k = load_tile(mean_k_ptr, block, blocks, columns, D)
        mean_v = load_tile(mean_v_ptr, block, blocks, columns, D)
        log_mass = scale * tl.dot(q, tl.trans(mean_k)) + gain.to(tl.float32)
        log_n = tl.where(n > 0, tl.log(tl.maximum(n, 1.0)), -float("inf"))
        log_mass += log_n[None, :]
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
        scores = scale * tl.dot(q, tl.trans(k))
        scores = tl.where(inside[None, :], scores, -float("inf"))
        top, total, seen, out = add_up(scores, k, v.to(q.dtype), top, total, seen, out)
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    tl.store(total_ptr + base + at, top + tl.log(total), mask=there)
    center = tl.load(center_ptr + key_head * D_PADDED + columns)
    seen = seen * inverse[:, None] - center[None, :]
    spread = load_tile(spread_ptr + base * D, at, rows * Q_GROUPS, columns, D).to(tl.float32)
    tl.store(own_ptr + base + at, tl.sum(spread * seen * seen, 1), mask=there)
    wide = there[:, None] & (columns < D)[None, :]
    tl.store(product_ptr + (base + at)[:, None] * D + columns[None, :], spread * seen, mask=wide)
    out *= inverse[:, None]
    tokens = tl.load(row_sizes_ptr + at, mask=there, other=0.0)
    length = tl.load(row_runs_ptr + 2 * (at // Q_GROUPS) + 1, mask=there, other=0)
    part = tokens / tl.maximum(length, 1).to(tl.float32)
    row = first + tl.arange(0, ROWS)
    place = head.to(tl.int64) * rows + row
    energy = tl.sum(tl.reshape(part * tl.sum(out * out, 1), [ROWS, Q_GROUPS]), 1)
    tl.store(energy_ptr + place, energy, mask=row < rows)
    of_row = tl.sum(tl.reshape(part[:, None] * out, [ROWS, Q_GROUPS, D_PADDED]), 1)
    wide = (row < rows)[:, None] & (columns < D)[None, :]
    tl.store(out_ptr + place[:, None] * D + columns[None, :], of_row, mask=wide)
