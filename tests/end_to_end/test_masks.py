"""Masks of the sequence [video, text] in the spellings of models: those that hide padded text only are understood, and no
mask that may hide anything else is taken for one of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.end_to_end.compiled import RewritingBackend, compile_variants, relative_error
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo, valid

GRID = (3, 6, 8)
N, L = 144, 7


# valid: bool [batch, text tokens] -> mask [batch, 1, 1 or tokens, tokens]
def below_the_length(valid):
    places = torch.arange(N + L)[None]
    return (places < N + valid.sum(1, keepdim=True))[:, None, None]


def hidden_from_the_length(valid):
    """As HunyuanVideo writes it."""
    mask = torch.ones(valid.shape[0], N + L, dtype=torch.bool)
    hidden = torch.arange(N + L) >= (N + valid.sum(1))[:, None]
    return mask.masked_fill(hidden, False)[:, None, None]


def everything(valid):
    return torch.ones(valid.shape[0], 1, 1, N + L, dtype=torch.bool)


def padded_in_front(valid):
    return F.pad(valid, (N, 0), value=True)[:, None, None]


def ones_beside(valid):
    return torch.cat([valid.new_ones(valid.shape[0], N), valid], 1)[:, None, None]


def additive(valid):
    return (1 - ones_beside(valid).float()) * -1e4


def shorter_than_the_text(valid):
    """May reach into the video where a text is empty."""
    return (torch.arange(N + L) < N + valid.sum(1, keepdim=True) - 3)[:, None, None]


def length_of_all(valid):
    """Nothing says that the length is at least the video's."""
    return (torch.arange(N + L) < 30 * valid.sum(1, keepdim=True))[:, None, None]


def from_below(valid):
    return (torch.arange(N + L) >= valid.sum(1, keepdim=True))[:, None, None]


def causal(valid):
    return torch.ones(N + L, N + L, dtype=torch.bool).tril()[None, None]


