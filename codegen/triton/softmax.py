"""Device code: a block of keys in the online softmax of a block of query rows, in each precision. Scores are in base 2.

In NVFP4 a block's weights are rounded to e4m3 below its own maximum, times 2^8, and its output is added in float32
(docs/tiers.md, "P and its maximum").
"""

import triton
import triton.language as tl

from .e2m1 import decode
from .quantize import to_e4m3

P_BITS = tl.constexpr(8.0)  # of sta_compile.tiers.arithmetic.P_SCALE


@triton.jit
def attend(q, k, v, top, total, acc, scale, valid, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """valid: bool [keys], used if MASKED."""
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if MASKED:
        scores = tl.where(valid[None, :], scores, -float("inf"))
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    base = new
    if MASKED:  # rows that have seen no key yet: exp2(-inf - 0) is 0, and -inf - -inf would be NaN
        base = tl.where(new == -float("inf"), 0.0, new)
    weights = tl.math.exp2(scores * scale - base[:, None])
    decay = tl.math.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return new, total, acc


@triton.jit
def decoded(q, q_scales, PRECISION: tl.constexpr):
    """What `attend_quantized` takes as q: as it is where FP4 is multiplied, else in the dtype that stands for it."""
    if PRECISION == "bf16":
        return decode(q, q_scales, tl.bfloat16)
    elif PRECISION == "fp32":
        return decode(q, q_scales, tl.float32)
    else:
        return q


@triton.jit
def scores_of(q, q_scales, k, k_scales, factor, PRECISION: tl.constexpr):
    """[rows, keys] without any float32 scale."""
    if PRECISION == "fp4":
        return tl.dot_scaled(q, q_scales, "e2m1", k.T, k_scales, "e2m1")
    elif (
        PRECISION == "fp4_added"
    ):  # Triton before 3.9 can't compile a sum that starts from zeros it knows of
        zeros = tl.zeros([q.shape[0], k.shape[0]], tl.float32) + (factor - factor)[:, None]
        return tl.dot_scaled(q, q_scales, "e2m1", k.T, k_scales, "e2m1", acc=zeros)
    else:
        return tl.dot(q, decode(k, k_scales, q.dtype).T, input_precision="ieee")


@triton.jit
def attend_quantized(
    q,
    q_scales,
    k,
    k_scales,
    v,
    top,
    total,
    acc,
    factor,
    valid,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q, k: codes of e2m1 [rows or keys, head_dim / 2] with their scales; q as `decoded`. v: e4m3 [head_dim, keys].

    factor: float32 [rows], what scores are multiplied by. total is 2^P_BITS times too large, and acc likewise.
    """
    scores = scores_of(q, q_scales, k, k_scales, factor, PRECISION)
    if MASKED:
        scores = tl.where(valid[None, :], scores * factor[:, None], -float("inf"))
        best = tl.max(scores, 1)
        new = tl.maximum(top, best)
        base, own = (
            tl.where(new == -float("inf"), 0.0, new),
            tl.where(best == -float("inf"), 0.0, best),
        )
        weights = tl.math.exp2(scores - (own - P_BITS)[:, None])
    else:
        best = tl.max(scores, 1) * factor
        new = tl.maximum(top, best)
        base = new
        weights = tl.math.exp2(scores * factor[:, None] - (best - P_BITS)[:, None])
    p = to_e4m3(weights, PRECISION == "fp32").to(tl.float8e4nv, bitcast=True)
    rounded = p.to(tl.float32)
    decay, share = tl.math.exp2(top - base), tl.math.exp2(best - base)
    total = total * decay + tl.sum(rounded, 1) * share
    if PRECISION == "bf16" or PRECISION == "fp32":
        found = tl.dot(rounded.to(q.dtype), v.T.to(q.dtype), input_precision="ieee")
    else:
        found = tl.dot(p, v.T)
    acc = acc * decay[:, None] + found * share[:, None]
    return new, total, acc
