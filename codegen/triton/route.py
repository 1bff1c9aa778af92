"""Device code: which tier reads each pair of a row of queries and a key block (sta_compile/tiers/router.py).

After masses.py. `choose` predicts the errors of each tier, as sta_compile/tiers/predict.py, and takes the cheapest;
`list_blocks` writes the lists. Rows of a tile of queries are (row, group), the group fastest.
"""

import triton
import triton.language as tl

from .masses import load_tile, log_of_mean

E4M3_ERROR_2 = tl.constexpr(0.0264 * 0.0264)
LARGEST_BIAS = tl.constexpr(1.0)
SKIP, SKIM, REFINE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def of_rows(x, ROWS: tl.constexpr, Q_GROUPS: tl.constexpr):
    """Sums over the groups of queries: [ROWS, N] of x [ROWS * Q_GROUPS, N]"""
    return tl.sum(tl.reshape(x, [ROWS, Q_GROUPS, x.shape[1]]), 1)


@triton.jit(do_not_specialize=["heads", "share", "rows", "blocks", "columns_of_bias", "windows"])
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
    unit_ptr,
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
    columns_of_bias,
    windows,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    K_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """unit: float32 [samples], what errors are divided by. inside: bytes [windows, rows, blocks] or None; windows: 1 or
    heads. refine_skip, skim_skip, refine_skim: differences of costs, times the price. skip, skim: float32
    [samples * heads, rows, blocks], predicted errors, or None."""
    head = tl.program_id(2)
    sample = head // heads
    key_head = (head // share).to(tl.int64)
    M: tl.constexpr = ROWS * Q_GROUPS
    first = tl.program_id(1) * ROWS
    at = first * Q_GROUPS + tl.arange(0, M)
    row = first + tl.arange(0, ROWS)
    columns = tl.arange(0, D_PADDED)
    every = (tl.num_programs(2) // share).to(tl.int64) * blocks
    base = head.to(tl.int64) * rows * Q_GROUPS
    place = head.to(tl.int64) * rows + row
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    q = load_tile(q_ptr + base * D, at, rows * Q_GROUPS, columns, D)
    spread = load_tile(spread_ptr + base * D, at, rows * Q_GROUPS, columns, D)
    product = load_tile(product_ptr + base * D, at, rows * Q_GROUPS, columns, D)
    out = load_tile(out_ptr + head.to(tl.int64) * rows * D, row, rows, columns, D)
    own = tl.load(own_ptr + base + at, mask=at < rows * Q_GROUPS, other=0.0)
    out_size = tl.sum(out.to(tl.float32) * out.to(tl.float32), 1)
    total = tl.load(total_ptr + base + at, mask=at < rows * Q_GROUPS, other=0.0)
    tokens = tl.load(row_sizes_ptr + at, mask=at < rows * Q_GROUPS, other=0.0)
    length = tl.load(row_runs_ptr + 2 * (at // Q_GROUPS) + 1, mask=at < rows * Q_GROUPS, other=0)
    part = tokens / tl.maximum(length, 1).to(tl.float32)
    log_tokens = tl.log(tl.maximum(tokens, 1.0))
    size = tl.load(size_ptr + place, mask=row < rows, other=0.0) * (scale * scale / D)
    counted = tl.load(row_runs_ptr + 2 * row + 1, mask=row < rows, other=0).to(tl.float32)
    counted = counted / tl.load(unit_ptr + sample)
    center = tl.load(center_ptr + key_head * D_PADDED + columns)
    mean_k_ptr += key_head * blocks * D
    mean_v_ptr += key_head * blocks * D
    numbers_ptr += key_head * blocks
    if inside_ptr is not None:
        inside_ptr += ((head % heads) % windows).to(tl.int64) * rows * blocks
    for tile in range(TILES):
        block = (tl.program_id(0) * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        there = block < blocks
        n = tl.load(runs_ptr + 2 * block + 1, mask=there, other=0).to(tl.float32)
        log_n = tl.log(tl.maximum(n, 1.0))
        mean_k = load_tile(mean_k_ptr, block, blocks, columns, D)
        keep = (base + at)[:, None] * blocks + block[None, :]
        mask = (at < rows * Q_GROUPS)[:, None] & there[None, :]
        gain = tl.load(gain_ptr + keep, mask=mask, other=0.0).to(tl.float32)
        uneven = tl.load(uneven_ptr + keep, mask=mask, other=1.0).to(tl.float32)
        log_weight = scale * tl.dot(q, tl.trans(mean_k)) + gain + log_n[None, :] - total[:, None]
        off = mean_k.to(tl.float32) - center[None, :]
        squares = (off * off).to(dtype)
        varies = tl.dot(spread, tl.trans(squares)) - 2.0 * tl.dot(product, tl.trans(off.to(dtype)))
        varies = tl.maximum(varies + own[:, None], 0.0) * (scale * scale)
        log_square = 2.0 * log_weight + log_of_mean(4.0 * varies, log_tokens[:, None])
        square = part[:, None] * tl.exp(tl.minimum(log_square, 0.0))
        square = tl.where((n > 0)[None, :], square, 0.0)
        bias = tl.minimum(gain, LARGEST_BIAS)
        lost = 1.0 - tl.exp(bias - gain)
        mass = of_rows(square, ROWS, Q_GROUPS)
        mass_lost = of_rows(square * lost * lost, ROWS, Q_GROUPS)
        mass_uneven = of_rows(square * uneven, ROWS, Q_GROUPS)
        log_skipped = of_rows(part[:, None] * bias, ROWS, Q_GROUPS) + log_n[None, :]

        mean_v = load_tile(mean_v_ptr, block, blocks, columns, D)
        length_v = tl.load(numbers_ptr + 5 * every + block, mask=there, other=0.0)[None, :]
        apart = length_v - 2.0 * tl.dot(out, tl.trans(mean_v)) + out_size[:, None]
        apart = tl.maximum(apart, 0.0)
        rest = tl.load(numbers_ptr + every + block, mask=there, other=0.0)[None, :]
        spread_v = tl.load(numbers_ptr + 2 * every + block, mask=there, other=0.0)[None, :]
        between_v = tl.load(numbers_ptr + 3 * every + block, mask=there, other=0.0)[None, :]
        noise = tl.load(numbers_ptr + 4 * every + block, mask=there, other=0.0)[None, :]
        within = size[:, None] * rest
        of_group = tl.log(tl.maximum(n / K_GROUPS, 1.0))[None, :]
        uneven_within = log_of_mean(4.0 * within, of_group) - 2.0 * log_of_mean(within, of_group)
        uneven_within = tl.exp(tl.minimum(tl.maximum(uneven_within, 0.0), of_group))
        inverse = 1.0 / tl.maximum(n, 1.0)[None, :]
        if K_GROUPS > 1:
            between = between_v * (1.0 / (K_GROUPS - 1)) * (mass_uneven - mass)
        else:
            between = 0.0 * mass
        skip = between + mass_lost * apart
        skip += (spread_v - between_v) * inverse * (mass_uneven * (uneven_within - 1.0))
        skim = E4M3_ERROR_2 * (1.0 + 2.0 * size[:, None] * noise) * (spread_v + apart)
        skim += E4M3_ERROR_2 * (spread_v + length_v)
        skim = skim * inverse * (mass_uneven * uneven_within)
        skip *= counted[:, None]
        skim *= counted[:, None]

        skipped = (skip < refine_skip) & (skip - skim < skim_skip)
        tier = tl.where(skipped, SKIP, tl.where(skim < refine_skim, SKIM, REFINE))
        pair = place[:, None] * blocks + block[None, :]
        mask = (row < rows)[:, None] & there[None, :]
        if inside_ptr is not None:
            seen_by = row[:, None] * blocks + block[None, :]
            tier = tl.where(tl.load(inside_ptr + seen_by, mask=mask, other=0) != 0, tier, SKIP)
        tier = tl.where((n > 0)[None, :], tier, SKIP)
        tl.store(tiers_ptr + pair, tier.to(tl.uint8), mask=mask)
        if skip_ptr is not None:
            tl.store(skip_ptr + pair, skip, mask=mask)
            tl.store(skim_ptr + pair, skim, mask=mask)
        added = tl.where((tier == SKIP) & (n > 0)[None, :], log_skipped / scale, -float("inf"))
        wide = place[:, None] * columns_of_bias + block[None, :]
        mask = (row < rows)[:, None] & (block < columns_of_bias)[None, :]
        tl.store(bias_ptr + wide, added, mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def list_blocks(tiers_ptr, order_ptr, counts_ptr, blocks, BLOCK: tl.constexpr):
    """order: int32 [rows of all heads, blocks], what is behind the counts is not written. counts: int32 [..., 2]"""
    row = tl.program_id(0).to(tl.int64)
    tiers_ptr += row * blocks
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
