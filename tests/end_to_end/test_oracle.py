"""The oracle against a second writing of the definition, by other means."""

from __future__ import annotations

import pytest
import torch

from tests import oracle as by_tensors
from tests.end_to_end.oracle import Oracle, window_mask

F = torch.nn.functional


@pytest.mark.parametrize(
    ("grid", "tiles", "window"),
    [
        ((5, 9, 11), (5, 5, 6), (3, 3, 3)),
        ((5, 9, 11), (3, 3, 3), (1, 1, 1)),
        ((7, 13, 3), (4, 5, 1), (3, 3, 1)),
        ((6, 8, 8), (3, 2, 2), (3, 1, 1)),
        ((1, 6, 10), (1, 3, 4), (1, 2, 5)),
    ],
)
def test_two_writings_of_the_definition_agree(grid, tiles, window):
    assert torch.equal(window_mask(grid, tiles, window), by_tensors.video_mask(grid, tiles, window))


def test_a_window_that_is_the_whole_axis_sees_all():
    assert window_mask((3, 4, 5), (3, 4, 5), (3, 5, 5)).all()


def test_rows_and_columns_are_told_apart():
    tall, wide = (
        window_mask((1, 4, 6), (1, 4, 3), (1, 1, 3)),
        window_mask((1, 6, 4), (1, 3, 4), (1, 3, 1)),
    )
    assert tall.sum() == wide.sum()
    assert not torch.equal(tall, wide)


class TwoAttentions(torch.nn.Module):
    class Attend(torch.nn.Module):
        def forward(self, x, mask=None):
            return F.scaled_dot_product_attention(x, x, x, mask)

    def __init__(self):
        super().__init__()
        self.first, self.second = self.Attend(), self.Attend()

    def forward(self, x, mask=None):
        return self.second(self.first(x, mask), mask)


class TestTheMode:
    grid, tiles, window = (1, 4, 4), (1, 4, 4), (1, 1, 1)

    def run(self, x, given=None, sites=("first",), **how):
        mask = window_mask(self.grid, self.tiles, self.window)
        model = TwoAttentions()
        with Oracle(model, sites, mask, **how) as oracle:
            result = model.first(x, given), model.second(x, given)
        self.calls = oracle.calls
        return result

    def test_only_named_modules_are_masked(self):
        x = torch.randn(2, 1, 16, 4)
        first, second = self.run(x)
        assert self.calls == 1
        assert torch.allclose(first, x)  # every token sees itself only
        assert torch.equal(second, F.scaled_dot_product_attention(x, x, x))

    @pytest.mark.parametrize("kind", ["bool", "additive"])
    def test_the_models_own_mask_holds_too(self, kind):
        x = torch.randn(1, 1, 18, 4)
        given = torch.ones(1, 1, 1, 18, dtype=torch.bool)
        given[..., 17] = False
        given = given if kind == "bool" else torch.zeros(given.shape).masked_fill(~given, -1e4)
        first, _ = self.run(x, given)
        expected = torch.ones(18, 18, dtype=torch.bool)
        expected[:16, :16] = torch.eye(16)
        expected[:, 17] = False
        assert torch.allclose(first, F.scaled_dot_product_attention(x, x, x, expected), atol=1e-6)

    def test_text_in_front(self):
        x = torch.randn(1, 1, 18, 4)
        first, _ = self.run(x, text_first=True)
        expected = torch.ones(18, 18, dtype=torch.bool)
        expected[2:, 2:] = torch.eye(16)
        assert torch.allclose(first, F.scaled_dot_product_attention(x, x, x, expected), atol=1e-6)

    def test_dense_samples_see_everything(self):
        x = torch.randn(2, 1, 16, 4)
        first, second = self.run(x, dense=(True, False))
        assert torch.allclose(first[0], second[0], atol=1e-6)
        assert torch.allclose(first[1], x[1])
