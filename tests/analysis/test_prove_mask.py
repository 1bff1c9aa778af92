"""What is proved of a mask holds for the mask that the graph computes, and doubtful masks are not proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Interpreter

from sta_compile.analysis.graph_view import GraphView
from sta_compile.analysis.lower_bound import lower_bound
from sta_compile.analysis.mask_facts import DATA, FALSE, TRUE, Below, Fact
from sta_compile.analysis.prove_mask import ContextMask, MaskProver
from tests.analysis.traced import capture_with_inputs

# The keys: some context, the video, more context.
BEFORE, VIDEO, TEXT = 3, 12, 5
S = BEFORE + VIDEO + TEXT
Mask = Callable[[Tensor], Tensor]  # valid text tokens [batch, TEXT] -> a mask over S keys


def keys(reference: Tensor) -> Tensor:
    return torch.arange(S, device=reference.device)


def hunyuan_video(valid: Tensor) -> Tensor:
    mask = torch.ones(valid.shape[0], S, dtype=torch.bool)
    length = BEFORE + VIDEO + valid.sum(1, dtype=torch.int)
    positions = torch.arange(S)[None].expand(valid.shape[0], -1)
    mask = mask.masked_fill(positions >= length[:, None], False)
    return mask.unsqueeze(1).unsqueeze(1)


E = BEFORE + VIDEO
BELOW: dict[str, Mask] = {
    "HunyuanVideo": hunyuan_video,
    "less": lambda valid: keys(valid) < E + valid.sum(1, keepdim=True),
    "not greater or equal": lambda valid: ~(keys(valid) >= E + valid.sum(1)[:, None]),
    "turned round": lambda valid: E + valid.sum(1)[:, None] > keys(valid),
    "not turned round": lambda valid: torch.logical_not(E + valid.sum(1)[:, None] <= keys(valid)),
    "and all": lambda valid: (
        torch.ones(2, S, dtype=torch.bool) & (keys(valid) < E + valid.sum(1, keepdim=True))
    ),
    "shaped": lambda valid: (keys(valid) < E + valid.sum(1)[:, None])[:, None, None, :].expand(
        -1, 1, 1, -1
    ),
    "clamped": lambda valid: keys(valid) < valid.sum(1, keepdim=True).clamp(min=E),
    "counted": lambda valid: keys(valid) < E + torch.count_nonzero(valid, 1)[:, None],
    "of the text alone": lambda valid: F.pad(
        torch.arange(TEXT) < valid.sum(1)[:, None], (E, 0), value=True
    ),
    "from the text": lambda valid: keys(valid) - E < valid.sum(1)[:, None],
    "filled with true": lambda valid: (
        torch.zeros(2, S).bool().masked_fill(keys(valid) < E + valid.sum(1)[:, None], True)
    ),
    "a part": lambda valid: (torch.arange(2 * S) < S + E + valid.sum(1)[:, None])[:, S:],
    "additive": lambda valid: torch.where(keys(valid) < E + valid.sum(1)[:, None], 0.0, -torch.inf),
}


def some(valid: Tensor) -> Tensor:
    return torch.cat([torch.ones(2, E, dtype=torch.bool), valid], 1)


def copied(valid: Tensor) -> Tensor:
    mask = torch.full((2, S), -torch.inf)
    mask[:, :E] = 0
    mask[:, E:] = mask[:, E:].clone().masked_fill(valid, 0.0)
    return mask


GIVEN: dict[str, Mask] = {
    "beside ones": some,
    "padded": lambda valid: F.pad(valid.float(), (E, 0), value=1.0) > 0.5,
    "padding on the left": lambda valid: F.pad(
        torch.arange(TEXT) >= valid.sum(1)[:, None], (E, 0), value=True
    ),
    "before and after": lambda valid: torch.cat(
        [valid[:, :BEFORE], torch.ones(2, VIDEO, dtype=torch.bool), valid], 1
    ),
    "less or equal": lambda valid: keys(valid) <= E + valid.sum(1, keepdim=True),
    "pairs": lambda valid: (m := some(valid))[:, None, :, None] & m[:, None, None],
    "product of pairs": lambda valid: (
        (m := some(valid).float())[:, None, :, None] * m[:, None, None]
    ).bool(),
    "additive": lambda valid: (1.0 - some(valid).float()) * -1e4,
    "additive of long": lambda valid: (1 - some(valid).long()) * -10000.0,
    "sum of two": lambda valid: (
        (1.0 - some(valid).float()) * -1e4 + (~some(valid.flip(0))).float() * -2e4
    ),
    "least number": lambda valid: (
        (~some(valid)).to(torch.bfloat16) * torch.finfo(torch.bfloat16).min
    ),
    "filled": lambda valid: torch.zeros(2, S).masked_fill(~some(valid), -torch.inf),
    "in place": lambda valid: torch.zeros(2, S).masked_fill_(~some(valid), -1e5),
    "copied": copied,
    "one or the other": lambda valid: (keys(valid) < E) | F.pad(valid, (E, 0)),
    "chosen": lambda valid: torch.where(keys(valid) < E, True, F.pad(valid, (E, 0))),
    "not hidden": lambda valid: ~F.pad(~valid, (E, 0)),
    "equal to one": lambda valid: some(valid).int() == 1,
    "transposed": lambda valid: some(valid).T[:, None, :].permute(2, 1, 0)[:, None],
}


def pairs(valid: Tensor) -> Tensor:
    return (m := some(valid))[:, None, :, None] & m[:, None, None]


def no_empty_rows(valid: Tensor) -> Tensor:
    """As HunyuanVideo's repository writes it: queries of padding see one key of the video."""
    mask = F.pad(valid, (E, 0), value=True).view(2, 1, 1, S).repeat(1, 1, S, 1)
    mask = (mask & mask.transpose(2, 3)).bool()
    mask[..., BEFORE] = True
    return mask


