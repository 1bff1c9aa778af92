"""Builds kernels before they are needed: when a model is compiled, and for GPUs that are not there."""

from __future__ import annotations

import torch
from torch import Tensor

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


def prepare(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    keys: int,
    dtype: torch.dtype,
    device: torch.device,
    geometry: Geometry | None,
    contexts: int,
    *,
    token_major: bool = True,
    lengths: torch.dtype | None = None,
    dense: bool = False,
    masked: bool = False,
    video_masked: bool = False,
    scale: float = 1.0,
    kernel: str = "auto",
) -> tuple[str, ...]:
    """Builds what calls on tensors [batch, heads, tokens, head_dim] will launch; texts of the kernels.

    keys: tokens of k and v. geometry: None for a grid that is not known yet: builds every block size that may be chosen.
    token_major: memory is [batch, tokens, heads, head_dim]. device: on meta, kernels are compiled for the target that
    the option `target` names, and not loaded. Failures are kept and reported as for a call, so that a model never fails
    to compile because a kernel does.
    """
    batch, heads, queries, head_dim = shape
    if detect(device).kind != "cuda" or kernel == "reference":
        return ()

    def empty(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=kind, device="meta")

    def vectors(count: int, tokens: int) -> Tensor:
        if token_major:
            return empty(batch, tokens, count, head_dim).transpose(1, 2)
        return empty(batch, count, tokens, head_dim)

    q, k = vectors(heads, queries), vectors(kv_heads, keys)
    tensors = Tensors(
        q,
        k,
        k,
        q,
        empty(batch, heads, queries, kind=torch.float32),
        None if lengths is None else empty(batch, contexts, kind=lengths),
        empty(batch, kind=torch.bool) if dense else None,
        empty(batch, keys, kind=torch.bool) if masked else None,
        empty(batch, keys, kind=torch.bool) if video_masked else None,
        empty(batch, kind=torch.bool) if video_masked else None,
    )
    problem = problem_of(tensors, geometry or _one_tile(keys, contexts), scale, device)
    known = geometry is not None
    choices = (
        [(spec,) for spec in select(problem, kernel)[0]] if known else candidates(problem, kernel)
    )
    done: list[str] = []
    for specs in choices:  # of one emitter; the next is for where it fails
        works = [spec.text() for spec in specs if _build(spec, device)]
        done += works
        if len(works) == len(specs):
            break
    return tuple(done)


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


def _one_tile(tokens: int, contexts: int) -> Geometry:
    one = (1, 1, 1)
    roles = ("video", *("context",) * contexts)
    return Geometry((tokens, *(0,) * contexts), roles, Tiling((1, 1, tokens), one), Window(one))
