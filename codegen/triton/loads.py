"""Device code: loads of a block of keys that all exist, by TMA or by pointers."""

import triton
import triton.language as tl


@triton.jit
def load_block(
    desc, row, col, pointers, first, stride, columns, D: tl.constexpr, TMA: tl.constexpr
):
    """Keys or values [block, head_dim] from token `first` on."""
    if TMA:
        return desc.load([row + first, col])
    pointers += first.to(tl.int64) * stride
    if columns.shape[0] == D:
        return tl.load(pointers)
    return tl.load(pointers, mask=columns[None, :] < D, other=0.0)


@triton.jit
def load_columns(pointers, first, inside):
    """Transposed values [head_dim, block], by pointers: TMA reads bytes from multiples of 16 on only, and `first` is any.

    inside: bool [head_dim, 1], rows that are there.
    """
    return tl.load(pointers + first.to(tl.int64), mask=inside, other=0.0)