GIVEN |= {
    "no empty rows": no_empty_rows,
    "each sees itself": lambda valid: pairs(valid) | torch.eye(S, dtype=torch.bool),
    "each sees itself, by places": lambda valid: pairs(valid) | (keys(valid)[:, None] == keys(valid)),
    "product of letters": lambda valid: torch.einsum(
        "bi,bj->bij", m := some(valid).float(), m
    ).bool()[:, None],
    "product of columns": lambda valid: ((m := some(valid).float())[:, None, :, None] @ m[:, None, None]) > 0.5,
    "same segment": lambda valid: ((m := some(valid).long())[:, None, :, None] == m[:, None, None]),
}  # fmt: skip


def sample_by_sample(valid: Tensor) -> Tensor:
    """As FramePack writes it."""
    mask = torch.zeros(2, S, dtype=torch.bool)
    lengths = E + valid.sum(1, dtype=torch.int)
    for i in range(2):
        mask[i, : lengths[i]] = True
    return mask


GIVEN["sample by sample"] = sample_by_sample
# Some keys of the video are hidden or may be, from all queries alike.
OF_VIDEO: dict[str, Mask] = {
    "data": lambda valid: torch.cat([valid[:, :1].expand(-1, E), valid], 1),
    "over video": lambda valid: keys(valid) % 2 == 0,
    "window": lambda valid: (keys(valid) < 14) & (keys(valid) > 3),
    "text as long as the video": lambda valid: torch.cat([valid] * 4, 1),
    "padding on the left of all": lambda valid: keys(valid) >= valid.sum(1, keepdim=True),
    "from one": lambda valid: torch.arange(1, S + 1) < E + valid.sum(1)[:, None],
    "by twos": lambda valid: torch.arange(0, 2 * S, 2) < E + valid.sum(1)[:, None],
    "by a limit for each key": lambda valid: keys(valid) < keys(valid).flip(0),
    "written over": lambda valid: _written(valid, slice(0, 2)),
    "written in a row": lambda valid: _written(valid, 1),
}
DOUBTFUL: dict[str, Mask] = {
    "mild": lambda valid: (1.0 - some(valid).float()) * -100.0,
    "of any number": lambda valid: (1.0 - some(valid).float() * valid.sum()) * -1e4,
    "raised": lambda valid: (1.0 - some(valid).float()) * -1e4 + 1.0,
    "causal": lambda valid: torch.ones(S, S, dtype=torch.bool).tril(),
    "either of a pair": lambda valid: (m := some(valid))[:, None, :, None] | m[:, None, None],
    "of some queries": lambda valid: some(valid)[:, None, None] & (keys(valid) < 9)[:, None],
    "rows side by side": lambda valid: torch.cat(
        [some(valid)[:, None].expand(-1, 9, -1), torch.ones(2, S - 9, S, dtype=torch.bool)], 1
    )[:, None],
    "of heads": lambda valid: torch.stack([some(valid), some(valid.flip(0))], 1)[:, :, None],
}


