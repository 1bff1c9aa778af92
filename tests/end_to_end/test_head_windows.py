"""A window for each head: what the compiled model computes, what the report says of it, and what a list may not be."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sta_compile.errors import InvalidOptionError
from sta_compile.option_values import window
from sta_compile.planning.choose_tiles import plan_attention
from tests.end_to_end.compiled import RewritingBackend, compile_variants, relative_error
from tests.end_to_end.oracle import window_mask
from tests.end_to_end.tiny import TinyVideo

GRID = T, H, W = 3, 4, 6
TILE = (1, 2, 2)
WINDOWS = ((1, 6, 6), (3, 2, 6), (1, 2, 2), (3, 4, 6))  # in tokens; the last is the whole grid
LIST = {"window": (*WINDOWS[:3], "full"), "tile": TILE}


def latent(grid=GRID, batch=2) -> Tensor:
    return torch.randn(batch, 4, *grid, generator=torch.Generator().manual_seed(0))


def expected(model: TinyVideo, words: int, grid=GRID, **inputs: Tensor) -> Tensor:
    """The eager model with the definition's mask for each head."""
    plan = plan_attention(grid, window(LIST["window"]), TILE)
    masks = [window_mask(grid, plan.tiling.tiles, each.tiles) for each in plan.head_windows]
    mask = F.pad(torch.stack(masks), (0, words, 0, words), value=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, given: Tensor | None) -> Tensor:
        seen = mask if given is None else mask & given
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=k.shape[1] != q.shape[1])

    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attn.attend = attend
    with torch.no_grad():
        return model(**inputs)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("text", [0, 5])
def test_equals_the_masked_model(kv_heads, text):
    model = TinyVideo(heads=4, kv_heads=kv_heads, layers=2)
    inputs = {"latent": latent()}
    if text:
        valid = torch.arange(text) < torch.tensor([[text], [text - 3]])
        inputs |= {"text": torch.randn(2, text, 16), "valid": valid}
    (variant,) = compile_variants(model, inputs, {"sta": LIST}).values()
    assert [site.name for site in variant.report.replaced] == model.sites
    with torch.no_grad():
        found = variant.run(**inputs)
    assert relative_error(found, expected(model, text, **inputs)) < 1e-5


def test_grids_known_only_at_run_time():
    model = TinyVideo(heads=4)
    compiled = torch.compile(model, backend=RewritingBackend({"sta": LIST}), dynamic=True)
    for grid in (GRID, (2, 6, 5), (5, 3, 7)):
        x = latent(grid)
        torch._dynamo.mark_dynamic(x, (2, 3, 4))
        with torch.no_grad():
            assert relative_error(compiled(x), expected(model, 0, grid, latent=x)) < 1e-5


def test_gradients():
    model = TinyVideo(heads=4, kv_heads=2).double()
    x = latent().double().requires_grad_()
    compiled = torch.compile(model, backend=RewritingBackend({"sta": LIST}))
    direction = torch.randn_like(x)

    def gradients(run):
        return torch.autograd.grad(run(x), [x, *model.parameters()], direction)

    plan = plan_attention(GRID, WINDOWS, TILE)
    mask = torch.stack([window_mask(GRID, plan.tiling.tiles, w.tiles) for w in plan.head_windows])
    ours = gradients(compiled)
    model.blocks[0].attn.attend = lambda q, k, v, _: F.scaled_dot_product_attention(
        q, k, v, mask, enable_gqa=True
    )
    for a, b in zip(ours, gradients(model), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_the_report():
    model = TinyVideo(heads=4)
    (variant,) = compile_variants(model, {"latent": latent()}, {"sta": LIST}).values()
    (site,) = variant.report.replaced
    assert (site.windows, site.window) == (4, (3, 2, 3))
    shares = [
        w_t * w_h * w_w / 18 for w_t, w_h, w_w in ((1, 2, 3), (3, 1, 3), (1, 1, 1), (3, 2, 3))
    ]
    assert site.kept == pytest.approx(sum(shares) / 4)
    assert "4 by head, up to 3x2x3 tiles" in str(variant.report)


def test_a_list_of_equal_windows_is_that_window():
    model, x = TinyVideo(heads=2), latent()
    wanted = {
        "list": {"window": [(1, 6, 6)] * 2, "tile": TILE},
        "one": {"window": (1, 6, 6), "tile": TILE},
    }
    variants = compile_variants(model, {"latent": x}, wanted)
    sites = [variant.report.replaced for variant in variants.values()]
    assert sites[0] == sites[1]
    whole = compile_variants(model, {"latent": x}, {"full": {"window": [GRID] * 2}})["full"]
    assert whole.report.replaced[0].exact


def test_as_many_windows_as_heads():
    with pytest.raises(InvalidOptionError, match=r"lists 4 windows, and blocks.0.attn has 2 heads"):
        compile_variants(TinyVideo(heads=2), {"latent": latent()}, {"sta": LIST})


def test_heads_that_are_merged_with_the_batch():
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        merged = (x.flatten(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(*merged).view(q.shape)

    model = TinyVideo(heads=4, attend=attend)
    (variant,) = compile_variants(model, {"latent": latent()}, {"sta": LIST}).values()
    assert "heads are merged with the batch" in variant.report.reason


@pytest.mark.parametrize("windows", [[], [(1, 2)], [(1, 2, 0)], ["auto"], [(1, 2, 3), "auto"]])
def test_what_is_no_list_of_windows(windows):
    with pytest.raises(InvalidOptionError, match="one for each head"):
        compile_variants(TinyVideo(), {"latent": latent()}, {"sta": {"window": windows}})
