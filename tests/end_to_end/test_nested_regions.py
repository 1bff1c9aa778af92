"""Repeated blocks as nested regions: one body serves all layers, and it is edited once for all of its calls."""

from __future__ import annotations

import torch
from torch.compiler import nested_compile_region

from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, SPARSE, Block, TinyVideo, valid


class Region(Block):
    forward = nested_compile_region(Block.forward)


def test_blocks_that_share_a_body():
    model, plain = TinyVideo(layers=4), TinyVideo(layers=4)
    plain.load_state_dict(model.state_dict())
    for block in model.blocks:
        block.__class__ = Region
    inputs = {
        "latent": torch.randn(2, CHANNELS, 3, 5, 7),
        "text": torch.randn(2, 6, 16),
        "valid": valid(6, 3, of=6),  # its lengths have to reach the body
    }
    wanted = {"sparse": SPARSE, "full": {**SPARSE, "window": "full"}}
    with torch.no_grad():
        variants = compile_variants(model, inputs, wanted)
        report = variants["sparse"].report
        (site,) = report.replaced
        assert report.conversions == 2
        with Oracle(plain, plain.sites, window_mask(site.grid, site.tiles, site.window)):
            expected = plain(**inputs)
        assert relative_error(variants["sparse"].run(**inputs), expected) < 1e-5
        assert relative_error(variants["full"].run(**inputs), plain(**inputs)) < 1e-5
