"""Latents that are padded to a length of the caller's choice, with masks made of numbers: Wan's own repository does so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sta_compile import reports, reset_reports, rewrite
from tests.end_to_end.compiled import RewritingBackend, compile_variants, relative_error
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo

GRID, OTHER = (3, 6, 8), (3, 8, 6)
N = 144


def below_lengths(lengths: list[int], total: int) -> Tensor:
    return torch.arange(total) < torch.tensor(lengths)[:, None]


def from_lengths(lengths: list[int], total: int) -> Tensor:
    ends = torch.stack([torch.tensor(n) for n in lengths])
    return torch.zeros(len(lengths), total).masked_fill(torch.arange(total) >= ends[:, None], -1e9)


def below_the_longest(lengths: list[int], total: int) -> Tensor:
    return (torch.arange(total) < torch.tensor(lengths).max())[None]


def written_out(lengths: list[int], total: int) -> Tensor:
    """No size of it is a symbol's."""
    return torch.tensor([[True] * n + [False] * (total - n) for n in lengths])


def by_division(lengths: list[int], total: int) -> Tensor:
    return (torch.arange(total)[None] // torch.tensor(lengths)[:, None]) == 0


class Padded(TinyVideo):
    """latents: one [channels, frames, rows, cols] for each sample -> as many [tokens, channels]."""

    def __init__(self, mask=below_lengths) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, latents: list[Tensor], seq_len: int) -> list[Tensor]:
        tokens = [self.patchify(latent[None]).flatten(2).mT for latent in latents]
        lengths = [x.shape[1] for x in tokens]
        pads = [x.new_zeros(1, seq_len - x.shape[1], x.shape[2]) for x in tokens]
        x = torch.cat([torch.cat(pair, 1) for pair in zip(tokens, pads, strict=True)])
        x = self.out(self.blocks[0](x, self.mask(lengths, seq_len)[:, None, None]))
        return [sample[:n] for sample, n in zip(x, lengths, strict=True)]


def latents(*grids: tuple[int, int, int]) -> list[Tensor]:
    return [torch.randn(CHANNELS, *grid) for grid in grids]


def check(model, found, inputs, site) -> None:
    window = window_mask(site.grid, site.tiles, site.window)
    with Oracle(model, model.sites, window):
        expected = model(**inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    "mask", [below_lengths, from_lengths, below_the_longest, written_out, by_division]
)
@pytest.mark.parametrize(("batch", "seq_len"), [(1, N), (2, N + 20)])
@torch.no_grad()
def test_padding_is_hidden_by_numbers(mask, batch, seq_len):
    model = Padded(mask)
    inputs = {"latents": latents(*[GRID] * batch), "seq_len": seq_len}
    variant = compile_variants(model, inputs, {"sta": SPARSE})["sta"]
    (site,) = variant.report.replaced
    check(model, variant.run(**inputs), inputs, site)
    operator = torch.ops.sta.attention.default
    (node,) = [n for n in variant.gm.graph.nodes if n.target == operator]
    named = {a.name: n for a, n in zip(operator._schema.arguments, node.args, strict=False)}
    assert named.get("key_mask") is None  # lengths are cheaper
    assert (named["key_lengths"] is None) == (seq_len == N)


@torch.no_grad()
def test_padding_of_any_size():
    model, backend = Padded(), RewritingBackend({"sta": SPARSE})
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for grid, seq_len in ((GRID, N + 6), (OTHER, N + 6), ((4, 6, 5), N)):
        inputs = {"latents": latents(grid), "seq_len": seq_len}
        found = compiled(**inputs)
        (site,) = backend.reports["sta"][-1].replaced
        assert site.grid == grid
        check(model, found, inputs, site)


@torch.no_grad()
def test_samples_of_other_lengths_stay_exact():
    model, inputs = Padded(), {"latents": latents(GRID, (2, 6, 8)), "seq_len": N}
    variant = compile_variants(model, inputs, {"sta": SPARSE})["sta"]
    assert not variant.report.replaced
    for ours, theirs in zip(variant.run(**inputs), model(**inputs), strict=True):
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_numbers_of_an_exported_program():
    model, inputs = Padded(), {"latents": latents(GRID), "seq_len": N + 20}
    program = torch.export.export(model, (), inputs, strict=False)
    reset_reports()
    edited = rewrite(program, SPARSE, dense_above=None, min_tokens=0)
    (site,) = reports()[-1].replaced
    reset_reports()
    check(model, edited.module()(**inputs), inputs, site)
