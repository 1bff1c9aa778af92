"""One small call of each kind of kernel, to be run under NVIDIA's compute-sanitizer.

    for tool in memcheck racecheck initcheck synccheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --report-api-errors no \\
            --error-exitcode 1 python benchmarks/sanitize.py
    done

Without PyTorch's caching of memory each tensor is an allocation of its own, so that memcheck sees a
read or write past its end. Every result is compared with the PyTorch reference, which runs on the
CPU: the tools slow each GPU kernel down, and only ours is in question. Errors of API calls are left out: NVIDIA's Python
bindings ask the driver for functions of every CUDA version, and each that it lacks is one. C++ cases run their backward
pass too, both ways, but for those in fp8, which have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import sta_compile.ops  # noqa: F401  registers the operator
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.runtime import launch

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """heads: of q, of k and v. text: tokens of the contexts before and after the video.

    valid: valid tokens of each context by sample. dense: flag of each sample.
    """

    name: str
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    grid: Triple = (5, 9, 11)  # in ragged tiles of 3x4 or 3x3
    tiles: Triple = (1, 3, 3)
    window: Triple = (1, 1, 3)
    heads: tuple[int, int] = (1, 1)
    text: tuple[int, int] = (0, 0)
    valid: tuple[tuple[int, int], ...] | None = None
    dense: tuple[bool, ...] | None = None
    token_major: bool = True
    skip: int = 0  # elements before each tensor in its memory
    kernel: str = "triton"
    precision: str = "native"


TEXT, VALID = (70, 33), ((70, 33), (5, 0))
CASES = (
    Case("tma, ragged tiles", 128),
    Case(
        "tma, blocks of 128 rows, head-major",
        128,
        grid=(4, 8, 12),
        tiles=(1, 1, 3),
        heads=(2, 1),
        text=(120, 0),
        valid=((120, 0), (5, 0)),
        token_major=False,
    ),
    Case("tma, contexts, lengths, dense", 128, text=TEXT, valid=VALID, dense=(False, True)),
    Case(
        "tma, d64, shared key heads", 64, text=TEXT, valid=VALID, heads=(4, 2), dense=(True, False)
    ),
    Case("pointer, d72", 72),
    Case("pointer, d72, contexts, lengths, dense", 72, text=TEXT, valid=VALID, dense=(False, True)),
    Case("pointer, rows not aligned", 64, torch.float16, skip=1),
    Case("fp32", 64, torch.float32, text=TEXT, valid=VALID, dense=(True, False)),
    Case("C++, ragged tiles", 128, kernel="cutlass"),
    Case(
        "C++, head-major, d64, fp16",
        64,
        torch.float16,
        heads=(2, 2),
        token_major=False,
        kernel="cutlass",
    ),
    Case("C++, part of a box, d72", 72, heads=(3, 3), kernel="cutlass"),
    Case("C++, d256", 256, kernel="cutlass"),
    Case(
        "C++, contexts, lengths, dense, shared key heads",
        128,
        heads=(4, 2),
        text=TEXT,
        valid=VALID,
        dense=(False, True),
        kernel="cutlass",
    ),
    Case("fp8, ragged tiles", 128, kernel="cutlass", precision="fp8"),
    Case(
        "fp8, contexts, lengths, dense, shared key heads, d80, head-major",
        80,
        torch.float16,
        heads=(4, 2),
        text=TEXT,
        valid=VALID,
        dense=(False, True),
        token_major=False,
        kernel="cutlass",
        precision="fp8",
    ),
)


def run(case: Case) -> tuple[float, str]:
    """(relative error, kernel)"""
    generator = torch.Generator().manual_seed(0)
    video = case.grid[0] * case.grid[1] * case.grid[2]
    before, after = case.text
    contexts = before + after > 0
    segments = [before, video, after] if contexts else [video]
    roles = ("context", "video", "context") if contexts else ("video",)
    batch, tokens = len(case.dense or case.valid or (0,)), sum(segments)

    def tensors(heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """On the CPU and on the GPU."""
        axes = (tokens, heads) if case.token_major else (heads, tokens)
        shape = (batch, *axes, case.head_dim)
        size = batch * tokens * heads * case.head_dim
        flat = torch.randn(size + case.skip, generator=generator).to(case.dtype)
        both = (x[case.skip :].view(shape) for x in (flat, flat.cuda()))
        cpu, gpu = (x.transpose(1, 2) if case.token_major else x for x in both)
        return cpu, gpu

    pairs = [tensors(heads) for heads in (case.heads[0], case.heads[1], case.heads[1])]
    lengths = None if case.valid is None else torch.tensor(case.valid, dtype=torch.int32)
    dense = None if case.dense is None else torch.tensor(case.dense)
    scale = case.head_dim**-0.5

    def arguments(kernel: str, move: Callable[..., torch.Tensor], which: int) -> list[Any]:
        spec = AttentionSpec(
            roles,
            tiles=case.tiles,
            window=case.window,
            kernel=kernel,
            precision="native" if kernel == "reference" else case.precision,
        ).text()
        extra = [None if x is None else move(x) for x in (lengths, dense)]
        q, k, v = (pair[which] for pair in pairs)
        return [q, k, v, *extra, segments, list(case.grid), spec, scale]

    built = set(launch._built)
    ours = arguments(case.kernel, torch.Tensor.cuda, 1)
    exact = arguments("reference", torch.Tensor.cpu, 0)
    first, second = (torch.ops.sta.attention(*ours) for _ in range(2))
    assert first[0].equal(second[0]), "a second launch differs from the first"
    expected = torch.ops.sta.attention(*exact)
    error = relative(first[0], expected[0])
    if case.kernel == "cutlass" and case.precision == "native":
        dout = tensors(case.heads[0])
        backward = torch.ops.sta.attention_backward
        wanted = backward(dout[0], *exact[:3], *expected, *exact[3:])
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            found = backward(dout[1], *ours[:3], *first, *ours[3:])
            error = max(error, *(relative(x, y) for x, y in zip(found, wanted, strict=True)))
        torch.use_deterministic_algorithms(False)
    kernels = [spec.text() for spec, _ in launch._built.keys() - built]
    return error, ", ".join(sorted(kernels)) or "of an earlier case"


def relative(x: torch.Tensor, expected: torch.Tensor) -> float:
    x, expected = x.cpu().float(), expected.float()
    return ((x - expected).norm() / expected.norm()).item()


def main() -> None:
    start = time.time()
    for case in CASES:
        error, kernel = run(case)
        print(f"{case.name}: error {error:.1e}, kernel {kernel}", flush=True)
        limit = 1e-4 if case.dtype == torch.float32 else 1e-2
        assert error < (limit if case.precision == "native" else 6e-2), case.name
    print(f"sanitize: {len(CASES)} cases ran and are right, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
