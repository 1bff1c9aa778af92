from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import sta_compile.ops
from sta_compile.errors import StaError
from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.ir.visibility import Visibility
from sta_compile.ops import reference
from tests import oracle
from tests.ops.problems import BASE, HEAD_WINDOWS, MASKED, VIDEO_MASKED, build, problems


@settings(max_examples=120, deadline=None)
@given(problems(), st.sampled_from([None, 1e4, float("nan")]))
def test_equals_dense_attention_with_the_mask_of_the_definition(problem, poison):
    arguments, mask = build(problem, poison)
    q, k, v, scale = *arguments[:3], arguments[8]
    out, lse = torch.ops.sta.attention(*arguments)
    expected, expected_lse = oracle.attention(q, k, v, mask, scale)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, expected_lse.float(), atol=2e-5, rtol=2e-5)
    assert out.stride() == torch.empty_like(q).stride()


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from([None, float("nan")]))
def test_gradients_equal_those_of_masked_attention(problem, poison):
    arguments, mask = build(problem | {"dtype": torch.float64}, poison)
    inputs = [x.detach().requires_grad_() for x in arguments[:3]]
    dout = torch.randn(inputs[0].shape, dtype=torch.float64)
    out, lse = torch.ops.sta.attention(*inputs, *arguments[3:])
    assert not lse.requires_grad
    expected = oracle.attention(*inputs, mask, arguments[8])[0]
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, dout),
        torch.autograd.grad(expected, inputs, dout),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_gradcheck():
    arguments, _ = build(
        BASE
        | {
            "grid": (3, 3, 1),
            "tiles": (3, 3, 1),
            "segments": [2, 9, 1],
            "heads": (1, 1),
            "head_dim": 2,
        }
    )
    lengths = torch.tensor([[1, 1], [0, 1]])
    inputs = [x.requires_grad_() for x in arguments[:3]]
    assert torch.autograd.gradcheck(
        lambda *x: torch.ops.sta.attention(*x, lengths, *arguments[4:])[0], inputs
    )


def test_second_order_is_refused():
    arguments, _ = build(BASE)
    q = arguments[0].requires_grad_()
    out, _ = torch.ops.sta.attention(q, *arguments[1:])
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(StaError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
@pytest.mark.parametrize(
    "base", [BASE, BASE | {"key_lengths": None, "dense": None}, MASKED, VIDEO_MASKED, HEAD_WINDOWS]
)
def test_opcheck(layout, base):
    problem = base | {"layouts": [layout] * 3, "dtype": torch.float32}
    arguments, _ = build(problem)
    inputs = [x.requires_grad_() for x in arguments[:3]]
    torch.library.opcheck(torch.ops.sta.attention.default, (*inputs, *arguments[3:]))
    out, lse = torch.ops.sta.attention(*arguments)
    backward = (torch.randn_like(out), *arguments[:3], out.detach(), lse, *arguments[3:])
    torch.library.opcheck(
        torch.ops.sta.attention_backward.default,
        tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in backward),
    )


def test_lengths_may_be_symbolic():
    """A grid and lengths that are only known at run time trace without a guard on their values."""
    spec = AttentionSpec(("video", "context"), tiles=(3, 1, 1), window=(1, 1, 1)).text()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def f(x, sizes):
        t, h, w = sizes.tolist()
        video = t * h * w
        segments = [video, x.shape[2] - video]
        x = torch.ops.sta.tile(x, 2, 0, [t, h, w], spec)
        return torch.ops.sta.attention(x, x, x, None, None, segments, [t, h, w], spec, 1.0)[0]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for grid in ([3, 2, 2], [4, 3, 1], [5, 1, 2]):
            x = torch.randn(1, 2, 20, 8)
            video = grid[0] * grid[1] * grid[2]
            args = [video, 20 - video], grid, spec
            tiled = torch.ops.sta.tile(x, 2, 0, grid, spec)
            expected, _ = torch.ops.sta.attention(tiled, tiled, tiled, None, None, *args, 1.0)
            torch.testing.assert_close(f(x, torch.tensor(grid)), expected)


