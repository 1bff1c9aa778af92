"""Each sample of a batch takes its own dense flag: heads that are merged into the batch, and samples that change places."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.end_to_end.compiled import compile_variants, relative_error
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.spelled import GRID, latent
from tests.end_to_end.tiny import SPARSE, Attend, TinyVideo


def samples_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    out = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)))
    return out.unflatten(0, (q.shape[0], -1))


def heads_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    p = torch.bmm(q, k.mT * 8**-0.5).softmax(-1)
    return torch.bmm(p, v).unflatten(0, (2, -1)).transpose(0, 1)


class Timed(TinyVideo):
    def __init__(self, attend: Attend | None = None) -> None:
        super().__init__(layers=2)
        self.embed = nn.Linear(1, 16)
        for block in self.blocks if attend is not None else ():
            block.attn.attend = attend

    def forward(self, latent: Tensor, timestep: Tensor) -> Tensor:
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        x = x * (1 + self.embed(timestep[:, None] / 1000)[:, None])
        for block in self.blocks:
            x = block(x)
        return self.out(x).unflatten(1, GRID).permute(0, 4, 1, 2, 3)


@pytest.mark.parametrize("attend", [samples_first, heads_first])
@pytest.mark.parametrize("dense", [(True, False, False), (False, True, False)])
@torch.no_grad()
def test_flags_of_samples(attend: Attend, dense: tuple[bool, ...]) -> None:
    model, twin = Timed(attend), Timed()
    twin.load_state_dict(model.state_dict())
    inputs = {"latent": latent(3), "timestep": torch.tensor([999.0 if d else 300.0 for d in dense])}
    options = {**SPARSE, "dense_above": 0.95, "noise": "0..1000", "timestep": "timestep"}
    variant = compile_variants(model, inputs, {"sta": options})["sta"]
    (site,) = {(s.grid, s.tiles, s.window) for s in variant.report.replaced}
    with Oracle(twin, twin.sites, window_mask(*site), dense=dense):
        expected = twin(**inputs)
    assert relative_error(variant.run(**inputs), expected) < 1e-5


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "cat": lambda x: torch.cat([x[1:], x[:1]]),
    "index": lambda x: x[torch.tensor([2, 0, 1])],
    "stack": lambda x: torch.stack([x[2], x[1], x[0]]),
}


class Moved(Timed):
    """Samples change places between two attentions."""

    def __init__(self, order: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.order = order

    def forward(self, latent: Tensor, timestep: Tensor) -> Tensor:
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        x = x * (1 + self.embed(timestep[:, None] / 1000)[:, None])
        x = self.blocks[1](self.order(self.blocks[0](x)))
        return self.out(x).unflatten(1, GRID).permute(0, 4, 1, 2, 3)


@pytest.mark.parametrize("order", ORDERS)
@torch.no_grad()
def test_samples_that_change_places(order: str) -> None:
    """No flag goes to another sample: where the order is not known, all are dense if one is."""
    model = Moved(ORDERS[order])
    options = {**SPARSE, "dense_above": 0.95, "noise": "0..1000", "timestep": "timestep"}
    inputs = {"latent": latent(3), "timestep": torch.tensor([999.0, 300.0, 300.0])}
    variant = compile_variants(model, inputs, {"sta": options})["sta"]
    (site,) = {(s.grid, s.tiles, s.window) for s in variant.report.replaced}
    mask, (first, second) = window_mask(*site), model.sites
    found = variant.run(**inputs)
    moved = ORDERS[order](torch.tensor([True, False, False])).tolist()

    def expected(flags: list[bool]) -> Tensor:
        with (
            Oracle(model, [first], mask, dense=(True, False, False)),
            Oracle(model, [second], mask, dense=tuple(flags)),
        ):
            return model(**inputs)

    errors = [relative_error(found, expected(flags)) for flags in ([True] * 3, moved)]
    assert min(errors) < 1e-5
    inputs["timestep"] = torch.full((3,), 300.0)
    with Oracle(model, model.sites, mask):
        sparse = model(**inputs)
    assert relative_error(variant.run(**inputs), sparse) < 1e-5
