"""Whole models on a GPU: inductor, CUDA graphs, and dense and sparse steps without a synchronisation."""

from __future__ import annotations

import pytest
import torch

from sta_compile.backend import sta
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES
from tests.end_to_end.oracle import Oracle, window_mask

pytestmark = pytest.mark.gpu
OPTIONS = {"window": (2, 3, 4), "tile": (2, 3, 4), "min_tokens": 0, "noise": "0..1000"}


def on_gpu(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to("cuda", dtype if value.is_floating_point() and value.dim() > 1 else None)
    return tuple(on_gpu(v, dtype) for v in value) if isinstance(value, tuple) else value


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def case(request):
    torch._dynamo.reset()
    case = FAMILIES["wan"].case(batch=2, grid=(5, 9, 11))
    model = case.model.to("cuda", request.param)
    inputs = {name: on_gpu(value, request.param) for name, value in case.inputs.items()}
    tolerance = 1e-5 if request.param is torch.float32 else 2e-2
    return case, model, inputs, tolerance


def at(inputs, *timesteps):
    return {**inputs, "timestep": torch.tensor(timesteps, device="cuda")}


@torch.no_grad()
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_dense_and_sparse_samples_of_one_batch(case, mode):
    case, model, inputs, tolerance = case
    patches = torch._inductor.list_mode_options(mode) if mode else {}
    compiled = torch.compile(model, backend=sta, fullgraph=True, options={**OPTIONS, **patches})
    mask = window_mask((5, 9, 11), (3, 3, 3), (1, 1, 1)).cuda()
    dense = model(**at(inputs, 500, 500))[0]
    with Oracle(model, list(case.sites), mask):
        sparse = model(**at(inputs, 500, 500))[0]
        noisy_sparse = model(**at(inputs, 990, 990))[0]
    noisy = model(**at(inputs, 990, 990))[0]
    assert relative_error(dense, sparse) > 3 * tolerance
    kept = []
    for _ in range(3):
        for timesteps, expected in (
            ((500, 500), sparse),
            ((990, 990), noisy),
            ((990, 500), torch.stack([noisy[0], sparse[1]])),
        ):
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(**at(inputs, *timesteps))[0].clone()
            assert relative_error(found, expected) < tolerance
            kept.append((found, expected))
    assert all(relative_error(found, expected) < tolerance for found, expected in kept)
    assert relative_error(noisy, noisy_sparse) > 3 * tolerance


@torch.no_grad()
def test_no_synchronisation_in_the_steady_state(case):
    _, model, inputs, _ = case
    compiled = torch.compile(model, backend=sta, fullgraph=True, options=OPTIONS)
    steps = [at(inputs, 990, 990), at(inputs, 500, 500)]
    for step in steps:
        compiled(**step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps:
            compiled(**step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gradients(case):
    case, model, inputs, tolerance = case
    mask = window_mask((5, 9, 11), (3, 3, 3), (1, 1, 1)).cuda()
    compiled = torch.compile(model, backend=sta, fullgraph=True, options=OPTIONS)
    step = at(inputs, 500, 500)
    compiled(**step)[0].float().square().mean().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with Oracle(model, list(case.sites), mask):
        model(**step)[0].float().square().mean().backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    whole = [
        torch.cat([g.flatten().float() for g in grads.values()]) for grads in (found, expected)
    ]
    assert relative_error(*whole) < 3 * tolerance
