"""flash-attn-4: dense, and with the same window as blocks of 128 x 128."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from ..inputs import Contestant, Inputs, differentiated
from .flex import BLOCK, block_mask
from .peer import missing, needs_gpu


@dataclass(frozen=True)
class FlashAttention4:
    name: str
    dense: bool

    def refuse(self, inputs: Inputs) -> str:
        w = inputs.workload
        reason = needs_gpu(inputs) or missing("flash_attn.cute", "flash-attn-4")
        if reason or self.dense:
            return reason
        if w.text or w.tiling.ragged_axes or prod(w.tiling.extents) % BLOCK:
            return f"tiles are not multiples of its blocks of {BLOCK} tokens"
        return ""

    def prepare(self, inputs: Inputs) -> Contestant:
        from flash_attn.cute.interface import flash_attn_func

        w = inputs.workload
        blocks: dict[str, Any] = {} if self.dense else _blocks(inputs)
        qkv = inputs.token_major

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Any = flash_attn_func(q, k, v, softmax_scale=inputs.scale, **blocks)
            first: Tensor = out[0] if isinstance(out, tuple) else out
            return first.transpose(1, 2)

        pattern = w.everything if self.dense else w.pattern
        if w.backward:

            def swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return attention(*(x.transpose(1, 2) for x in (q, k, v)))

            views = tuple(x.transpose(1, 2) for x in qkv)
            return differentiated(self.name, pattern, swapped, views, inputs.dout)
        return Contestant(self.name, pattern, lambda: attention(*qkv), lambda: (attention(*qkv),))


def _blocks(inputs: Inputs) -> dict[str, Any]:
    """Lists of blocks, for the forward by queries and for the backward by keys; all of them are full."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    q, k, _ = inputs.head_major
    mask = block_mask(inputs.workload.pattern, q, k)

    def lists(side: str) -> Any:
        names = (f"{side}_num_blocks", f"{side}_indices")
        tensors = [getattr(mask, name) for name in (*names, *(f"full_{name}" for name in names))]
        return BlockSparseTensorsTorch(*tensors, block_size=(BLOCK, BLOCK))

    found = {"block_sparse_tensors": lists("kv")}
    if inputs.workload.backward:
        found["block_sparse_tensors_bwd"] = lists("q")
    return found