def some_rows(valid: Tensor) -> Tensor:
    """Queries of text that are not seen by all see the text, and no video."""
    mask = torch.ones(2, 1, S, S, dtype=torch.bool)
    mask[..., E:, :E] = valid[:, None, :, None]
    return mask


DOUBTFUL |= {
    "some rows": some_rows,
    "rows of others": lambda valid: some(valid.flip(1))[:, None, :, None] == some(valid)[:, None, None],
    "itself too": lambda valid: some(valid)[:, None, None] | torch.eye(S, dtype=torch.bool),
    "a text key": lambda valid: torch.cat([(m := pairs(valid))[..., :-1], torch.ones_like(m[..., :1])], -1),
    "segments": lambda valid: ((m := some(valid).long() * valid.sum())[:, None, :, None] == m[:, None, None]),
}  # fmt: skip


def one_sample(valid: Tensor) -> Tensor:
    mask = torch.zeros(2, S, dtype=torch.bool)
    mask[1, : E + valid[1].sum()] = True
    return mask


OF_VIDEO["one sample"] = one_sample


def _written(valid: Tensor, rows: Any) -> Tensor:
    mask = torch.ones(2, S, dtype=torch.bool)
    mask[rows, 4:9] = valid[rows]
    return mask


def fact_of(mask: Mask) -> tuple[ContextMask | None, GraphView, Callable[[Any], Any]]:
    """The fact, and how to get the value of a node for lengths 2 and 5."""
    valid = torch.arange(TEXT) < torch.tensor([2, 5])[:, None]

    def of_samples(valid: Tensor) -> Tensor:
        found = mask(valid)
        return found[:, None, None] if found.shape == (2, S) else found

    gm, examples = capture_with_inputs(of_samples, valid)
    (values,) = gm.graph.output_node().args
    interpreter = Interpreter(gm, garbage_collect_values=False)
    interpreter.run(*examples)
    view = GraphView(gm)
    node = values[0]  # type: ignore[index]
    fact = MaskProver(view).prove(node, len(view.nodes), [BEFORE, VIDEO, TEXT], 1, [0, 1, 2])
    return fact, view, lambda n: interpreter.env[node if n is None else n]


def shown(mask: Tensor) -> Tensor:
    """bool [batch, heads, queries, keys]"""
    mask = mask if mask.dtype == torch.bool else mask == 0
    return mask[(None,) * (4 - mask.dim())].expand(2, -1, -1, -1)


@pytest.mark.parametrize("name", BELOW)
def test_padding_after_the_video_is_proved(name: str) -> None:
    fact, _, value = fact_of(BELOW[name])
    assert fact is not None
    assert fact.prefixes
    before, after = fact.facts
    assert before == TRUE
    assert isinstance(after, Below)
    visible = torch.arange(TEXT) + after.start < value(after.limit).reshape(-1, 1)
    torch.testing.assert_close(visible, shown(value(None)).flatten(0, 2)[:, E:])


@pytest.mark.parametrize("name", GIVEN)
def test_data_about_context_only_is_proved(name: str) -> None:
    fact, _, value = fact_of(GIVEN[name])
    assert fact is not None
    assert DATA in fact.facts or not fact.prefixes
    assert fact.additive == (value(None).dtype != torch.bool)
    assert shown(value(None))[:, :, : BEFORE + 1, BEFORE:E].all() or name == "before and after"


@pytest.mark.parametrize("name", OF_VIDEO)
def test_data_about_the_video_is_not_proved_to_show_all_of_it(name: str) -> None:
    fact, _, value = fact_of(OF_VIDEO[name])
    assert fact is not None
    assert fact.video not in (TRUE, FALSE)
    assert not fact.prefixes
    rows = shown(value(None))
    assert (rows == rows[:, :1, :1]).all()


@pytest.mark.parametrize("name", DOUBTFUL)
def test_masks_that_differ_from_query_to_query_are_not_understood(name: str) -> None:
    assert fact_of(DOUBTFUL[name])[0] is None


