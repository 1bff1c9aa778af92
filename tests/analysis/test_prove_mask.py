"""What is proved of a mask holds for the mask that the graph computes, and doubtful masks are not proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter

from sta_compile.analysis.graph_view import GraphView
from sta_compile.analysis.prove_mask import Below, Everywhere, MaskFact, lower_bound, prove_mask
from tests.analysis.traced import capture_with_inputs

VIDEO, TEXT = 12, 5
S = VIDEO + TEXT
Mask = Callable[[Tensor], Tensor]  # valid text tokens [batch, TEXT] -> a mask over S keys


def keys(reference: Tensor) -> Tensor:
    return torch.arange(S, device=reference.device)


def hunyuan_video(valid: Tensor) -> Tensor:
    mask = torch.ones(valid.shape[0], S, dtype=torch.bool)
    length = VIDEO + valid.sum(1, dtype=torch.int)
    positions = torch.arange(S)[None].expand(valid.shape[0], -1)
    mask = mask.masked_fill(positions >= length[:, None], False)
    return mask.unsqueeze(1).unsqueeze(1)


BELOW: dict[str, Mask] = {
    "HunyuanVideo": hunyuan_video,
    "less": lambda valid: keys(valid) < VIDEO + valid.sum(1, keepdim=True),
    "not greater or equal": lambda valid: ~(keys(valid) >= VIDEO + valid.sum(1)[:, None]),
    "turned round": lambda valid: VIDEO + valid.sum(1)[:, None] > keys(valid),
    "not turned round": lambda valid: torch.logical_not(
        VIDEO + valid.sum(1)[:, None] <= keys(valid)
    ),
    "and all": lambda valid: (
        torch.ones(2, S, dtype=torch.bool) & (keys(valid) < VIDEO + valid.sum(1, keepdim=True))
    ),
    "shaped": lambda valid: (keys(valid) < VIDEO + valid.sum(1)[:, None])[:, None, None, :].expand(
        -1, 1, 1, -1
    ),
    "clamped": lambda valid: keys(valid) < valid.sum(1, keepdim=True).clamp(min=VIDEO),
    "counted": lambda valid: keys(valid) < VIDEO + torch.count_nonzero(valid, 1)[:, None],
}
DOUBTFUL: dict[str, Mask] = {
    "data": lambda valid: torch.cat([valid[:, :1].expand(-1, VIDEO), valid], 1),
    "over video": lambda valid: keys(valid) % 2 == 0,
    "window": lambda valid: (keys(valid) < 14) & (keys(valid) > 3),
    "text before video": lambda valid: torch.cat(
        [valid, torch.ones(2, VIDEO, dtype=torch.bool)], 1
    ),
    "padding on the left": lambda valid: keys(valid) >= valid.sum(1, keepdim=True),
    "of queries": lambda valid: (keys(valid) < VIDEO + valid.sum(1)[:, None])[:, None, :, None],
    "pairs": lambda valid: (
        (m := keys(valid) < VIDEO + valid.sum(1)[:, None])[:, None, :, None] & m[:, None, None]
    ),
    "one or the other": lambda valid: (
        (keys(valid) < VIDEO + valid.sum(1)[:, None]) | (keys(valid) < 3)
    ),
    "added": lambda valid: torch.where(
        keys(valid) < VIDEO + valid.sum(1)[:, None], 0.0, -torch.inf
    ),
    "filled with true": lambda valid: torch.zeros(2, S, dtype=torch.bool).masked_fill(
        keys(valid) < VIDEO + valid.sum(1)[:, None], True
    ),
    "from one": lambda valid: torch.arange(1, S + 1) < VIDEO + valid.sum(1)[:, None],
    "by twos": lambda valid: torch.arange(0, 2 * S, 2) < VIDEO + valid.sum(1)[:, None],
    "by a limit for each key": lambda valid: keys(valid) < keys(valid).flip(0),
    "causal": lambda valid: torch.ones(S, S, dtype=torch.bool).tril(),
}


def fact_of(mask: Mask) -> tuple[MaskFact | None, GraphView, Callable[[Any], Any]]:
    """The fact, and how to get the value of a node for lengths 2 and 5."""
    valid = torch.arange(TEXT) < torch.tensor([2, 5])[:, None]
    gm, examples = capture_with_inputs(mask, valid)
    (values,) = gm.graph.output_node().args
    interpreter = Interpreter(gm, garbage_collect_values=False)
    interpreter.run(*examples)
    view = GraphView(gm)
    node = values[0]  # type: ignore[index]
    return prove_mask(view, node), view, lambda n: interpreter.env[node if n is None else n]


@pytest.mark.parametrize("name", BELOW)
def test_padding_after_the_video_is_proved(name: str) -> None:
    fact, view, value = fact_of(BELOW[name])
    assert isinstance(fact, Below)
    limits = value(fact.limit).reshape(-1, 1)
    visible = (torch.arange(S) < limits) ^ fact.negated
    torch.testing.assert_close(value(None).reshape(-1, S).expand(2, -1), visible)
    bound = lower_bound(view, fact.limit)
    assert isinstance(bound, int)
    assert VIDEO <= bound <= int(limits.min())


@pytest.mark.parametrize("name", DOUBTFUL)
def test_other_masks_are_not_proved_to_show_all_video(name: str) -> None:
    fact, view, _ = fact_of(DOUBTFUL[name])
    bound = lower_bound(view, fact.limit) if isinstance(fact, Below) else None
    assert fact is None or (isinstance(fact, Below) and (fact.negated or bound is None))


@pytest.mark.parametrize(
    ("mask", "value"),
    [
        (lambda valid: torch.ones(2, S, dtype=torch.bool), True),
        (lambda valid: torch.zeros(2, S) > 0, None),
        (lambda valid: ~torch.zeros(2, 1, 1, S, dtype=torch.bool), True),
        (lambda valid: torch.full((2, S), True), True),
        (lambda valid: torch.full((2, S), False), False),
    ],
)
def test_constant_masks(mask: Mask, value: bool | None) -> None:
    fact, *_ = fact_of(mask)
    assert fact == (None if value is None else Everywhere(value))


@pytest.mark.parametrize(
    ("limit", "bound"),
    [
        (lambda n: n.sum(1, keepdim=True) + 3, None),  # of floats
        (lambda n: (n > 0).sum(1, keepdim=True) + 3, 3),
        (lambda n: 3 + (n > 0).long().sum(1).unsqueeze(-1), 3),
        (lambda n: (n > 0).sum(1)[:, None] - 2, None),
        (lambda n: (n > 0).sum(1)[:, None] * 2, None),
        (lambda n: (n > 0).long().sum(1)[:, None] + 3, 3),  # a mask of integers
        (lambda n: n.long().clamp(min=4)[:, :1] + 1, 5),
        (lambda n: torch.add((n > 0).sum(1)[:, None], 1, alpha=-2), None),
    ],
)
def test_lower_bounds(limit: Callable[[Tensor], Tensor], bound: int | None) -> None:
    gm, _ = capture_with_inputs(limit, torch.randn(2, TEXT))
    (values,) = gm.graph.output_node().args
    assert lower_bound(GraphView(gm), values[0]) == bound  # type: ignore[index]
