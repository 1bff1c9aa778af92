"""What is learnt of sizes that depend on data: the rows that masks pick, and slices counted from the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sta_compile.analysis.axes import Size, axis_size, size_of
from sta_compile.analysis.graph_view import GraphView, fake_value
from sta_compile.analysis.trace_dims import trace_dims
from tests.analysis.traced import capture

X, MASK = torch.randn(9, 4), torch.arange(9) % 3 > 0


def sizes(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> list[Size]:
    """The first size of each output, with what is known of it."""
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        gm = capture(function, *inputs, dynamic=dynamic)
    trace = trace_dims(GraphView(gm))
    (outputs,) = gm.graph.output_node().args
    for node in outputs:
        dims = trace.dims(node)
        assert dims is not None
        assert axis_size(dims[0]) == size_of(fake_value(node).shape[0])
    return [size_of(fake_value(node).shape[0]) for node in outputs]


def picked(x: Tensor, mask: Tensor) -> list[Tensor]:
    return [x[mask], mask[mask], x[mask.bool(), :], torch.nonzero(mask), x.T[:, mask].T]


def test_what_a_mask_picks_has_one_size() -> None:
    found = sizes(picked, X, MASK)
    assert len(set(found)) == 1
    assert not isinstance(found[0], int)


def sorted_by_mask(x: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([x[mask], x[~mask] * 0])


def selected(x: Tensor, mask: Tensor) -> Tensor:
    """The mask of one of several samples, computed twice."""
    masks = torch.stack([mask, mask])
    return torch.cat([x[masks[1].bool()], x[~(masks[1])]])


def counted(x: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([x[: mask.sum().item()].new_zeros(mask.sum().item(), 4), x[~mask]])


@pytest.mark.parametrize("function", [sorted_by_mask, selected, counted])
def test_a_mask_and_its_opposite_pick_everything(function: Callable[..., Tensor]) -> None:
    assert sizes(function, X, MASK) == [9]


def other_mask(x: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([x[mask], x[~(x[:, 0] > 0)]])


def written_between(x: Tensor, mask: Tensor) -> Tensor:
    mask = mask.clone()
    first = x[mask]
    mask[0] = True
    return torch.cat([first, x[~mask]])


def drawn_twice(x: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([x[torch.rand(9) > 0.5], x[~(torch.rand(9) > 0.5)]])


@pytest.mark.parametrize("function", [other_mask, written_between, drawn_twice])
def test_masks_that_may_differ_have_sizes_of_their_own(function: Callable[..., Tensor]) -> None:
    (size,) = sizes(function, X, MASK)
    assert not isinstance(size, int)


def cut_from_the_end(x: Tensor, mask: Tensor) -> list[Tensor]:
    text = x[mask]
    both = torch.cat([x, text])
    count = text.shape[0]
    video, rest = both[:-count], both[-count:]
    return [video + x, rest, torch.cat([video, rest])[:-count], text]


def test_slices_counted_from_the_end() -> None:
    """The sum with x needs as many rows as x has: there are some after them."""
    video, rest, again, text = sizes(cut_from_the_end, X, MASK)
    assert (video, again) == (9, 9)
    assert rest == text


def cut_from_the_end_of_blocks(x: Tensor, mask: Tensor) -> list[Tensor]:
    blocks = F.pad(x, (0, 0, 0, -x.shape[0] % 4)).unflatten(0, (-1, 4)).mean(1)
    return [*cut_from_the_end(blocks, mask[: blocks.shape[0]]), blocks]


def test_what_is_asserted_of_symbolic_sizes() -> None:
    """How many blocks there are has no bound that Dynamo finds; that as many are left is asserted where they are added."""
    video, *_, blocks = sizes(cut_from_the_end_of_blocks, X, MASK, dynamic=True)
    assert not isinstance(blocks, int)
    assert video == blocks


def cut_by_what_may_be_nothing(x: Tensor, mask: Tensor) -> list[Tensor]:
    text = x[mask]
    both = torch.cat([x, text])
    return [both[: -text.shape[0]], both[-text.shape[0] :]]


def test_a_slice_may_be_everything_or_nothing() -> None:
    """`x[:-0]` is empty, and `x[-0:]` is all of x."""
    assert not any(isinstance(size, int) for size in sizes(cut_by_what_may_be_nothing, X, MASK))
    nothing = torch.zeros(9, dtype=torch.bool)
    assert [len(x) for x in cut_by_what_may_be_nothing(X, nothing)] == [0, 9]
