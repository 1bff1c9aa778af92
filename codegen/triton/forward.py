"""Device code: attention forward. One program is one block of query rows of one head and sample.

The rows lie in one tile, in one context segment, or, for a dense sample, anywhere in the video. The
program walks its keys in two loops: the full blocks of all runs (video runs, then context segments)
with no mask code at all, then the rest of all runs packed together, masked. Context keys that a
key mask is about are all in the second loop, where hidden ones are not loaded, and so are the video's
keys of a sample that hides one of them, which no other sample pays for. Scores are in base 2.
The video's keys and queries start at different tokens where other tokens are keys only.

Order of programs: context queries first, since they read the whole sequence and would otherwise run
alone at the end; then block after block of a head, so that neighbours share windows in L2.

Strides of tokens, heads and samples come in units of UNIT = 8 elements, which tells the compiler
that rows are aligned; the head dim is contiguous. Products of strides are 64-bit.

With scales, q and k are bytes of NVFP4, contiguous and padded to D_PADDED channels, and v is e4m3
[.., head_dim, tokens]: what quantize_nvfp4.py writes. Their strides are in bytes, and "v_token" is that
of a channel. A row has a scale for 8 bytes of codes, so that scales have the strides of codes in units.
"""

import triton
import triton.language as tl

from .loads import load_block, load_columns
from .runs import axis_start, key_run, tail_keys, window_start
from .softmax import P_BITS, attend, attend_quantized, decoded

# Run-time integers: their values must not make new binaries.
INTEGERS = (
    "heads share q_batch q_head q_token k_batch k_head k_token v_batch v_head v_token out_batch "
    "out_head out_token q_row_batch q_row_head q_col_head k_row_batch k_row_head k_col_head "
    "v_row_batch v_row_head v_col_head queries video video_query context_keys T H W tiles_t tiles_h "
    "tiles_w window_t window_h window_w batch_heads tile_blocks context_blocks start_0 length_0 "
    "query_0 rows_0 start_1 length_1 query_1 rows_1 start_2 length_2 query_2 rows_2 start_3 length_3 "
    "query_3 rows_3"
).split()


