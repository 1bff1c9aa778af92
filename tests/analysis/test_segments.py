"""Which tokens beside the video an attention may have: references, history, keys without queries, a grid that stands twice.

What is replaced is compared with the eager model under the definition's mask.
"""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from sta_compile.analysis.infer_grid import Refusal
from sta_compile.analysis.segments import merged
from sta_compile.report import ReplacedSite
from tests.analysis import small_dits
from tests.analysis.small_dits import (
    DIM,
    GRID,
    HEADS,
    TEXT,
    VIDEO,
    H,
    SmallDiT,
    W,
    compiled,
    conv3d_patchify,
    expected,
    heads,
    inputs,
    joined,
    leave_tokens,
    masked,
    no_rope,
    relative_error,
    unpatchify,
)
from tests.analysis.test_infer_grid import classify, only
from tests.oracle import full_mask, tile_order


def test_neighbours_of_a_known_number_are_one_segment() -> None:
    """Valid text and padding are of the text's length, whatever the number of valid tokens."""
    valid = sympy.Symbol("u0", integer=True)
    parts = (("context", valid), ("context", 9 - valid), ("video", 60))
    assert merged(parts) == (("context", 9), ("video", 60))
    assert merged(parts[::-2]) == parts[::-2]
    numbers = (("keys", 2), ("keys", 3), ("keys", valid))
    assert merged(numbers) == (("keys", 5), ("keys", valid))


def twice(model: SmallDiT, x: Tensor) -> Tensor:
    return torch.cat([model.weight + x, x], 1)


@pytest.mark.parametrize("kept", [None, 0, 1])
def test_of_a_grid_that_stands_twice_the_part_that_is_kept_is_the_video(kept: int | None) -> None:
    """The first part, if both leave the model."""
    model = SmallDiT(before=twice, rope=no_rope, layers=2)
    model.parts.unpatchify = leave_tokens
    if kept is not None:
        model.parts.after = lambda model, x: x[:, kept * VIDEO : (kept + 1) * VIDEO]
    result = compiled(model, *inputs())
    context = ("context", VIDEO)
    segments = (context, ("video", VIDEO)) if kept else (("video", VIDEO), context)
    assert [site.segments for site in result.report.replaced] == [segments] * 2
    model.parts.text = (VIDEO, 0) if kept else (0, VIDEO)  # what the mask takes for text
    model.parts.before = lambda model, x: x
    masked = expected(Twice(model, kept), result, *inputs())
    assert relative_error(result.output, masked) < 1e-5


class Twice(SmallDiT):
    """The same model without its own cuts, for the mask of the definition."""

    def __init__(self, model: SmallDiT, kept: int | None) -> None:
        super().__init__(rope=no_rope, layers=2)
        self.load_state_dict(model.state_dict())
        self.parts, self.kept = model.parts, kept

    def forward(self, latent: Tensor, text: Tensor) -> Tensor:
        x = twice(self, conv3d_patchify(self, latent))
        for layer in self.layers:
            x = layer(self, x)
        if self.kept is not None:
            x = x[:, self.kept * VIDEO : (self.kept + 1) * VIDEO]
        return leave_tokens(self, x, latent)


def test_two_grids_in_a_sequence() -> None:
    """History of another grid, as the model does not return it, is context."""

    class History(SmallDiT):
        def forward(self, latent: Tensor, history: Tensor) -> Tensor:
            past = self.embed3(history).flatten(2).transpose(1, 2)
            x = torch.cat([past, conv3d_patchify(self, latent)], 1)
            x = self.layers[0](self, x)
            return unpatchify(self, x[:, past.shape[1] :], latent)

    model, history = History(rope=no_rope), torch.randn(2, 4, 5, 2 * H, 4 * W)
    result = compiled(model, inputs()[0], history)
    tokens = 5 * H * 2 * W
    assert result.report.replaced[0].segments == (("context", tokens), ("video", VIDEO))
    model.parts.text = (tokens, 0)
    assert relative_error(result.output, expected(model, result, inputs()[0], history)) < 1e-5


def mask_over(site: ReplacedSite, start: int) -> Tensor:
    """bool [batch, queries, keys] in raster order: the video's queries come first, and its keys begin at `start`."""
    assert site.tiles is not None
    assert site.window is not None
    roles, sizes = zip(*site.segments, strict=True)
    mask = full_mask(GRID, site.tiles, site.window, roles, list(sizes), 2, None, None)
    order = torch.tensor(tile_order(GRID, site.tiles)).argsort()
    rows = torch.cat([order, torch.arange(VIDEO, mask.shape[1])])
    cols = torch.arange(mask.shape[2])
    cols[start : start + VIDEO] = order + start
    return mask[:, rows][:, :, cols]


