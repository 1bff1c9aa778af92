"""How can TMA read a strided [batch, heads, tokens, head_dim] tensor?

`is_boxed` says whether a 4-D map describes it. Triton's descriptors are 2-D here: `tensor_map` is one matrix that
stands for the tensor.

Row `batch * row_batch + head * row_head + token` of the matrix, from column `head * col_head` on,
is a token's vector:
- [2, 24, 100, 128] contiguous: 4800 rows of 128, row_batch 2400, row_head 100, col_head 0;
- the same shape as a view of [2, 100, 24, 128]: 200 rows of 3072, row_batch 100, col_head 128.
"""

from __future__ import annotations

from dataclasses import dataclass


def is_boxed(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, address: int) -> bool:
    """Can TMA read the tensor as it is, as boxes of [head_dim, tokens, heads, batch]?

    Strides are multiples of 16 bytes below 2^40; that of an axis of length 1 is not used. Rows that
    share memory (a stride of 0) are refused: the driver's rules for them are not written down.
    """
    if strides[-1] != 1 or address % 16 or min(shape) < 1:
        return False
    used = [s * itemsize for n, s in zip(shape[:3], strides[:3], strict=True) if n > 1]
    return all(0 < s < 2**40 and s % 16 == 0 for s in used)


@dataclass(frozen=True)
class TensorMap:
    """A row-major matrix over a tensor's memory, in elements."""

    rows: int
    cols: int
    stride: int
    row_batch: int
    row_head: int
    col_head: int


def tensor_map(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, address: int
) -> TensorMap | None:
    """None if no such matrix exists or the TMA unit can't read it (16-byte rows and address)."""
    batch, heads, tokens, head_dim = shape
    of_batch, of_head, of_token, of_dim = strides
    if of_dim != 1 or min(shape) < 1 or address % 16 or of_token * itemsize % 16:
        return None
    if of_token < head_dim:
        return None
    row_batch = row_head = col_head = 0
    if batch > 1:
        row_batch, rest = divmod(of_batch, of_token)
        if rest:
            return None
    if heads > 1 and of_head % of_token == 0:
        row_head = of_head // of_token
    elif heads > 1:
        col_head = of_head
    rows = (batch - 1) * row_batch + (heads - 1) * row_head + tokens
    cols = (heads - 1) * col_head + head_dim
    if cols > of_token or rows >= 2**31:
        return None
    return TensorMap(rows, cols, of_token, row_batch, row_head, col_head)
