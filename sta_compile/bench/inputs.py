"""The tensors of a workload, and the operator's call on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..ops import library  # noqa: F401  registers the operators
from ..runtime import launch, launch_backward
from ..runtime.prepare import Request
from .patterns import Pattern
from .workloads import Workload, dtype_of

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Contestant:
    """run: what is timed. result: runs it once, for the check: out and perhaps lse, or dq, dk, dv of a backward workload.

    Results are [batch, heads, tokens, head_dim], lse without the last axis; pattern says what they are of.
    """

    name: str
    pattern: Pattern
    run: Callable[[], object]
    result: Callable[[], Tensors]


@dataclass(frozen=True)
class Inputs:
    """q, k, v, dout: [batch, heads, tokens, head_dim]; what pads the text is NaN in k and v."""

    workload: Workload
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    scale: float

    @staticmethod
    def make(workload: Workload, device: torch.device) -> Inputs:
        w, tokens = workload, sum(workload.segments)
        generator = torch.Generator(device).manual_seed(0)

        def tensor() -> Tensor:
            shape = (w.batch, w.heads, tokens, w.head_dim)
            if w.token_major:
                shape = (w.batch, tokens, w.heads, w.head_dim)
            x = torch.randn(shape, device=device, dtype=dtype_of(device), generator=generator)
            return x.transpose(1, 2) if w.token_major else x

        q, k, v = tensor(), tensor(), tensor()
        dout = tensor() if w.backward else q
        for x in (k, v):
            x[:, :, w.video + w.valid :] = torch.nan
        return Inputs(w, q, k, v, dout, w.head_dim**-0.5)

    @cached_property
    def head_major(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v in contiguous [batch, heads, tokens, head_dim], with the keys that pad the text cut off."""
        keys = self.workload.video + self.workload.valid
        k, v = (x[:, :, :keys].contiguous() for x in (self.k, self.v))
        return self.q.contiguous(), k, v

    @cached_property
    def token_major(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same in contiguous [batch, tokens, heads, head_dim]."""
        keys = self.workload.video + self.workload.valid
        k, v = (x.transpose(1, 2)[:, :keys].contiguous() for x in (self.k, self.v))
        return self.q.transpose(1, 2).contiguous(), k, v

    def request(self, kernel: str) -> Request:
        """What decides the kernels of the call."""
        w = self.workload
        return Request(
            (w.batch, w.heads, sum(w.segments), w.head_dim),
            w.heads,
            sum(w.segments),
            self.q.dtype,
            self.q.device,
            w.geometry(),
            len(w.segments) - 1,
            token_major=w.token_major,
            lengths=torch.int64 if w.text else None,
            dense=bool(w.dense),
            scale=self.scale,
            kernel=kernel,
            precision=w.precision,
        )

    def call(self, kernel: str) -> launch.Call:
        """The operator's arguments."""
        w, device = self.workload, self.q.device
        lengths = torch.tensor([[w.valid]] * w.batch, device=device) if w.text else None
        dense = torch.tensor(w.dense, device=device) if w.dense else None
        problem = (lengths, dense, w.segments, list(w.grid), w.spec(kernel), self.scale)
        return launch.Call(self.q, self.k, self.v, *problem)


def ours(inputs: Inputs, kernel: str) -> Contestant:
    call = inputs.call(kernel)
    if inputs.workload.backward:
        problem = call[3:9]

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = torch.ops.sta.attention(q, k, v, *problem)[0]
            return out

        return differentiated("sta", inputs.workload.pattern, attention, call[:3], inputs.dout)

    def run() -> Tensors:
        result: Tensors = torch.ops.sta.attention(*call[:9])
        return result

    return Contestant("sta", inputs.workload.pattern, run, run)


def differentiated(
    name: str,
    pattern: Pattern,
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    qkv: Tensors,
    dout: Tensor,
) -> Contestant:
    """The backward of `attention` (q, k, v -> out, [batch, heads, tokens, head_dim]) alone; its forward runs once."""
    leaves = tuple(x.detach().requires_grad_() for x in qkv)
    out = attention(*leaves)

    def run() -> Tensors:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return Contestant(name, pattern, run, run)


def kernel_of(inputs: Inputs, kernel: str) -> str:
    """What ran the workload's direction."""
    call = inputs.call(kernel)
    if inputs.workload.backward:
        return launch_backward.kernels_of(call)
    return launch.kernel_of(call)
