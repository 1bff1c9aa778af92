"""Attention that a graph break cuts up: sizes that it reads from a tensor are numbers wherever that helps, and what breaks
it is said."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import sta_compile
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, SPARSE, Attention, TinyVideo, sdpa

GRID, OTHER = (3, 4, 5), (2, 5, 4)
OPTIONS = {**SPARSE, "min_tokens": 0, "dense_above": None}
pytestmark = pytest.mark.usefixtures("stages_only")


class ReadsSizes(nn.Module):
    """Positions scale what an attention is given, sample by sample, as Wan's own repository turns its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(16, 2, 8, 2, sdpa)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        out = []
        for sample, (frames, rows, cols) in zip(x, sizes.tolist(), strict=True):
            n = frames * rows * cols
            scale = torch.arange(frames).view(-1, 1, 1).expand(frames, rows, cols).reshape(n, 1)
            pairs = torch.view_as_complex(sample[:n].reshape(n, -1, 2).contiguous()) * (
                1 + 0.1 * scale
            )
            out.append(torch.cat([torch.view_as_real(pairs).flatten(1), sample[n:]]))
        y = torch.stack(out)
        return x + self.attn(y)


class Cut(Attention):
    """A break between the projections and the attention."""

    def forward(self, x: Tensor, other: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            p(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.to_q, self.to_k, self.to_v)
        )
        torch._dynamo.graph_break()
        return self.to_out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class Model(TinyVideo):
    def __init__(self, breaks: bool) -> None:
        super().__init__(layers=2)
        self.blocks = nn.ModuleList(ReadsSizes() for _ in range(2))
        self.breaks = breaks

    def forward(self, latent: Tensor) -> Tensor:
        sizes = torch.stack([torch.tensor(sample.shape[1:]) for sample in latent])
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        if self.breaks:
            torch._dynamo.graph_break()
        for block in self.blocks:
            x = block(x, sizes)
        return self.out(x).transpose(1, 2).unflatten(2, latent.shape[2:])


@pytest.mark.parametrize("breaks", [False, True])
def test_sizes_that_attention_reads_are_numbers(breaks):
    """In a whole model; behind a break, where blocks are compiled alone after a first call; and in another resolution, where
    Dynamo would make them symbols."""
    model = sta_compile.compile(Model(breaks), **OPTIONS)
    plain = Model(breaks)
    for grid in (GRID, OTHER):
        latent = torch.randn(2, CHANNELS, *grid)
        model(latent)
        found = model(latent)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(model(latent), found)
        site = [s for r in sta_compile.reports() for s in r.replaced][-1]
        assert site.grid == grid
        with Oracle(plain, plain.sites, window_mask(grid, site.tiles, site.window)):
            assert relative_error(found, plain(latent)) < 1e-5
        assert relative_error(found, plain(latent)) > 1e-3


@pytest.mark.parametrize("others", [0, 2])
def test_a_break_inside_of_attention_is_said(others):
    """others: blocks before it whose attention is replaced."""
    model, latent = TinyVideo(layers=others + 2), torch.randn(1, CHANNELS, *GRID)
    for block in model.blocks[others:]:
        block.attn = Cut(16, 2, 8, 2, sdpa)
    sta_compile.compile(model, **OPTIONS)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(latent)
    where = f"graph_break()`, at {__file__}:"
    assert any(where in str(w.message) and "out of the attention" in str(w.message) for w in found)
    for block in model.blocks:  # as it says
        block.attn.__class__ = Attention
    sta_compile.reset_reports()
    sta_compile.compile(sta_compile.restore(model), **OPTIONS)(latent)
    replaced = [site for report in sta_compile.reports() for site in report.replaced]
    assert sum(site.calls for site in replaced) == others + 2


def test_a_break_before_attention_is_said_by_the_backend():
    """Without the whole model there is no telling what attention behind a break is over."""
    model = TinyVideo()
    model.blocks[0].attn = Cut(16, 2, 8, 2, sdpa)
    model.compile(backend="sta", options=OPTIONS)
    with pytest.warns(UserWarning, match=r"sta_compile\.compile\(model\)"):
        model(torch.randn(1, CHANNELS, *GRID))
