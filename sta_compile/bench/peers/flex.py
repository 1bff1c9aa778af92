"""FlexAttention with the same window, and with NATTEN's and Swin's windows of the same extents."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inputs import Contestant, Inputs, differentiated
from ..patterns import Pattern
from .peer import neighbourhood, swin

BLOCK = 128


@dataclass(frozen=True)
class Flex:
    name: str
    dense: bool = False

    def refuse(self, inputs: Inputs) -> str:
        if inputs.workload.text:
            return "its masks are written for video tokens alone"
        return ""

    def prepare(self, inputs: Inputs) -> Contestant:
        pattern = self._pattern(inputs)
        q, k, v = inputs.head_major
        mask = block_mask(pattern, q, k)
        function = flex_attention(q)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = function(q, k, v, block_mask=mask, scale=inputs.scale)
            return out

        if inputs.workload.backward:
            return differentiated(self.name, pattern, attention, (q, k, v), inputs.dout)
        return Contestant(
            self.name, pattern, lambda: attention(q, k, v), lambda: (attention(q, k, v),)
        )

    def _pattern(self, inputs: Inputs) -> Pattern:
        if self.name == "flex STA":
            return inputs.workload.pattern
        return neighbourhood(inputs) if self.name == "flex NATTEN" else swin(inputs)


def block_mask(pattern: Pattern, q: Tensor, k: Tensor) -> Any:
    """Which blocks of 128 x 128 are full, and which a mask is computed in. Takes memory of a row of blocks at a time."""
    from torch.nn.attention.flex_attention import BlockMask

    sees, rows, keys = pattern.sees(q.device), q.shape[2], k.shape[2]
    columns = torch.arange(keys, device=q.device)
    counts = []
    for chunk in torch.arange(rows, device=q.device).split(BLOCK):
        seen = sees(None, None, chunk[:, None], columns[None]).sum(0)
        counts.append(F.pad(seen, (0, -keys % BLOCK)).view(-1, BLOCK).sum(1))
    count = torch.stack(counts)
    full = count == BLOCK * BLOCK  # blocks that stick out are masked
    lists = *_lists((count > 0) & ~full), *_lists(full)
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(rows, keys)
    )


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of bool [row blocks, key blocks]: how many of a row, and which, those that are not last."""
    number = blocks.sum(1, dtype=torch.int32)
    index = blocks.int().argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return number[None, None], index[None, None]


def flex_attention(like: Tensor) -> Any:
    """Compiled on a GPU. On a CPU as it is: right, and without a kernel."""
    from torch.nn.attention.flex_attention import flex_attention as function

    if like.is_cuda:
        return torch.compile(function, dynamic=False)

    def unfused(*arguments: Any, **named: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not compiled
            return function(*arguments, **named)

    return unfused
