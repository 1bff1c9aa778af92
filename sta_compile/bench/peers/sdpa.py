"""Dense attention of torch: scaled_dot_product_attention by cuDNN, and by FlashAttention-2."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..inputs import Contestant, Inputs, differentiated
from .peer import needs_gpu


@dataclass(frozen=True)
class Sdpa:
    """backend: a name of SDPBackend."""

    name: str
    backend: str
    dense: bool = True

    def refuse(self, inputs: Inputs) -> str:
        return needs_gpu(inputs) if self.name == "cudnn" else ""

    def prepare(self, inputs: Inputs) -> Contestant:
        backend = getattr(SDPBackend, self.backend)
        q, k, v = inputs.head_major

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, scale=inputs.scale)

        pattern = inputs.workload.everything
        if inputs.workload.backward:
            return differentiated(self.name, pattern, attention, (q, k, v), inputs.dout)
        return Contestant(
            self.name, pattern, lambda: attention(q, k, v), lambda: (attention(q, k, v),)
        )
