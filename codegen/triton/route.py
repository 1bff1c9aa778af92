"""Device code: which tier reads each pair of a row of queries and a key block (sta_compile/tiers/router.py).

After masses.py. `choose` predicts the errors of each tier, as sta_compile/tiers/predict.py, and takes the cheapest;
`list_blocks` writes the lists.
"""

import triton
import triton.language as tl

from .masses import LOG2_E, load_tile, power

E4M3_ERROR_2 = tl.constexpr(0.0264 * 0.0264)
LARGEST_BIAS = tl.constexpr(1.0)
SKIP, SKIM, REFINE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit(do_not_specialize=["heads", "share", "rows", "blocks", "sheets", "windows"])
def choose(
    q_ptr,
    spread_ptr,
    size_ptr,
    row_runs_ptr,
    row_sizes_ptr,
    mean_k_ptr,
    mean_v_ptr,
    numbers_ptr,
    runs_ptr,
    center_ptr,
    gain_ptr,
    uneven_ptr,
    total_ptr,
    product_ptr,
    own_ptr,
    out_ptr,
    out_size_ptr,
    unit_ptr,
    price_ptr,
    inside_ptr,
    tiers_ptr,
    bias_ptr,
    skip_ptr,
    skim_ptr,
    scale,
    refine_skip,
    skim_skip,
    refine_skim,
    heads,
    share,
    rows,
    blocks,
    sheets,
    windows,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    K_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """unit: float32 [samples], what errors are divided by. price: float32 [1]. inside: bytes [windows, rows, blocks] or
    None; windows: 1 or heads. refine_skip, skim_skip, refine_skim: differences of costs, as shares of those of a row.

    tiers: bytes, bias: float32, both [samples * heads, rows, sheets * WIDTH]. skip, skim: float32 [samples * heads, rows,
    blocks], predicted errors, or None.
    """
    head = tl.program_id(2)
    key_head = (head // share).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = block < blocks
    columns = tl.arange(0, D_PADDED)
    every = (tl.num_programs(2) // share).to(tl.int64) * blocks
    wide = (sheets * WIDTH).to(tl.int64)
    length = tl.load(row_runs_ptr + 2 * row + 1, mask=there, other=0).to(tl.float32)
    n = tl.load(runs_ptr + 2 * block + 1, mask=inside, other=0).to(tl.float32)
    log_n = tl.log2(tl.maximum(n, 1.0))
    mean_k = load_tile(mean_k_ptr + key_head * blocks * D, block, blocks, columns, D)
    center = tl.load(center_ptr + key_head * D_PADDED + columns)
    off = mean_k.to(tl.float32) - center[None, :]
    squares = tl.trans((off * off).to(mean_k.dtype))
    off = tl.trans(off.to(mean_k.dtype))
    mass = tl.zeros([ROWS, BLOCK], tl.float32)
    uneven = tl.zeros([ROWS, BLOCK], tl.float32)
    gain = tl.zeros([ROWS, BLOCK], tl.float32)
    for group in range(Q_GROUPS):
        base = (head * Q_GROUPS + group).to(tl.int64) * rows
        q = load_tile(q_ptr + base * D, row, rows, columns, D)
        spread = load_tile(spread_ptr + base * D, row, rows, columns, D)
        product = load_tile(product_ptr + base * D, row, rows, columns, D)
        tokens = tl.load(row_sizes_ptr + row * Q_GROUPS + group, mask=there, other=0.0)
        part = tokens / tl.maximum(length, 1.0)
        own = tl.load(own_ptr + base + row, mask=there, other=0.0)
        total = tl.load(total_ptr + base + row, mask=there, other=0.0)
        keep = (base + row)[:, None] * wide + block[None, :]
        of_group = tl.load(gain_ptr + keep, mask=there[:, None], other=0.0).to(tl.float32)
        gain += part[:, None] * of_group
        log_weight = tl.dot(q, tl.trans(mean_k)) * (scale * LOG2_E) + of_group
        log_weight += log_n[None, :] - total[:, None]
        varies = tl.dot(product, off, tl.dot(spread, squares)) + own[:, None]
        varies = tl.maximum(varies, 0.0) * (2.0 * LOG2_E * scale * scale)
        varies = tl.minimum(varies, tl.log2(tl.maximum(tokens, 1.0))[:, None])
        square = part[:, None] * power(tl.minimum(2.0 * log_weight + varies, 0.0))
        mass += square
        of_group = tl.load(uneven_ptr + keep, mask=there[:, None], other=0.0).to(tl.float32)
        uneven += square * of_group
    place = head.to(tl.int64) * rows + row
    out = load_tile(out_ptr + head.to(tl.int64) * rows * D, row, rows, columns, D)
    mean_v = load_tile(mean_v_ptr + key_head * blocks * D, block, blocks, columns, D)
    out_size = tl.load(out_size_ptr + place, mask=there, other=0.0)
    numbers_ptr += key_head * blocks + block
    rest = tl.load(numbers_ptr + every, mask=inside, other=0.0)
    spread_v = tl.load(numbers_ptr + 2 * every, mask=inside, other=0.0)
    between_v = tl.load(numbers_ptr + 3 * every, mask=inside, other=0.0)
    noise = tl.load(numbers_ptr + 4 * every, mask=inside, other=0.0)
    length_v = tl.load(numbers_ptr + 5 * every, mask=inside, other=0.0)
    size = tl.load(size_ptr + place, mask=there, other=0.0) * (scale * scale / D)
    counted = length / tl.load(unit_ptr + head // heads)
    inverse = 1.0 / tl.maximum(n, 1.0)

    apart = tl.dot(out, tl.trans(mean_v)) * -2.0 + (out_size[:, None] + length_v[None, :])
    apart = tl.maximum(apart, 0.0)
    gain *= 1.0 / LOG2_E
    bias = tl.minimum(gain, LARGEST_BIAS)
    lost = 1.0 - power((bias - gain) * LOG2_E)
    most = tl.log2(tl.maximum(n / K_GROUPS, 1.0))[None, :]
    within = power(tl.minimum(size[:, None] * (rest * LOG2_E)[None, :], most))
    skip = lost * lost * mass * apart
    if K_GROUPS > 1:
        skip += (between_v * (1.0 / (K_GROUPS - 1)))[None, :] * (uneven - mass)
    skip += ((spread_v - between_v) * inverse)[None, :] * (uneven * (within - 1.0))
    skim = (1.0 + 2.0 * size[:, None] * noise[None, :]) * (spread_v[None, :] + apart)
    skim = (skim + (spread_v + length_v)[None, :]) * (inverse * E4M3_ERROR_2)[None, :]
    skim = skim * (uneven * within) * counted[:, None]
    skip = tl.maximum(skip, 0.0) * counted[:, None]

    price = tl.load(price_ptr)
    skipped = (skip < price * refine_skip) & (skip - skim < price * skim_skip)
    tier = tl.where(skipped, SKIP, tl.where(skim < price * refine_skim, SKIM, REFINE))
    tier = tl.where((n > 0)[None, :], tier, SKIP)
    pair = place[:, None] * blocks + block[None, :]
    mask = there[:, None] & inside[None, :]
    if inside_ptr is not None:
        inside_ptr += ((head % heads) % windows).to(tl.int64) * rows * blocks
        shown = tl.load(inside_ptr + row[:, None] * blocks + block[None, :], mask=mask, other=0)
        tier = tl.where(shown != 0, tier, SKIP)
    if skip_ptr is not None:
        tl.store(skip_ptr + pair, skip, mask=mask)
        tl.store(skim_ptr + pair, skim, mask=mask)
    added = (bias + (log_n * (1.0 / LOG2_E))[None, :]) / scale
    added = tl.where((tier == SKIP) & (n > 0)[None, :], added, -float("inf"))
    pair = place[:, None] * wide + block[None, :]
    tl.store(tiers_ptr + pair, tier.to(tl.uint8), mask=there[:, None])
    tl.store(bias_ptr + pair, added, mask=there[:, None])


@triton.jit(do_not_specialize=["blocks", "sheets"])
def list_blocks(
    tiers_ptr, order_ptr, counts_ptr, blocks, sheets, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """order: int32 [rows of all heads, blocks], what is behind the counts is not written. counts: int32 [..., 2]"""
    row = tl.program_id(0).to(tl.int64)
    tiers_ptr += row * (sheets * WIDTH)
    order_ptr += row * blocks
    refined = 0
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        tier = tl.load(tiers_ptr + block, mask=block < blocks, other=0)
        here = (tier == REFINE).to(tl.int32)
        tl.store(order_ptr + refined + tl.cumsum(here, 0) - 1, block, mask=here != 0)
        refined += tl.sum(here, 0)
    listed = refined
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        tier = tl.load(tiers_ptr + block, mask=block < blocks, other=0)
        here = (tier == SKIM).to(tl.int32)
        tl.store(order_ptr + listed + tl.cumsum(here, 0) - 1, block, mask=here != 0)
        listed += tl.sum(here, 0)
    tl.store(counts_ptr + 2 * row, refined)
    tl.store(counts_ptr + 2 * row + 1, listed - refined)