def apart(layer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return heads(layer.k(tokens)), heads(layer.v(tokens))


def both(layer, tokens: Tensor) -> Tensor:
    """Keys and values by one product: [batch, tokens, 2 * width]."""
    return F.linear(
        tokens,
        torch.cat([layer.k.weight, layer.v.weight]),
        torch.cat([layer.k.bias, layer.v.bias]),
    )


def chunked(layer, tokens: Tensor) -> list[Tensor]:
    return [heads(x) for x in both(layer, tokens).chunk(2, -1)]


def split(layer, tokens: Tensor) -> list[Tensor]:
    return [heads(x) for x in both(layer, tokens).split(DIM, -1)]


def unbound(layer, tokens: Tensor) -> tuple[Tensor, ...]:
    return both(layer, tokens).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)


@pytest.mark.parametrize("keyed", [apart, chunked, split, unbound])
@pytest.mark.parametrize("before", [False, True])
def test_keys_and_values_of_one_product(keyed, before: bool) -> None:
    """Queries of the video, keys and values of the video and text."""

    class Fused(SmallDiT):
        def forward(self, latent: Tensor, text: Tensor) -> Tensor:
            x = conv3d_patchify(self, latent)
            layer = self.layers[0]
            k, v = keyed(layer, torch.cat([text, x] if before else [x, text], 1))
            x = x + layer.o(joined(small_dits.attend(heads(layer.q(x)), k, v)))
            return unpatchify(self, x, latent)

    model = Fused(rope=no_rope)
    result = compiled(model, *inputs(2, TEXT))
    (site,) = result.report.replaced
    text = [("keys", TEXT)]
    assert site.segments == (*text * before, ("video", VIDEO), *text * (not before))
    wanted = masked(model, mask_over(site, TEXT * before), *inputs(2, TEXT))
    assert relative_error(result.output, wanted) < 1e-5


class KeysBeside(SmallDiT):
    """Queries of the video, or of the video and text, over keys of more tokens."""

    asking, before = False, True

    def forward(self, latent: Tensor, text: Tensor, other: Tensor) -> Tensor:
        x = conv3d_patchify(self, latent)
        layer = self.layers[0]
        tokens = torch.cat([x, text], 1) if self.asking else x
        q, k, v = (heads(3 * project(tokens)) for project in (layer.q, layer.k, layer.v))
        more = [heads(project(other)) for project in (layer.k, layer.v)]
        pairs = zip(more, (k, v), strict=True)
        k, v = (torch.cat([a, b] if self.before else [b, a], 2) for a, b in pairs)
        x = x + layer.o(joined(small_dits.attend(q, k, v)))[:, :VIDEO]
        return unpatchify(self, x, latent)


@pytest.mark.parametrize("asking", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_keys_beside_the_queries(asking: bool, before: bool) -> None:
    model = KeysBeside(rope=no_rope)
    model.asking, model.before = asking, before
    args = (*inputs(2, TEXT), torch.randn(2, 9, DIM))
    result = compiled(model, *args)
    (site,) = result.report.replaced
    segments = [("video", VIDEO), *([("context", TEXT)] if asking else [])]
    keys = ("keys", 9)
    assert site.segments == (keys, *segments) if before else (*segments, keys)
    wanted = masked(model, mask_over(site, 9 if before else 0), *args)
    assert relative_error(result.output, wanted) < 1e-5


def test_keys_of_another_stream_of_the_same_grid_are_not_the_videos() -> None:
    class Control(SmallDiT):
        def forward(self, latent: Tensor, control: Tensor) -> Tensor:
            x = conv3d_patchify(self, latent)
            layer = self.layers[0]
            keys = torch.cat(
                [self.embed3(control).flatten(2).mT, self.weight[:9].expand(2, -1, -1)], 1
            )
            q, k, v = heads(layer.q(x)), heads(layer.k(keys)), heads(layer.v(keys))
            return unpatchify(self, x + joined(small_dits.attend(q, k, v)), latent)

    latent, _ = inputs()
    assert classify(Control(), latent, latent.flip(0)) == [None]


def test_references_of_the_grid_among_the_keys_are_told_from_the_video() -> None:
    """Keys [reference, video] of one axis: the queries' own tokens are the second part."""

    class Reference(SmallDiT):
        def forward(self, latent: Tensor, text: Tensor) -> Tensor:
            x = conv3d_patchify(self, latent)
            layer, keys = self.layers[0], torch.cat([self.weight + 0 * x, x], 1)
            q, k, v = heads(layer.q(x)), heads(layer.k(keys)), heads(layer.v(keys))
            return unpatchify(self, x + joined(small_dits.attend(q, k, v)), latent)

    found = only(classify(Reference(), *inputs()))
    assert found.tokens.segments == (("keys", VIDEO), ("video", VIDEO))


def test_queries_that_are_no_keys_are_refused() -> None:
    class Asking(SmallDiT):
        def forward(self, latent: Tensor, text: Tensor) -> Tensor:
            x = conv3d_patchify(self, latent)
            layer, tokens = self.layers[0], torch.cat([x, text], 1)
            q, k, v = heads(layer.q(tokens)), heads(layer.k(x)), heads(layer.v(x))
            return unpatchify(self, x + joined(small_dits.attend(q, k, v))[:, :VIDEO], latent)

    (answer,) = classify(Asking(), *inputs(2, TEXT))
    assert isinstance(answer, Refusal)
    assert "are no keys" in answer.reason