@pytest.mark.parametrize(
    ("mask", "facts"),
    [
        (lambda valid: torch.ones(2, S, dtype=torch.bool), (TRUE, TRUE)),
        (lambda valid: torch.zeros(2, S) > 0, None),
        (lambda valid: ~torch.zeros(2, 1, 1, S, dtype=torch.bool), (TRUE, TRUE)),
        (lambda valid: torch.full((2, S), True), (TRUE, TRUE)),
        (lambda valid: torch.full((2, S), False), None),
        (lambda valid: torch.arange(S) < E, (TRUE, FALSE)),
        (lambda valid: torch.arange(S) >= BEFORE, (FALSE, TRUE)),
        (lambda valid: torch.zeros(2, 1, 1, S), (TRUE, TRUE)),
        # Queries of padding see nothing, which nobody reads.
        (lambda valid: (keys(valid) < E + valid.sum(1)[:, None])[:, None, :, None], (TRUE, TRUE)),
    ],
)
def test_constant_masks(mask: Mask, facts: tuple[Fact, ...] | None) -> None:
    fact, *_ = fact_of(mask)
    assert (fact and fact.facts) == facts


@st.composite
def expressions(draw: st.DrawFn, depth: int = 4) -> Mask:
    """Boolean masks [2, 1 or S, S] made of all that the prover knows."""
    if depth == 0:
        start = draw(st.sampled_from([0, 2, BEFORE, 9, E]))
        leaves: list[Mask] = [
            lambda valid: torch.ones(2, 1, S, dtype=torch.bool),
            lambda valid: torch.zeros(2, 1, S, dtype=torch.bool),
            lambda valid: (keys(valid) < start + valid.sum(1, keepdim=True))[:, None],
            lambda valid: (keys(valid) >= start)[None, None].expand(2, -1, -1),
            lambda valid: F.pad(valid, (S - TEXT, 0), value=True)[:, None],
            lambda valid: F.pad(valid[:, :BEFORE], (0, S - BEFORE), value=True)[:, None],
            lambda valid: torch.cat([valid] * 4, 1)[:, None],
        ]
        return draw(st.sampled_from(leaves))
    a, b = draw(expressions(depth - 1)), draw(expressions(draw(st.integers(0, depth - 1))))
    cut = draw(st.sampled_from([BEFORE, 9, E]))

    def written(valid: Tensor) -> Tensor:
        out = a(valid).clone()
        out[..., cut:] = b(valid)[..., :1, cut:]
        return out

    operations: list[Mask] = [
        lambda valid: a(valid) & b(valid),
        lambda valid: a(valid) | b(valid),
        lambda valid: ~a(valid),
        lambda valid: a(valid).masked_fill(b(valid), False),
        lambda valid: torch.where(a(valid)[:, :1], b(valid), True),
        lambda valid: torch.cat([a(valid)[:, :1, :cut], b(valid)[:, :1, cut:]], -1),
        lambda valid: a(valid)[:, :1] & b(valid)[:, :1].mT,
        lambda valid: a(valid)[:, :1] == b(valid)[:, :1].mT,
        lambda valid: a(valid) | torch.eye(S, dtype=torch.bool),
        lambda valid: torch.einsum("bi,bj->bij", (m := a(valid)[:, 0].float()), m) != 0,
        lambda valid: (1.0 - a(valid).float()) * -1e4 == 0,
        lambda valid: torch.zeros(2, 1, S).masked_fill(a(valid), -torch.inf) < 0,
        written,
    ]
    return draw(st.sampled_from(operations))


@settings(max_examples=60, deadline=None)
@given(expressions())
def test_what_is_proved_is_so(mask: Mask) -> None:
    fact, _, value = fact_of(lambda valid: mask(valid)[:, None])
    if fact is None:
        return
    seen = shown(value(None))
    ours = seen[:, :, BEFORE:E] if seen.shape[2] > 1 else seen
    assert fact.video != FALSE
    facts = (fact.facts[0], fact.video, fact.facts[1])
    for part, what in zip(ours.split([BEFORE, VIDEO, TEXT], -1), facts, strict=True):
        assert (part == part[:, :, :1]).all()  # of all queries alike
        if what in (TRUE, FALSE):
            assert (part == (what == TRUE)).all()
        if isinstance(what, Below):
            places = torch.arange(part.shape[-1]) + what.start
            expected = (places < value(what.limit).reshape(-1, 1)) ^ what.negated
            assert (part == expected[:, None, None]).all()
    others = seen[:, :, [*range(BEFORE), *range(E, S)]] if seen.shape[2] > 1 else seen
    alike = (others == ours[:, :, :1]).all(-1) | ~others.any(-1)
    rows = [*range(BEFORE), *range(E, S)]
    # Others are of padding: no query that sees what ours see sees their keys.
    assert seen.shape[2] == 1 or (alike | ~ours[:, :, 0, rows]).all()


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