@triton.jit(do_not_specialize=INTEGERS)
def attention_forward(
    q_desc,
    k_desc,
    v_desc,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    lengths_ptr,
    dense_ptr,
    mask_ptr,
    video_mask_ptr,
    shown_ptr,
    windows_ptr,
    q_scales_ptr,
    k_scales_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    shift_ptr,
    scale,
    heads,
    share,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    out_batch,
    out_head,
    out_token,
    q_row_batch,
    q_row_head,
    q_col_head,
    k_row_batch,
    k_row_head,
    k_col_head,
    v_row_batch,
    v_row_head,
    v_col_head,
    queries,
    video,
    video_query,
    context_keys,
    T,
    H,
    W,
    tiles_t,
    tiles_h,
    tiles_w,
    window_t,
    window_h,
    window_w,
    batch_heads,
    tile_blocks,
    context_blocks,
    start_0,
    length_0,
    query_0,
    rows_0,
    start_1,
    length_1,
    query_1,
    rows_1,
    start_2,
    length_2,
    query_2,
    rows_2,
    start_3,
    length_3,
    query_3,
    rows_3,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CONTEXTS: tl.constexpr,
    UNIT: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    REST_N: tl.constexpr,
):
    QUANTIZED: tl.constexpr = k_scales_ptr is not None
    STORED: tl.constexpr = D_PADDED // 2 if QUANTIZED else D  # of a row of q and k
    starts = (start_0, start_1, start_2, start_3)
    lengths = (length_0, length_1, length_2, length_3)
    context_queries = (query_0, query_1, query_2, query_3)
    context_rows = (rows_0, rows_1, rows_2, rows_3)
    pid = tl.program_id(0)
    block = pid
    per_head = tiles_t * tiles_h * tiles_w * tile_blocks
    in_context = False
    if CONTEXTS > 0:
        in_context = pid < batch_heads * context_blocks
        block = tl.where(in_context, pid, pid - batch_heads * context_blocks)
        per_head = tl.where(in_context, context_blocks, per_head)
    head = block // per_head
    block = block % per_head
    batch = head // heads
    head = head % heads

    # Context queries and dense samples see the video as one tile, and so do those of which a mask
    # hides a key of the video. `unit`: keys of a block; for these no run has a full one.
    whole = in_context
    unit: tl.constexpr = BLOCK_N
    if dense_ptr is not None:
        whole = whole | (tl.load(dense_ptr + batch) != 0)
    if video_mask_ptr is not None:
        hides = tl.load(shown_ptr + batch) == 0
        whole = whole | hides
        unit = tl.where(hides, 2**30, BLOCK_N)
    if CONTEXTS > 0 or dense_ptr is not None or video_mask_ptr is not None:
        tile_blocks = tl.where(whole, per_head, tile_blocks)
        tiles_t = tl.where(whole, 1, tiles_t)
        tiles_h = tl.where(whole, 1, tiles_h)
        tiles_w = tl.where(whole, 1, tiles_w)
    tile = block // tile_blocks
    block = block % tile_blocks
    tile_w = tile % tiles_w
    tile_h = tile // tiles_w % tiles_h
    tile_t = tile // tiles_w // tiles_h

    # Query rows: `first` is the block's first one, `rows` how many of the block exist.
    small_t, small_h = T // tiles_t, H // tiles_h
    large_t, large_h = T - small_t * tiles_t, H - small_h * tiles_h
    w0 = axis_start(tile_w, W, tiles_w)
    w1 = axis_start(tile_w + 1, W, tiles_w)
    sizes = (H, W, small_t, large_t, small_h, large_h)
    first, rows = key_run(tile_t, tile_h, (1, 1, 0, 0, w0, w1 - w0), sizes)
    first += video_query + block * BLOCK_M
    rows -= block * BLOCK_M
    if CONTEXTS > 0:
        before = 0
        for x in tl.static_range(CONTEXTS):
            blocks = tl.cdiv(context_rows[x], BLOCK_M)
            inside = in_context & (block >= before) & (block < before + blocks)
            first = tl.where(inside, context_queries[x] + (block - before) * BLOCK_M, first)
            rows = tl.where(inside, context_rows[x] - (block - before) * BLOCK_M, rows)
            before += blocks

    # Key runs of the window.
    if windows_ptr is not None:
        window_t = tl.load(windows_ptr + 3 * head)
        window_h = tl.load(windows_ptr + 3 * head + 1)
        window_w = tl.load(windows_ptr + 3 * head + 2)
    half_t, half_h, half_w = window_t // 2, window_h // 2, window_w // 2
    width_t = tl.minimum(tiles_t, 2 * half_t + 1)
    width_h = tl.minimum(tiles_h, 2 * half_h + 1)
    width_w = tl.minimum(tiles_w, 2 * half_w + 1)
    lo_t = window_start(tile_t, half_t, width_t, tiles_t)
    lo_h = window_start(tile_h, half_h, width_h, tiles_h)
    lo_w = window_start(tile_w, half_w, width_w, tiles_w)
    col = axis_start(lo_w, W, tiles_w)
    cols = axis_start(lo_w + width_w, W, tiles_w) - col
    join_h = width_w == tiles_w
    join_t = join_h & (width_h == tiles_h)
    step_t = tl.where(join_t, width_t, 1)
    step_h = tl.where(join_h, width_h, 1)
    runs_t = tl.where(join_t, 1, width_t)
    runs_h = tl.where(join_h, 1, width_h)
    box = (step_t, step_h, lo_t, lo_h, col, cols)
    runs_t = tl.where(rows > 0, runs_t, 0)  # a block past the end of its tile has nothing to do

    # Blocks of keys: `full` ones, then `rest` keys. A mask makes rest of all keys that it is about.
    FULL_CONTEXTS: tl.constexpr = CONTEXTS if mask_ptr is None else 0
    full = 0
    rest = 0
    for a in range(runs_t):
        for b in range(runs_h):
            _, length = key_run(a, b, box, sizes)
            full += length // unit
            rest += length % unit
    valid_0, valid_1, valid_2, valid_3 = length_0, length_1, length_2, length_3
    if lengths_ptr is not None:
        at = lengths_ptr + batch * CONTEXTS
        valid_0 = tl.minimum(tl.maximum(tl.load(at).to(tl.int32), 0), length_0)
        if CONTEXTS > 1:
            valid_1 = tl.minimum(tl.maximum(tl.load(at + 1).to(tl.int32), 0), length_1)
        if CONTEXTS > 2:
            valid_2 = tl.minimum(tl.maximum(tl.load(at + 2).to(tl.int32), 0), length_2)
        if CONTEXTS > 3:
            valid_3 = tl.minimum(tl.maximum(tl.load(at + 3).to(tl.int32), 0), length_3)
    valids = (valid_0, valid_1, valid_2, valid_3)
    video_full = full
    for x in tl.static_range(CONTEXTS):
        count = tl.where(rows > 0, valids[x], 0)
        if mask_ptr is None:
            full += count // BLOCK_N
            rest += count % BLOCK_N
        else:
            rest += count

    kv_head = head // share
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PADDED)
    c = tl.arange(0, D_PADDED // 2) if QUANTIZED else d
    of_head = batch * (heads // share) + kv_head
    batch, head, kv_head = batch.to(tl.int64), head.to(tl.int64), kv_head.to(tl.int64)
    row_mask = (m < rows)[:, None]
    if QUANTIZED:
        g = tl.arange(0, D_PADDED // 16)
        q_scales_ptr += batch * q_batch + head * q_head + first.to(tl.int64) * q_token
        q_scales = tl.load(
            q_scales_ptr + m[:, None] * q_token + g[None, :], mask=row_mask, other=0.0
        )
        k_scales_ptr += batch * k_batch + kv_head * k_head
        of_query = (batch * heads + head) * queries + first + m
        factor = tl.load(q_scale_ptr + of_query, mask=m < rows, other=0.0)
        factor *= tl.load(k_scale_ptr + of_head) * scale
        group_token = k_token  # 32 bits: these tensors have less than 2 GiB for a head
        v_row_bytes = v_token * UNIT
        k_scales_block = k_scales_ptr + n[:, None] * group_token + g[None, :]
    q_mask = row_mask
    if D != D_PADDED:
        row_mask = row_mask & (d < D)[None, :]
        q_mask = q_mask if QUANTIZED else row_mask
    k_token, v_token = k_token.to(tl.int64) * UNIT, v_token.to(tl.int64) * UNIT
    k_base = k_ptr + (batch * k_batch + kv_head * k_head) * UNIT
    v_base = v_ptr + (batch * v_batch + kv_head * v_head) * UNIT
    k_row, v_row, k_col, v_col = 0, 0, 0, 0
    if TMA:
        q_row = (batch * q_row_batch + head * q_row_head).to(tl.int32) + first
        k_row = (batch * k_row_batch + kv_head * k_row_head).to(tl.int32)
        v_row = (batch * v_row_batch + kv_head * v_row_head).to(tl.int32)
        k_col = (kv_head * k_col_head).to(tl.int32)
        v_col = (kv_head * v_col_head).to(tl.int32)
        q = q_desc.load([q_row, (head * q_col_head).to(tl.int32)])
    else:
        q_token = q_token.to(tl.int64) * UNIT
        q_base = q_ptr + (batch * q_batch + head * q_head) * UNIT + first.to(tl.int64) * q_token
        q = tl.load(q_base + m[:, None] * q_token + c[None, :], mask=q_mask, other=0.0)
    k_block = k_base + n[:, None] * k_token + c[None, :]
    if QUANTIZED:
        q = decoded(q, q_scales, PRECISION)
        channel = (d < D)[:, None]
        v_block = v_base + d[:, None] * v_token + n[None, :]
    else:
        v_block = v_base + n[:, None] * v_token + d[None, :]

    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PADDED], tl.float32)

    # Full blocks. (a, b): current run; `left`: its full blocks that are not done.
    a, b = 0, 0
    at, length = key_run(0, 0, box, sizes)
    at += video
    left = length // unit
    if FULL_CONTEXTS > 0:
        before = video_full
        for x in tl.static_range(FULL_CONTEXTS):
            at = tl.where(before == 0, starts[x], at)
            left = tl.where(before == 0, full + 1, left)
            before += valids[x] // BLOCK_N
    for j in tl.range(0, full, num_stages=STAGES):
        k = load_block(k_desc, k_row, k_col, k_block, at, k_token, c, STORED, TMA)
        if QUANTIZED:
            k_scales = tl.load(k_scales_block + at.to(tl.int64) * group_token)
            v = load_columns(v_block, at, channel)
            top, total, acc = attend_quantized(
                q, q_scales, k, k_scales, v, top, total, acc, factor, None, False, PRECISION
            )
        else:
            v = load_block(v_desc, v_row, v_col, v_block, at, v_token, d, D, TMA)
            top, total, acc = attend(q, k, v, top, total, acc, scale, None, False, PRECISION)
        # The next run is (a, b + 1) if that has a full block; runs get no longer, so otherwise no
        # later one of this `a` has, and it is (a + 1, 0).
        left -= 1
        _, length = key_run(a, b + 1, box, sizes)
        wrap = (b + 1 >= runs_h) | (length < BLOCK_N)
        next_a = tl.where(wrap, a + 1, a)
        next_b = tl.where(wrap, 0, b + 1)
        start, length = key_run(next_a, next_b, box, sizes)
        done = left == 0
        a = tl.where(done, next_a, a)
        b = tl.where(done, next_b, b)
        at = tl.where(done, video + start, at + BLOCK_N)
        left = tl.where(done, length // BLOCK_N, left)
        if FULL_CONTEXTS > 0:
            before = video_full
            for x in tl.static_range(FULL_CONTEXTS):
                at = tl.where(j + 1 == before, starts[x], at)
                left = tl.where(j + 1 == before, full + 1, left)
                before += valids[x] // BLOCK_N

    # The rest of all runs, packed: key i of the rest is token `key`.
    for j in tl.range(0, tl.cdiv(rest, REST_N), num_stages=1):
        rank = j * REST_N + tl.arange(0, REST_N)
        key, before = tail_keys(rank, video, runs_t, runs_h, box, sizes, unit, REST_N)
        shown, of_segment = -1, 0  # column of the mask; the segment's first one
        for x in tl.static_range(CONTEXTS):
            tail = valids[x] if mask_ptr is not None else valids[x] % BLOCK_N
            packed = (rank >= before) & (rank < before + tail)
            place = valids[x] - tail + rank - before
            key = tl.where(packed, starts[x] + place, key)
            if mask_ptr is not None:
                shown = tl.where(packed, of_segment + place, shown)
                of_segment += lengths[x]
            before += tail
        valid = key >= 0
        if video_mask_ptr is not None:
            place = key - video
            of_video = valid & (place >= 0) & (place < T * H * W)
            flags = video_mask_ptr + batch * (T * H * W) + place
            valid = valid & (tl.load(flags, mask=of_video, other=1) != 0)
        if mask_ptr is not None:
            flags = mask_ptr + batch * context_keys + shown
            valid = valid & (tl.load(flags, mask=shown >= 0, other=1) != 0)
        mask = valid[:, None]
        token = key.to(tl.int64)[:, None]
        # Zeros, not only a weight of zero: 0 * NaN would be NaN.
        if QUANTIZED:
            groups = key[:, None] * group_token
            k = tl.load(k_base + groups * UNIT + c[None, :], mask=mask, other=0)
            k_scales = tl.load(k_scales_ptr + groups + g[None, :], mask=mask, other=0.0)
            v_mask = channel & valid[None, :]
            v = tl.load(v_base + d[:, None] * v_row_bytes + key[None, :], mask=v_mask, other=0.0)
            top, total, acc = attend_quantized(
                q, q_scales, k, k_scales, v, top, total, acc, factor, valid, True, PRECISION
            )
        else:
            if D != D_PADDED:
                mask = mask & (d < D)[None, :]
            k = tl.load(k_base + token * k_token + d[None, :], mask=mask, other=0.0)
            v = tl.load(v_base + token * v_token + d[None, :], mask=mask, other=0.0)
            top, total, acc = attend(q, k, v, top, total, acc, scale, valid, True, PRECISION)

    acc = acc / tl.where(total == 0, 1, total)[:, None]
    top = top + tl.math.log2(total)
    if QUANTIZED:
        acc *= tl.load(v_scale_ptr + of_head * D + d, mask=d < D, other=0.0)[None, :]
        top -= P_BITS
    out_token = out_token.to(tl.int64) * UNIT
    out_base = (
        out_ptr + (batch * out_batch + head * out_head) * UNIT + first.to(tl.int64) * out_token
    )
    tl.store(
        out_base + m[:, None] * out_token + d[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=row_mask,
    )
    lse = top * 0.6931471805599453
    lse_base = (
        batch * heads + head
    ) * queries + first  # computed again: registers are scarce in the loops
    if QUANTIZED:
        lse += tl.load(shift_ptr + lse_base + m, mask=m < rows, other=0.0)
    tl.store(lse_ptr + lse_base + m, lse, mask=m < rows)
