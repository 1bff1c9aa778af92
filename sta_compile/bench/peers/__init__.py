"""Other attention kernels: each takes the same tensors, or says why it can't."""

from __future__ import annotations

from .flash_attention_4 import FlashAttention4
from .flex import Flex
from .peer import Peer
from .sdpa import Sdpa
from .windows import FastVideo, Natten

PEERS: tuple[Peer, ...] = (
    Sdpa("cudnn", "CUDNN_ATTENTION"),
    Sdpa("flash", "FLASH_ATTENTION"),
    FlashAttention4("flash-attn-4", dense=True),
    FlashAttention4("flash-attn-4 STA", dense=False),
    FastVideo(),
    Flex("flex STA"),
    Flex("flex NATTEN"),
    Flex("flex Swin"),
    Natten(),
)
