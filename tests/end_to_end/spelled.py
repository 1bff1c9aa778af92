"""One video model whose layers each spell attention in a way of their own, and its twin that calls SDPA.

check([einsum, chunked])        both are replaced, and the output is that of the twin under the definition's mask
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.end_to_end.compiled import Options, Variant, compile_variants, relative_error
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, SPARSE, Attend, TinyVideo

GRID = (3, 6, 8)


def latent(batch: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, CHANNELS, *GRID)


def spelled(attends: Sequence[Attend], **options: Any) -> TinyVideo:
    """A layer per spelling; `scale` as the spellings have it is that of SDPA."""
    model = TinyVideo(**{"layers": len(attends), **options})
    for block, attend in zip(model.blocks, attends, strict=True):
        block.attn.attend = attend
    return model


def check(
    attends: Sequence[Attend], batch: int = 2, compile_as: Options | None = None, **options: Any
) -> Variant:
    """Compiles with a sparse window and compares with the twin. compile_as: arguments of `compile_variants`."""
    model, twin = spelled(attends, **options), TinyVideo(**{"layers": len(attends), **options})
    return check_models(model, twin, twin.sites, compile_as, latent=latent(batch))


def check_models(
    model: nn.Module,
    twin: nn.Module,
    sites: list[str],
    compile_as: Options | None = None,
    **inputs: Tensor,
) -> Variant:
    """Every attention of `model` is replaced; its output is that of `twin`, which calls SDPA, under the mask."""
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        variant = compile_variants(model, inputs, {"sta": SPARSE}, **(compile_as or {}))["sta"]
        found = [site.name.removesuffix(".mha") for site in variant.report.replaced]
        assert found == sites, variant.report.summary()
        site = variant.report.replaced[0]
        assert site.kept is not None
        assert site.kept < 1
        with Oracle(twin, sites, window_mask(site.grid, site.tiles, site.window)) as oracle:
            expected = twin(**inputs)
        assert oracle.calls == len(sites)
        assert relative_error(variant.run(**inputs), expected) < 1e-5
    return variant


def refusals(attends: Sequence[Attend], **options: Any) -> list[str]:
    """The reason for each attention, none of which is replaced; the model computes what it did."""
    model, inputs = spelled(attends, **options), {"latent": latent()}
    with torch.no_grad():
        variant = compile_variants(model, inputs, {"sta": SPARSE})["sta"]
        assert not variant.report.replaced
        assert torch.equal(variant.run(**inputs), model(**inputs))
    return [site.reason for site in variant.report.refused]
