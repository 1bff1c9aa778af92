"""Chunks of a video that attend to the keys of the chunks before them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.end_to_end.compiled import RewritingBackend, relative_error
from tests.end_to_end.oracle import window_mask
from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo


class Cached(TinyVideo):
    """A chunk of a video attends to the keys of the chunks before it, [batch, heads, tokens, head_dim], and to its own."""

    def together(self, cache: Tensor, own: Tensor, start: int) -> Tensor:
        return torch.cat([cache, own], 2)

    def forward(self, latent: Tensor, keys: Tensor, values: Tensor, seen=None, start: int = 0):
        attn = self.blocks[0].attn
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        q, k, v = (
            proj(x).unflatten(2, (-1, 8)).transpose(1, 2)
            for proj in (attn.to_q, attn.to_k, attn.to_v)
        )
        k, v = self.together(keys, k, start), self.together(values, v, start)
        out = F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        return attn.to_out(out)


@pytest.mark.parametrize("marked", [(), (0, 1), (0,), (1,)])
@torch.no_grad()
def test_cached_keys_that_grow(marked):
    """Keys and values are inputs that have symbols of their own. A size that is marked dynamic stays one."""
    model, backend = Cached(), RewritingBackend({"sta": SPARSE})
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    grid = (2, 4, 6)
    torch._dynamo.reset()
    for count in (48, 96, 144):
        inputs = torch.randn(1, CHANNELS, *grid), *torch.randn(2, 1, 2, count, 8)
        for i in marked:
            torch._dynamo.mark_dynamic(inputs[1 + i], 2)
        found = compiled(*inputs)
        report = backend.reports["sta"][-1]
        (site,) = report.replaced
        assert [role for role, _ in site.segments] == ["keys", "video"]
        window = window_mask(grid, site.tiles, site.window)
        seen = torch.cat([torch.ones(48, count, dtype=torch.bool), window], 1)
        assert relative_error(found, model(*inputs, seen)) < 1e-5
    assert len(backend.graphs["sta"]) == (1 if marked == (0, 1) else 2)


class Written(Cached):
    """The cache is as long as the whole video."""

    def together(self, cache: Tensor, own: Tensor, start: int) -> Tensor:
        cache[:, :, start : start + own.shape[2]] = own
        return cache[:, :, : start + own.shape[2]]


class WrittenBesides(Cached):
    def together(self, cache: Tensor, own: Tensor, start: int) -> Tensor:
        before = cache[:, :, :start]
        cache[:, :, start : start + own.shape[2]] = own
        return torch.cat([before, own], 2)


class Copied(Cached):
    def together(self, cache: Tensor, own: Tensor, start: int) -> Tensor:
        cache.narrow(2, start, own.shape[2]).copy_(own)
        return cache[:, :, : start + own.shape[2]].clone()


class Changed(Written):
    """What is read is not what was written, or not all that the memory is read for."""

    def together(self, cache: Tensor, own: Tensor, start: int) -> Tensor:
        cache[:, :, start : start + own.shape[2]] = own
        own.mul_(2)
        return cache[:, :, : start + own.shape[2]]


class WrittenOver(Written):
    def together(self, cache: Tensor, own: Tensor, start: int) -> Tensor:
        super().together(cache, own, start)
        cache[:, :, start : start + 4] = 1.0
        return cache[:, :, : start + own.shape[2]]


class WrittenLater(Written):
    def together(self, cache: Tensor, own: Tensor, start: int) -> Tensor:
        read = super().together(cache, own, start)
        cache[:, :, :4] += 1.0
        return read


class ReadFurther(Written):
    def together(self, cache: Tensor, own: Tensor, start: int) -> Tensor:
        super().together(cache, own, start)
        return cache[:, :, : start + own.shape[2] + 4]


class OtherHeads(Written):
    def together(self, cache: Tensor, own: Tensor, start: int) -> Tensor:
        cache[:, :1, start : start + own.shape[2]] = own[:, :1]
        return cache[:, :, : start + own.shape[2]]


class OneCache(Written):
    """Of keys and values, [2, batch, heads, tokens, head_dim]; both are written before they are read."""

    def forward(self, latent: Tensor, cache: Tensor, seen=None, start: int = 0):
        return super().forward(latent, cache[0], cache[1], seen, start)


@torch.no_grad()
def test_keys_and_values_in_one_cache():
    model, backend = OneCache(), RewritingBackend({"sta": SPARSE})
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    chunk, cache = torch.randn(1, CHANNELS, 2, 4, 6), torch.randn(2, 1, 2, 160, 8)
    copy = cache.clone()
    found = compiled(chunk, cache, start=48)
    (site,) = backend.reports["sta"][-1].replaced
    window = window_mask((2, 4, 6), site.tiles, site.window)
    seen = torch.cat([torch.ones(48, 48, dtype=torch.bool), window], 1)
    assert relative_error(found, model(chunk, copy, seen, 48)) < 1e-5
    assert torch.equal(cache, copy)


@pytest.mark.parametrize(
    "make",
    [Written, WrittenBesides, Copied, Changed, WrittenOver, WrittenLater, ReadFurther, OtherHeads],
)
@torch.no_grad()
def test_keys_that_are_written_into_a_cache_for_all_chunks(make):
    """They are read from where they came from, if that is what the memory holds. The memory is written as before."""
    model, backend = make(), RewritingBackend({"sta": SPARSE})
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    grid = (2, 4, 6)
    for start in (0, 48, 96):
        chunk = torch.randn(1, CHANNELS, *grid)
        keys, values = torch.randn(1, 2, 160, 8), torch.randn(1, 2, 160, 8)
        copies = keys.clone(), values.clone()
        found = compiled(chunk, keys, values, start=start)
        report = backend.reports["sta"][-1]
        seen = None
        if make not in (Written, WrittenBesides):
            (refused,) = report.refused
            assert "written into a buffer" in refused.reason
            assert report.reason == refused.reason
        else:
            (site,) = report.replaced
            window = window_mask(grid, site.tiles, site.window)
            seen = torch.cat([torch.ones(48, start, dtype=torch.bool), window], 1)
        assert relative_error(found, model(chunk, *copies, seen, start)) < 1e-5
        assert torch.equal(keys, copies[0])
        assert torch.equal(values, copies[1])