@pytest.mark.parametrize(
    "mapped", [(0, 0, 0, 0, 0), (0, None, 1, None, None), (2, 0, None, 0, None)]
)
@pytest.mark.parametrize("base", [BASE, MASKED, VIDEO_MASKED, HEAD_WINDOWS])
def test_vmap(mapped, base):
    arguments, _ = build(base)
    tensors = [
        x if dim is None else torch.stack([x, x.flip(0), x.clone()], dim)
        for x, dim in zip(arguments[:5], mapped, strict=True)
    ]

    def f(*x):
        return torch.ops.sta.attention(*x, *arguments[5:])

    ours = torch.vmap(f, mapped)(*tensors)
    for i in range(3):
        single = f(
            *(x if d is None else x.select(d, i) for x, d in zip(tensors, mapped, strict=True))
        )
        for a, b in zip(ours, single, strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize(("base", "which"), [(MASKED, -2), (VIDEO_MASKED, -1)])
def test_masks_are_mapped(base, which):
    arguments = list(build(base)[0])
    masks = torch.stack([arguments[which], ~arguments[which], arguments[which].flip(1)])

    def f(mask):
        arguments[which] = mask
        return torch.ops.sta.attention(*arguments)[0]

    found = torch.vmap(f)(masks)
    for each, out in zip(masks, found, strict=True):
        torch.testing.assert_close(out, f(each))


@pytest.mark.parametrize("base", [BASE, MASKED, VIDEO_MASKED])
def test_batched_gradients(base):
    arguments, _ = build(base)
    inputs = [x.requires_grad_() for x in arguments[:3]]
    out, _ = torch.ops.sta.attention(*inputs, *arguments[3:])
    douts = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, inputs, douts, is_grads_batched=True, retain_graph=True)
    for i, dout in enumerate(douts):
        single = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        for a, b in zip(batched, single, strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_uses_the_active_dtype(dtype):
    arguments, _ = build(BASE | {"dtype": torch.float32})
    q, k, v, *rest = arguments
    q = q.requires_grad_()
    mixed = (q, k, v.to(dtype), *rest)
    with pytest.raises(StaError, match="one floating-point dtype"):
        torch.ops.sta.attention(*mixed)
    with torch.autocast("cpu", dtype):
        out, lse = torch.ops.sta.attention(*mixed)
        compiled = torch.compile(torch.ops.sta.attention, backend="aot_eager", fullgraph=True)
        assert compiled(*mixed)[0].dtype == dtype
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    out.sum().backward()
    assert q.grad.dtype == torch.float32
    double, _ = build(BASE)
    with torch.autocast("cpu", dtype):
        assert torch.ops.sta.attention(*double)[0].dtype == torch.float64


@pytest.mark.parametrize("base", [BASE, MASKED])
def test_flops_count_the_pairs_of_the_sparse_branch(base):
    arguments, _ = build(base)
    _, sparse = build(base | {"dense": None, "key_lengths": None, "key_mask": None})
    per_pair = 4 * BASE["heads"][0] * BASE["head_dim"]
    inputs = [x.requires_grad_() for x in arguments[:3]]
    with FlopCounterMode(display=False) as counter:
        out, _ = torch.ops.sta.attention(*inputs, *arguments[3:])
    assert counter.get_total_flops() == per_pair * int(sparse.sum())
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == per_pair * int(sparse.sum()) * 5 // 2


@pytest.mark.parametrize("tokens", [1, 17, 100, 127, 129, 1025])
def test_awkward_lengths(tokens):
    n = 1 if tokens < 3 else 5
    problem = BASE | {
        "grid": (1, 1, tokens),
        "tiles": (1, 1, n),
        "window": (1, 1, 3),
        "segments": [4, tokens, 3],
        "dtype": torch.float32,
        "key_lengths": [[1, 0], [4, 2]],
    }
    arguments, mask = build(problem)
    expected, _ = oracle.attention(*arguments[:3], mask, arguments[-1])
    torch.testing.assert_close(
        torch.ops.sta.attention(*arguments)[0], expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 96, 120, 128, 160, 256])
def test_head_dims(head_dim):
    arguments, mask = build(BASE | {"head_dim": head_dim, "scale": head_dim**-0.5})
    expected, _ = oracle.attention(*arguments[:3], mask, arguments[-1])
    torch.testing.assert_close(torch.ops.sta.attention(*arguments)[0], expected)


def test_large_values_in_half_precision_stay_finite():
    arguments, mask = build(BASE | {"dtype": torch.float16})
    q, k, v, *rest = arguments
    v = v * 1e3
    out, _ = torch.ops.sta.attention(q, k, v, *rest)
    expected, _ = oracle.attention(q.float(), k.float(), v.float(), mask, rest[-1])
    assert out.isfinite().all()
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2.0)


def test_blocks_of_rows_and_keys_do_not_change_the_result(monkeypatch):
    arguments, mask = build(BASE)
    inputs = [x.requires_grad_() for x in arguments[:3]]
    expected, _ = oracle.attention(*inputs, mask, arguments[-1])
    monkeypatch.setattr(reference, "BLOCK_KEYS", 7)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 2 * 4 * 7 * 3)
    out, _ = torch.ops.sta.attention(*inputs, *arguments[3:])
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, inputs, dout),
        torch.autograd.grad(expected, inputs, dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("window", [(3, 3, 3), (5, 4, 8)])
def test_memory_is_linear_in_tokens(window, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_SCORES", 1 << 13)
    grid, tiles, context = (5, 8, 16), (5, 4, 8), 64
    tokens = 5 * 8 * 16 + context
    spec = AttentionSpec(("video", "context"), tiles=tiles, window=window).text()
    q, k, v = (torch.randn(1, 2, tokens, 8) for _ in range(3))
    problem = None, None, [tokens - context, context], list(grid), spec, 0.3
    with Largest() as largest:
        visible = Visibility(sta_compile.ops.attention.geometry_of(*problem[2:5]))
        out, lse = reference.forward(q, k, v, visible, 0.3)
        reference.backward(out, q, k, v, out, lse, visible, 0.3)
    assert 2 * tokens * 8 <= largest.elements <= 2 * tokens * 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(2, 3, 72, 8)}, "multiple of the key heads"),
        ({0: torch.zeros(2, 4, 71, 8), 1: torch.zeros(2, 2, 71, 8)}, "must agree"),
        ({0: torch.zeros(4, 72, 8)}, "4-D"),
        ({3: torch.zeros(2, 1, dtype=torch.int32)}, "one valid length per sample"),
        ({4: torch.zeros(2)}, "one flag per sample"),
        ({5: [7, 61, 4]}, "token grid"),
        ({5: [12, 60]}, "one length per role"),
        ({5: [6, 60, 5]}, "add up"),
        ({9: torch.ones(2, 72, dtype=torch.bool)}, "one flag per sample and key"),
        ({9: torch.ones(2, 12)}, "one flag per sample and key"),
    ],
)
def test_errors_say_what_to_do(change, message):
    arguments = [*build(BASE | {"dtype": torch.float32})[0], None]
    for index, value in change.items():
        arguments[index] = value
    with pytest.raises(StaError, match=message):
        torch.ops.sta.attention(*arguments)
