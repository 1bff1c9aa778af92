"""precision="fp8" and "nvfp4" of the operator on a CPU: their arithmetic in PyTorch, and what keeps them from being used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sta_compile.errors import StaError
from sta_compile.ir.attention_spec import AttentionSpec
from tests import oracle

CASES = {
    "ragged": ((5, 9, 11), (2, 3, 4), (1, 3, 3), ("video",), [495], None, None),
    "text, a dense sample": (
        (4, 6, 7),
        (2, 3, 3),
        (1, 1, 3),
        ("context", "video", "context"),
        [40, 168, 21],
        [[40, 0], [7, 21]],
        [False, True],
    ),
    "keys only": ((4, 6, 7), (2, 3, 3), (1, 1, 3), ("keys", "video"), [40, 168], [[40], [0]], None),
    "a window for each head": (
        (4, 6, 7),
        (2, 3, 3),
        ((1, 1, 3), (2, 3, 1)),
        ("video", "context"),
        [168, 9],
        None,
        [False, True],
    ),
}  # fmt: skip


def arguments(case, precision="fp8", masked=False, head_dim=32):
    grid, tiles, window, roles, segments, lengths, flags = CASES[case]
    torch.manual_seed(0)
    keys = sum(segments)
    queries = sum(n for n, role in zip(segments, roles, strict=True) if role != "keys")
    q = torch.randn(2, queries, 2, head_dim).transpose(1, 2)
    k, v = (torch.randn(2, 1, keys, head_dim) for _ in range(2))
    lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    flags = None if flags is None else torch.tensor(flags)
    context = keys - grid[0] * grid[1] * grid[2]
    mask = torch.rand(2, context) < 0.6 if masked else None
    video = torch.rand(2, keys - context) < 0.6 if masked else None
    spec = AttentionSpec(roles, tiles=tiles, window=window, precision=precision).text()
    windows = window if isinstance(window[0], tuple) else (window,)
    extra = lengths, flags, mask, video
    seen = [oracle.full_mask(grid, tiles, w, roles, segments, 2, *extra) for w in windows]
    seen = torch.stack(seen, 1)
    hidden = ~seen.any(1).any(1)[:, None, :, None]
    k, v = (x.masked_fill(hidden, torch.nan) for x in (k, v))
    return [q, k, v, lengths, flags, segments, list(grid), spec, 0.2, mask, video], seen


@pytest.mark.parametrize(
    ("precision", "head_dim", "least", "most"),
    [("fp8", 32, 5e-3, 6e-2), ("nvfp4", 32, 6e-2, 0.2), ("nvfp4", 40, 6e-2, 0.2)],
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_it_is_near_the_definition_and_not_native(case, masked, precision, head_dim, least, most):
    given, seen = arguments(case, precision, masked, head_dim)
    out, lse = torch.ops.sta.attention(*given)
    q, k, v = given[:3]
    expected, expected_lse = oracle.attention(q, k.nan_to_num(), v.nan_to_num(), seen, 0.2)
    error = float((out - expected).norm() / expected.norm())
    assert least < error < most
    torch.testing.assert_close(lse, expected_lse, atol=2.5 * most, rtol=0)
    assert out.stride() == torch.empty_like(q).stride()


def test_gradients_and_what_they_are_of_are_native():
    given, _ = arguments("ragged")
    native, _ = arguments("ragged", "native")
    q = given[0].clone().requires_grad_()
    out, _ = torch.ops.sta.attention(q, *given[1:])
    twin = native[0].clone().requires_grad_()
    expected, _ = torch.ops.sta.attention(twin, *native[1:])
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(q.grad, twin.grad)
    with torch.no_grad():
        assert not torch.equal(torch.ops.sta.attention(q, *given[1:])[0], expected)


def test_the_precision_is_in_the_spec():
    spec = AttentionSpec(("video",), tiles=(1, 1, 2), window=(1, 1, 1), precision="fp8")
    assert spec.text().endswith(" precision=fp8")
    assert AttentionSpec.parse(spec.text()) == spec
    assert "precision" not in replace(spec, precision="native").text()
    with pytest.raises(StaError, match="pass one of native, fp8, nvfp4, tiered"):
        replace(spec, precision="fp4")
