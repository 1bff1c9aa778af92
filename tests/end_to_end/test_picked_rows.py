"""Tokens that are picked by an index tensor: its numbers are translated, and the tokens stay in tile order."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor, nn

from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, Block, Options, TinyVideo, check, valid

T, H, W = GRID = (3, 5, 7)
TEXT = 6
OPTIONS: Options = {"window": (3, 3, 3), "tile": (2, 2, 2)}
Pick = Callable[[Tensor, Tensor], Tensor]
PICKS: dict[str, Pick] = {
    "index": lambda x, order: x + 0.5 * x[:, order],
    "index_select": lambda x, order: x + 0.5 * x.index_select(1, order),
    "gather": lambda x, order: x + 0.5 * x.gather(1, order[None, :, None].expand_as(x)),
    "some": lambda x, order: x + x[:, order[:5]].mean(1, keepdim=True),
    "negative": lambda x, order: x + 0.5 * x[:, order - len(order)],
}


class Picking(Block):
    def __init__(self, pick: Pick, tokens: int) -> None:
        super().__init__(
            16, attend=TinyVideo().blocks[0].attn.attend, heads=2, head_dim=8, kv_heads=2
        )
        self.pick = pick
        self.register_buffer("order", torch.randperm(tokens, generator=torch.manual_seed(5)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(self.pick(x, self.order), mask)


def model_of(pick: Pick, layers: int, tokens: int) -> TinyVideo:
    model = TinyVideo(layers=layers)
    blocks = [Picking(pick, tokens) for _ in range(layers)]
    for block in blocks:
        block.order = blocks[0].order
        block.load_state_dict({**model.blocks[0].state_dict(), "order": block.order})
    model.blocks = nn.ModuleList(blocks)
    return model.eval()


@pytest.mark.parametrize(("kind", "text"), [*((kind, 0) for kind in PICKS), ("index", TEXT)])
def test_no_token_is_moved_for_it(kind: str, text: int) -> None:
    inputs = {"latent": torch.randn(2, CHANNELS, *GRID)}
    if text:
        inputs |= {"text": torch.randn(2, TEXT, 16), "valid": valid(6, 3, of=TEXT)}
    model = model_of(PICKS[kind], 3, prod(GRID) + text)
    assert check(model, model.sites, OPTIONS, **inputs).report.conversions <= 4


@torch.no_grad()
def test_it_costs_nothing_in_further_layers() -> None:
    inputs = {"latent": torch.randn(2, CHANNELS, *GRID)}
    few, many = (
        compile_variants(model_of(PICKS["index"], n, prod(GRID)), inputs, {"sta": OPTIONS})["sta"]
        for n in (3, 8)
    )
    assert few.report.conversions == many.report.conversions


@torch.no_grad()
def test_beside_a_frame_that_every_query_sees() -> None:
    model, inputs = (
        model_of(PICKS["index"], 2, prod(GRID)),
        {"latent": torch.randn(2, CHANNELS, *GRID)},
    )
    options = {**OPTIONS, "window": (1, 3, 3), "always_keep": {"frames": [0]}}
    variant = compile_variants(model, inputs, {"sta": options})["sta"]
    site = variant.report.replaced[0]
    mask = torch.ones(prod(GRID), prod(GRID), dtype=torch.bool)
    mask[H * W :, H * W :] = window_mask(site.grid, site.tiles, site.window)
    with Oracle(model, model.sites, mask):
        expected = model(**inputs)
    assert relative_error(variant.run(**inputs), expected) < 1e-5
