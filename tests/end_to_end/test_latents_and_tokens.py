"""What is done to a latent before its patch embed leaves the grid known; what mixes the order of tokens is refused, and the
reason is said of each attention, whatever else is replaced."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.middle import GRID, OPTIONS, H, Middle, N, T, W, latent
from tests.end_to_end.tiny import SPARSE, TinyVideo, check

NO_ORDER = "shows no order of frames, rows and columns"


class Prepared(TinyVideo):
    """A patch embed of single positions, of a latent that `prepare` has changed."""

    def __init__(self, prepare) -> None:
        super().__init__(layers=2)
        self.prepare = prepare

    def forward(self, latent: Tensor) -> Tensor:
        return super().forward(self.prepare(latent))


PREPARED = {
    "replicated borders": (lambda x: F.pad(x, (0, 1, 0, 1, 0, 0), mode="replicate"), (T, H + 1, W + 1)),
    "zeros at borders": (lambda x: F.pad(x, (0, 1, 0, 1, 0, 0)), (T, H + 1, W + 1)),
    "resized": (lambda x: F.interpolate(x, scale_factor=(1, 1, 2)), (T, H, 2 * W)),
    "samples flipped": (lambda x: x.flip(0), GRID),
    "frames summed": (lambda x: x.cumsum(2), GRID),
    "condition frames before": (lambda x: torch.cat([x[:, :, :2] * 0.5, x], 2), (T + 2, H, W)),
    "side by side": (lambda x: torch.cat([x, 0.5 * x], 4), (T, H, 2 * W)),
    "frames repeated": (lambda x: x.repeat_interleave(2, 2), (2 * T, H, W)),
}  # fmt: skip


@pytest.mark.parametrize("name", PREPARED)
def test_a_latent_changed_before_its_patch_embed(name: str) -> None:
    prepare, grid = PREPARED[name]
    model = Prepared(prepare)
    variant = check(model, model.sites, SPARSE, latent=latent())
    assert {site.grid for site in variant.report.replaced} == {grid}


@pytest.mark.parametrize(
    "frames", [[0, 2, 1], slice(None, None, 2)], ids=["in another order", "every second"]
)
def test_frames_of_a_latent_that_were_picked(frames) -> None:
    """Frames in another order have other neighbours than the video's; fewer of them are a video."""
    model = Prepared(lambda x: x[:, :, frames])
    (variant,) = compile_variants(model, {"latent": latent()}, {"sta": SPARSE}).values()
    if isinstance(frames, list):
        assert "rolled, flipped or picked" in variant.report.reason
    else:
        assert [site.grid for site in variant.report.replaced] == [((T + 1) // 2, H, W)] * 2


def test_frames_in_the_batch_that_were_joined_are_no_grid_of_one_frame() -> None:
    class Spatial(Prepared):
        def forward(self, latent: Tensor) -> Tensor:
            x = self.patchify(self.prepare(latent))
            frames = x.permute(0, 2, 3, 4, 1).flatten(0, 1).flatten(1, 2)
            return self.out(self.blocks[0](frames))

    model = Spatial(lambda x: torch.cat([x[:, :, :2], x], 2))
    (variant,) = compile_variants(model, {"latent": latent()}, {"sta": SPARSE}).values()
    assert "factorised attention" in variant.report.reason


def merged(model: Middle, x: Tensor) -> Tensor:
    """As token merging does: pairs of tokens, put together and taken apart."""
    a, b = x[:, ::2], x[:, 1::2]
    nearest = (a @ b.mT).argmax(-1)[..., None].expand_as(a)
    b = b.scatter_reduce(1, nearest, a, "mean")
    return torch.stack([a, b.gather(1, nearest)], 2).flatten(1, 2)


def strided(model: Middle, x: Tensor) -> Tensor:
    every_second = torch.as_strided(x.contiguous(), (2, N // 2, 16), (N * 16, 32, 1))
    return every_second.repeat_interleave(2, 1)


def parts_reversed(model: Middle, x: Tensor) -> Tensor:
    return torch.cat(x.chunk(3, 1)[::-1], 1)


def halves_of_columns(model: Middle, x: Tensor) -> Tensor:
    return x.view(2, T, H, 2, W // 2, 16).permute(0, 3, 1, 2, 4, 5).flatten(1, 4)


@pytest.mark.parametrize("mix", [merged, strided, parts_reversed, halves_of_columns])
def test_tokens_in_no_order_are_named_beside_those_that_are_replaced(mix) -> None:
    model = Middle(lambda model, x: model.blocks[1](mix(model, model.blocks[0](x))))
    sites = model.sites
    variant = check(model, sites[:1], SPARSE, latent=latent())
    (refused,) = variant.report.refused
    assert refused.name == sites[1]
    moved = mix in (merged, parts_reversed)
    assert ("rolled, flipped or picked" if moved else NO_ORDER) in refused.reason


def columns_cut(model: Middle, x: Tensor) -> Tensor:
    """Left and right halves are scaled apart: the columns are two axes for a while."""
    halves = x.view(2, T, H, 2, W // 2, 16) * torch.tensor([1.0, 2.0])[:, None, None]
    return halves.flatten(1, 4)


def test_a_grid_of_which_an_axis_was_cut_later() -> None:
    model = Middle(lambda model, x: model.blocks[1](columns_cut(model, model.blocks[0](x))))
    variant = check(model, model.sites, SPARSE, latent=latent())
    assert {site.grid for site in variant.report.replaced} == {GRID}


def with_text_in_every_frame(model: Middle, x: Tensor, text: Tensor) -> Tensor:
    x = torch.cat([text[:, None].expand(-1, T, -1, -1), x.unflatten(1, (T, H * W))], 2)
    x = model.blocks[1](model.blocks[0](x.flatten(1, 2)))
    return x.unflatten(1, (T, -1))[:, :, text.shape[1] :].flatten(1, 2)


def by_strides(model: Middle, x: Tensor, text: Tensor) -> Tensor:
    """Queries, keys and values as strided views of one product."""
    mixed = torch.cat([x, 2 * x, x + 1], -1).contiguous()
    q, k, v = (torch.as_strided(mixed, (2, 2, N, 8), (N * 48, 8, 48, 1), i * 16) for i in range(3))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("middle", [with_text_in_every_frame, by_strides])
def test_nothing_is_replaced_and_the_reason_is_true(middle) -> None:
    model, inputs = Middle(middle), {"latent": latent(), "text": torch.randn(2, 5, 16)}
    with torch.no_grad():
        variant = compile_variants(model, inputs, OPTIONS)["sta"]
        assert relative_error(variant.run(**inputs), model(**inputs)) < 1e-6
    assert not variant.report.replaced
    assert NO_ORDER in variant.report.reason


def test_text_of_a_joint_attention_is_not_made_of_the_video() -> None:
    """Its own attention afterwards is left alone without a word."""

    def middle(model: Middle, x: Tensor, text: Tensor) -> Tensor:
        both = model.blocks[0](torch.cat([text, x], 1))
        text, x = both[:, : text.shape[1]], both[:, text.shape[1] :]
        return x + model.text_block(text).mean(1, keepdim=True)

    model = Middle(middle)
    inputs = {"latent": latent(), "text": torch.randn(2, 5, 16)}
    report = compile_variants(model, inputs, {"sta": SPARSE})["sta"].report
    assert [site.name for site in report.replaced] == model.sites[:1]
    assert not report.refused
