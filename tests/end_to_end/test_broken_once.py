"""Faults that were found by looking for them: each gave wrong numbers, a crash or a window to tokens that are no video."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.end_to_end.compiled import relative_error
from tests.end_to_end.middle import GRID, H, Middle, N, T, W, latent, names, variants_of
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import sdpa
from tests.end_to_end.tiny import valid as first_ones

# ---- attention in steps: what is written between them, and what broadcasts ----


def scaled_in_place(q, k, v, mask):
    q = q.clone()
    q *= q.shape[-1] ** -0.5
    return (q @ k.mT).softmax(-1) @ v


def scaled_by_method(q, k, v, mask):
    return (q.clone().mul_(q.shape[-1] ** -0.5) @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("attend", [scaled_in_place, scaled_by_method])
@torch.no_grad()
def test_a_query_scaled_in_place_is_scaled_once(attend):
    model, x = Middle(attend=attend), latent()
    variant = variants_of(model, latent=x)
    assert names(variant) == model.sites
    for block in model.blocks:
        block.attn.attend = sdpa
    with Oracle(model, model.sites, window_mask(GRID, (3, 3, 4), (1, 3, 3))):
        expected = model(x)
    assert relative_error(variant.run(latent=x), expected) < 1e-5


def query_reused(q, k, v, mask):
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    q.zero_()
    return scores.softmax(-1) @ v


def scaled_query_reused(q, k, v, mask):
    scaled = q * q.shape[-1] ** -0.5
    q.zero_()
    return (scaled @ k.mT).softmax(-1) @ v


def one_batch_of_keys(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k[:1], v[:1])


def one_batch_of_values(q, k, v, mask):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v[:1]


def one_head_of_keys(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k[:, :1], v)


def narrow_values(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v[..., :4]).repeat(1, 1, 1, 2)


@pytest.mark.parametrize(
    "attend",
    [
        query_reused, scaled_query_reused, one_batch_of_keys, one_batch_of_values, one_head_of_keys,
        narrow_values,
    ],
)  # fmt: skip
@torch.no_grad()
def test_attention_that_the_operator_is_not_stays(attend):
    model, x = Middle(attend=attend), latent()
    variant = variants_of(model, latent=x)
    assert not names(variant)
    assert "internal error" not in variant.report.summary()


# ---- masks whose memory is written, and lengths that don't fit their type ----
TEXT = 7


def all_true(valid):
    return torch.ones(valid.shape[0], 1, 1, N + TEXT, dtype=torch.bool)


def lengths(valid):
    return N + valid.sum(1, keepdim=True)


def hides_a_token(valid):
    mask = all_true(valid)
    mask[..., 5] = False
    return mask


def hides_through_a_view(valid):
    mask = all_true(valid)
    mask[..., :4].fill_(False)
    return mask


def hides_a_third(valid):
    return all_true(valid).masked_fill_(torch.arange(N + TEXT) % 3 == 0, False)


def written_places(valid):
    places = torch.arange(N + TEXT)
    places[3] = 1000
    return (places < lengths(valid))[:, None, None]


def written_lengths(valid):
    limit = lengths(valid)
    limit.sub_(40)
    return (torch.arange(N + TEXT) < limit)[:, None, None]


def lengths_written_afterwards(valid):
    limit = lengths(valid)
    mask = (torch.arange(N + TEXT) < limit)[:, None, None]
    limit.sub_(40)
    return mask


def lengths_that_overflow(valid):
    return (torch.arange(N + TEXT) < lengths(valid).to(torch.int8))[:, None, None]


def one_length_per_head(valid):
    return (torch.arange(N + TEXT) < lengths(valid))[:, None]


def with_text(mask):
    def middle(model, x, text, valid):
        return model.blocks[0](torch.cat([x, text], 1), mask(valid))[:, :N]

    return middle


@pytest.mark.parametrize(
    "mask",
    [
        hides_a_token, hides_through_a_view, hides_a_third, written_places, written_lengths,
        lengths_written_afterwards, lengths_that_overflow, one_length_per_head,
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_mask_is_what_is_in_its_memory(mask):
    model = Middle(with_text(mask))
    inputs = {"text": torch.randn(2, TEXT, 16), "valid": first_ones(2, 6, of=TEXT)}
    assert not names(variants_of(model, latent=latent(), **inputs))


# ---- text of as many tokens as the video ----


def shared_positions(model, x, text):
    text = model.text_block(text + model.places)
    return model.blocks[1](model.blocks[0](x + model.places)) + text.mean(1, keepdim=True)


def attended(model, x, text):
    text = model.text_block(text + model.places)
    return model.blocks[1](x + model.places + model.blocks[0].attn(x, text))


def added(model, x, text):
    return model.blocks[1](model.blocks[0](x + model.text_block(text)))


@pytest.mark.parametrize("middle", [shared_positions, attended, added])
@torch.no_grad()
def test_text_as_long_as_the_video_has_no_window(middle):
    model = Middle(middle)
    inputs = {"latent": latent(), "text": torch.randn(2, N, 16)}
    variant = variants_of(model, **inputs)
    sites = names(variant)
    assert "blocks.1.attn" in sites
    assert "text_block.attn" not in sites
    with Oracle(model, sites, window_mask(GRID, (3, 3, 4), (1, 3, 3))):
        expected = model(**inputs)
    assert relative_error(variant.run(**inputs), expected) < 1e-5


# ---- one body, several calls ----


@torch.compiler.nested_compile_region
def region(block, x):
    return block(x)


@torch.compiler.nested_compile_region
def region_and_mean(block, x):
    y = block(x)
    return y, y.mean(1)


def rows_and_columns_swapped(x):
    return x.view(-1, T, H, W, 16).transpose(2, 3).flatten(1, 3).contiguous()


def raster_after_the_last(model, x):
    x = region(model.blocks[0], region(model.blocks[0], x))
    return x.double().roll(3, 1).float()


def raster_after_the_last_of_two(model, x):
    x, first = region_and_mean(model.blocks[0], x)
    x, second = region_and_mean(model.blocks[0], x * 1)
    return torch.cat([x, x], -1).cumsum(1)[..., :16] / N + (first + second)[:, None]


@pytest.mark.parametrize("middle", [raster_after_the_last, raster_after_the_last_of_two])
@torch.no_grad()
def test_all_calls_of_a_region_return_one_order(middle):
    model, x = Middle(middle, layers=1), latent()
    variant = variants_of(model, latent=x)
    assert names(variant) == model.sites
    with Oracle(model, model.sites, window_mask(GRID, (3, 3, 4), (1, 3, 3))):
        expected = model(x)
    assert relative_error(variant.run(latent=x), expected) < 1e-5


def swapped_second(model, x):
    x = region(model.blocks[0], x)
    return region(model.blocks[1], rows_and_columns_swapped(x))


def swapped_beside(model, x):
    x = model.text_block(x)
    x = region(model.blocks[0], x)
    return x + region(model.blocks[1], rows_and_columns_swapped(x)).mean(1, keepdim=True)


def swapped_first(model, x):
    x = model.text_block(x)
    other = region(model.blocks[1], rows_and_columns_swapped(x))
    return region(model.blocks[0], x) + other.mean(1, keepdim=True)


@pytest.mark.parametrize("middle", [swapped_second, swapped_beside, swapped_first])
@torch.no_grad()
def test_a_region_called_with_two_orders_of_tokens(middle):
    assert not {"blocks.0.attn", "blocks.1.attn"} & {
        *names(variants_of(Middle(middle), latent=latent()))
    }


def text_first(model, x, text):
    text = region(model.text_block, text)
    return region(model.blocks[1], region(model.blocks[0], x)) + text.mean(1, keepdim=True)


def video_first(model, x, text):
    x = region(model.blocks[1], region(model.blocks[0], x))
    return x + region(model.text_block, text).mean(1, keepdim=True)


@pytest.mark.parametrize("middle", [text_first, video_first])
@torch.no_grad()
def test_a_region_for_video_and_text_of_one_length(middle):
    variant = variants_of(Middle(middle), latent=latent(), text=torch.randn(2, N, 16))
    assert not names(variant)
    assert "with other tokens" in variant.report.summary()


# ---- keys that are moved after their projection ----


def keys_rolled(q, k, v, mask):
    places = torch.arange(N).sin()[:, None]
    return F.scaled_dot_product_attention(q * places, k.roll(5, 2) * places, v.roll(5, 2))


@torch.no_grad()
def test_keys_moved_after_their_projection():
    assert not names(variants_of(Middle(attend=keys_rolled), latent=latent()))


# ---- rows that are written by a list of numbers ----


def rows_written(model, x):
    x = model.blocks[0](x).clone()
    x[:, [3, 9, 20]] = x[:, [3, 9, 20]] * 2
    return model.blocks[1](x)


@torch.no_grad()
def test_rows_written_by_a_list():
    model, x = Middle(rows_written), latent()
    variant = variants_of(model, latent=x)
    assert names(variant) == model.sites
    with Oracle(model, model.sites, window_mask(GRID, (3, 3, 4), (1, 3, 3))):
        expected = model(x)
    assert relative_error(variant.run(latent=x), expected) < 1e-5
