"""Builds kernels before they are needed: when a model is compiled, and for GPUs that are not there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..codegen import cutlass_backward
from ..codegen.emitter import Problem
from ..codegen.select import candidates, select
from ..ir.geometry import Geometry
from ..ir.kernel_spec import KernelSpec
from ..ir.tiling import Tiling
from ..ir.window import Window
from .launch import built, fail
from .problem import problem_of
from .runner import runner_of
from .target import detect
from .tensors import Tensors


@dataclass(frozen=True)
class Request:
    """What decides the kernels of a call, without its tensors.

    shape: of q, [batch, heads, tokens, head_dim]. keys: tokens of k and v. geometry: None for a grid that is not known yet.
    token_major: memory is [batch, tokens, heads, head_dim]. device: on meta, kernels are those of the target that the
    option `target` names. kernel, choice, precision: as in AttentionSpec. backward: gradients will be asked for.
    head_windows: heads have windows of their own; `geometry` says so too.
    """

    shape: tuple[int, int, int, int]
    kv_heads: int
    keys: int
    dtype: torch.dtype
    device: torch.device
    geometry: Geometry | None
    contexts: int
    token_major: bool = True
    lengths: torch.dtype | None = None
    dense: bool = False
    masked: bool = False
    video_masked: bool = False
    scale: float = 1.0
    kernel: str = "auto"
    choice: str = ""
    backward: bool = False
    head_windows: bool = False
    precision: str = "native"

    def tensors(self, device: str | torch.device = "meta") -> Tensors:
        """Of such a call; what is in them is not defined."""
        batch, heads, queries, head_dim = self.shape
        contexts, keys = self.contexts, self.keys

        def empty(*sizes: int, kind: torch.dtype = torch.bool, when: bool = True) -> Any:
            return torch.empty(sizes, dtype=kind, device=device) if when else None

        def vectors(count: int, tokens: int) -> Tensor:
            order = (tokens, count) if self.token_major else (count, tokens)
            x: Tensor = empty(batch, *order, head_dim, kind=self.dtype)
            return x.transpose(1, 2) if self.token_major else x

        return Tensors(
            vectors(heads, queries),
            vectors(self.kv_heads, keys),
            vectors(self.kv_heads, keys),
            vectors(heads, queries),
            empty(batch, heads, queries, kind=torch.float32),
            empty(batch, contexts, kind=self.lengths or torch.int32, when=self.lengths is not None),
            empty(batch, when=self.dense),
            empty(batch, keys, when=self.masked),
            empty(batch, keys, when=self.video_masked),
            empty(batch, when=self.video_masked),
        )

    def problem(self) -> Problem:
        heads = self.shape[1] if self.head_windows else 0
        geometry = self.geometry or _one_tile(self.keys, self.contexts, heads)
        return problem_of(self.tensors(), geometry, self.scale, self.device, self.precision)

    @property
    def has_kernels(self) -> bool:
        """Is it for a GPU that has kernels, and not for the PyTorch reference?"""
        return detect(self.device).kind == "cuda" and self.kernel != "reference"


def prepare(request: Request) -> tuple[str, ...]:
    """Builds what such calls will launch; texts of the kernels. Where the grid is not known, every block size that may be.

    For a device on meta kernels are compiled and not loaded. Failures are kept and reported as for a call, so that a model
    never fails to compile because a kernel does.
    """
    if not request.has_kernels:
        return ()
    done: list[str] = []
    for specs in choices(request):  # of one emitter; the next is for where it fails
        works = [spec.text() for spec in specs if _build(spec, request.device)]
        done += works
        if len(works) == len(specs):
            break
    if request.backward:
        specs = cutlass_backward.kernels(
            request.problem(), request.kernel, torch.are_deterministic_algorithms_enabled()
        )
        done += [spec.text() for spec in specs if _build(spec, request.device)]
    return tuple(done)


def choices(request: Request) -> tuple[tuple[KernelSpec, ...], ...]:
    """The forward kernels of each emitter that may run such calls, preferred first; several where the grid is not known."""
    problem = request.problem()
    if request.geometry is None:
        return candidates(problem, request.kernel)
    return tuple((spec,) for spec in select(problem, request.kernel, request.choice)[0])


def _build(spec: KernelSpec, device: torch.device) -> bool:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return built(spec, index) is not None
    try:
        runner_of(spec.emitter).compile(spec)
    except Exception as error:
        fail(spec, error)
        return False
    return True


def _one_tile(tokens: int, contexts: int, heads: int) -> Geometry:
    """heads: those with windows of their own."""
    tiling, window = Tiling((1, 1, tokens), (1, 1, 1)), Window((1, 1, 1))
    roles = ("video", *("context",) * contexts)
    return Geometry((tokens, *(0,) * contexts), roles, tiling, window, (window,) * heads)