def frame_causal(valid):
    frame = F.pad(torch.arange(N) // 48, (0, L), value=0)
    return (frame[:, None] >= frame)[None, None]


def video_only_sees_video(valid):
    is_text = torch.arange(N + L) >= N
    return (is_text[:, None] | ~is_text)[None, None]


def pairs_of_valid(valid):
    rows = ones_beside(valid)
    return rows & rows.mT


def every_third_hidden(valid):
    return (torch.arange(N + L) % 3 != 0)[None, None, None].expand(valid.shape[0], -1, -1, -1)


def written(valid):
    mask = valid.new_zeros(valid.shape[0], N + L)
    mask[:, :N] = True
    mask[:, N:] = valid
    return mask[:, None, None]


def filled(valid):
    hidden = F.pad(~valid, (N, 0))
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[:, None, None]


def chosen(valid):
    least = torch.finfo(torch.float32).min
    return torch.where(ones_beside(valid), 0.0, least)


def pairs_as_in_hunyuan_video_15(valid):
    mask = F.pad(valid, (N, 0), value=True).bool()
    rows = mask.view(mask.shape[0], 1, 1, N + L).repeat(1, 1, N + L, 1)
    return (rows & rows.transpose(2, 3)).bool()


def mild(valid):
    """Hidden keys still weigh something."""
    return (1 - ones_beside(valid).float()) * -5.0


def of_any_numbers(valid):
    """Nothing says that the mask which comes in holds 0 and 1 only."""
    return (1 - F.pad(valid.float() * 1.5, (N, 0), value=1.0)[:, None, None]) * -1e4


def rows_without_text(valid):
    """Hides the text from the last frames only."""
    rows = torch.arange(N + L) < 2 * N // 3
    return ones_beside(valid) & (rows[:, None] | (torch.arange(N + L) < N))


def per_head(valid):
    return torch.cat([ones_beside(valid), ones_beside(torch.ones_like(valid))], 1)


def repeated_for_the_video(valid):
    """The first text token says whether a third of the video is shown."""
    third = valid[:, :1].expand(-1, N // 3)
    return F.pad(torch.cat([third, valid], 1), (N - N // 3, 0), value=True)[:, None, None]


# Masks that are lengths, and masks that the kernel is given.
LENGTHS = [below_the_length, hidden_from_the_length, everything]
GIVEN = [
    padded_in_front, ones_beside, additive, pairs_of_valid, written, filled, chosen,
    pairs_as_in_hunyuan_video_15,
]  # fmt: skip
# Masks that leave the video alone in the call that is compiled: the device looks at each later one.
CHECKED = [shorter_than_the_text, length_of_all, repeated_for_the_video]
UNDERSTOOD = [*LENGTHS, *GIVEN, *CHECKED]
OTHERS = [
    from_below, causal, frame_causal, video_only_sees_video,
    every_third_hidden, mild, of_any_numbers, rows_without_text, per_head,
]  # fmt: skip


class Masked(TinyVideo):
    def __init__(self, mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, latent: Tensor, text: Tensor, valid: Tensor) -> Tensor:
        x = torch.cat([self.patchify(latent).flatten(2).mT, text], 1)
        x = self.blocks[0](x, self.mask(valid))
        return self.out(x[:, :N]).unflatten(1, GRID).permute(0, 4, 1, 2, 3)


@pytest.mark.parametrize("mask", UNDERSTOOD + OTHERS, ids=lambda mask: mask.__name__)
@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_masks(mask, batch):
    model = Masked(mask)
    inputs = {
        "latent": torch.randn(batch, CHANNELS, *GRID),
        "text": torch.randn(batch, L, 16),
        "valid": valid(5, 7, of=L)[:batch],
    }
    variant = compile_variants(model, inputs, {"sta": SPARSE})["sta"]
    sites = [site.name for site in variant.report.replaced]
    assert sites == (model.sites if mask in UNDERSTOOD else [])
    holes, none = inputs["valid"].clone(), torch.zeros(batch, L, dtype=torch.bool)
    holes[:, 2] = False
    one = inputs["valid"].clone()
    one[0] = False
    for given in (inputs["valid"], holes, none, one):  # the graph was made for the first
        dense = [False] * batch
        if mask in CHECKED:  # a sample that hides keys of the video is dense
            dense = (~mask(given)[..., :N].flatten(1).all(1)).tolist()
        with Oracle(model, sites, window_mask(GRID, (3, 3, 4), (1, 3, 3)), dense=dense):
            expected = model(**{**inputs, "valid": given})
        found = variant.run(**{**inputs, "valid": given})
        rows = expected.isfinite()  # an empty row is NaN in eager
        assert relative_error(found[rows], expected[rows]) < 1e-5
    if not sites:
        assert "may hide video tokens" in variant.report.summary()


def ones_for_the_rest(valid, tokens):
    return torch.cat([valid, valid.new_ones(valid.shape[0], tokens - valid.shape[1])], 1)


def zeros_for_the_rest(valid, tokens):
    hidden = ~F.pad(valid, (0, tokens - valid.shape[1]), value=True)
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


class Filled(TinyVideo):
    """Text before the video, with a mask of a length of its own that is filled up to the sequence's."""

    def __init__(self, fill) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, latent: Tensor, text: Tensor, valid: Tensor) -> Tensor:
        x = torch.cat([text, self.patchify(latent).flatten(2).mT], 1)
        x = self.blocks[0](x, self.fill(valid, x.shape[1])[:, None, None])
        return self.out(x[:, text.shape[1] :])


@pytest.mark.parametrize("fill", [ones_for_the_rest, zeros_for_the_rest])
@torch.no_grad()
def test_a_mask_with_a_length_of_its_own(fill):
    """Its length is the text's, in all calls of a graph, or the device looks at what it hides."""
    model, backend = Filled(fill), RewritingBackend({"sta": SPARSE})
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    window = window_mask(GRID, (3, 3, 4), (1, 3, 3))
    graphs = []
    for tokens, length, dense in (
        (7, 7, 0),
        (9, 9, 0),
        (5, 5, 0),
        (9, 6, 0),
        (8, 20, 1),
        (6, 6, 0),
    ):
        latent, text = torch.randn(2, CHANNELS, *GRID), torch.randn(2, tokens, 16)
        shown = valid(5, 4, of=length)
        found = compiled(latent, text, shown)
        graphs.append(len(backend.graphs["sta"]))
        (site,) = backend.reports["sta"][-1].replaced
        assert ("device" in site.evidence) == (length != tokens or graphs[-1] == 3)
        with Oracle(model, model.sites, window, text_first=True, dense=[bool(dense)]):
            assert relative_error(found, model(latent, text, shown)) < 1e-5
    assert graphs == [1, 2, 2, 3, 3, 3]
