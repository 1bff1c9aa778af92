"""Grids that only the values of inputs show: sparse for the positions that were seen, exact for all others.

A full window is exact whatever the grid, so a hint that no longer holds costs speed and never the result.
"""

from __future__ import annotations

import pytest
import torch
from torch.compiler import nested_compile_region

import sta_compile
from sta_compile.analysis.graph_view import canonical_name
from tests.end_to_end.compiled import (
    Options,
    RewritingBackend,
    Variant,
    compile_variants,
    relative_error,
)
from tests.end_to_end.models import Case, Inputs, Triple
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.packed_models import FAMILIES, places

TOLERANCE = 1e-5
OPTIONS: Options = {"tile": (1, 2, 2), "window": (1, 3, 3)}
HINTED = ("flux", "flux2", "chroma", "ltx_coords", "ltx2_coords", "minimax")
POSITIONS = ("img_ids", "video_coords", "position_ids")


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def masked(case: Case, variant: Variant, inputs: Inputs, dense=(False,)) -> torch.Tensor:
    site = variant.report.replaced[0]
    mask = window_mask(site.grid, site.tiles, site.window)
    with Oracle(case.model, case.sites, mask, text_first=case.text_first, dense=dense) as oracle:
        out = case.model(**inputs)[0]
    assert oracle.calls == len(case.sites)
    return out


def with_positions_of(case: Case, name: str, grid: Triple) -> Inputs:
    """The inputs with the positions of another grid of as many tokens."""
    other = FAMILIES[name].case(case.size.batch, grid).inputs
    (given,) = [key for key in POSITIONS if key in case.inputs]
    return {**case.inputs, given: other[given]}


@pytest.mark.parametrize(
    ("name", "batch", "grid"),
    [(name, 1 + i % 2, ((3, 4, 7), (1, 6, 9))[i // 2 % 2]) for i, name in enumerate(HINTED)],
)
def test_sparse_for_the_grid_that_was_seen_and_exact_for_others(name, batch, grid):
    case = FAMILIES[name].case(batch, grid, layers=1)
    wanted = {"sparse": OPTIONS, "full": {"window": "full"}}
    variants = compile_variants(case.model, case.inputs, wanted)
    sparse, full = variants["sparse"], variants["full"]
    (given,) = [key for key in POSITIONS if key in case.inputs]
    assert [site.name for site in sparse.report.replaced] == list(case.sites)
    assert {site.grid for site in sparse.report.replaced} == {grid}
    basis = f"hinted by values of input {given}"
    assert {site.evidence for site in sparse.report.replaced} == {f"{basis}, checked on the device"}
    assert {site.evidence for site in full.report.replaced} == {basis}

    expected, exact = masked(case, sparse, case.inputs), case.model(**case.inputs)[0]
    assert relative_error(sparse.run(**case.inputs)[0], expected) < TOLERANCE
    assert relative_error(expected, exact) > 100 * TOLERANCE
    assert relative_error(full.run(**case.inputs)[0], exact) < TOLERANCE

    turned = with_positions_of(case, name, (grid[0], grid[2], grid[1]))
    exact = case.model(**turned)[0]
    assert relative_error(sparse.run(**turned)[0], exact) < TOLERANCE
    assert relative_error(full.run(**turned)[0], exact) < TOLERANCE
    assert relative_error(sparse.run(**case.inputs)[0], expected) < TOLERANCE


@pytest.mark.parametrize("above", [None, 0.95])
def test_the_check_stands_beside_the_noise_level(above):
    family = FAMILIES["ltx_coords"]
    case = family.case(2, (3, 4, 7), layers=1)
    options = {**OPTIONS, "dense_above": above, "noise": "0..1000"}
    variant = compile_variants(case.model, case.inputs, {"sta": options})["sta"]
    mixed = case.at(family.noisy, family.clean)
    expected = masked(case, variant, mixed, (above is not None, False))
    assert relative_error(variant.run(**mixed)[0], expected) < TOLERANCE
    turned = {**mixed, "video_coords": mixed["video_coords"].flip(-1)}
    assert relative_error(variant.run(**turned)[0], case.model(**turned)[0]) < TOLERANCE
    one = mixed["video_coords"].clone()
    one[1, 2, 5] += 32  # one token of one sample is elsewhere: all samples are dense
    moved = {**mixed, "video_coords": one}
    assert relative_error(variant.run(**moved)[0], case.model(**moved)[0]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "grid"), [("ltx2", (1, 6, 9)), ("qwen_image", (1, 6, 9)), ("qwen_image", (3, 4, 7))]
)
def test_numbers_that_positions_are_made_of_prove_a_grid(name, grid):
    case = FAMILIES[name].case(2, grid, layers=1)
    variant = compile_variants(case.model, case.inputs, {"sta": OPTIONS})["sta"]
    assert [site.name for site in variant.report.replaced] == list(case.sites)
    assert {(site.grid, site.evidence) for site in variant.report.replaced} == {
        (grid, "proved by positions of the rope tables")
    }
    expected = masked(case, variant, case.inputs)
    assert relative_error(variant.run(**case.inputs)[0], expected) < TOLERANCE
    assert comparisons(variant) == 0


def test_numbers_of_tokens_that_dynamo_makes_symbolic():
    """FLUX with dynamic=True has one symbol for all tokens: a hint makes it a number, and others are other graphs."""
    family = FAMILIES["flux"]
    case = family.case(1, (3, 4, 7), layers=1)
    torch._dynamo.reset()
    sta = RewritingBackend({"sta": OPTIONS})
    compiled = torch.compile(case.model, backend=sta, fullgraph=True, dynamic=True)
    for graphs, (grid, text) in enumerate([((3, 4, 7), 7), ((1, 6, 9), 7), ((1, 6, 9), 12)], 1):
        inputs = family.case(1, grid, layers=1, text=text).inputs
        found = compiled(**inputs)[0]
        reports = sta.reports["sta"]
        assert len(reports) == min(graphs, 2)  # another prompt is no other graph
        site = reports[-1].replaced[0]
        assert (site.grid, site.segments[0]) == (grid, ("context", None))
        with Oracle(
            case.model, case.sites, window_mask(grid, site.tiles, site.window), text_first=True
        ):
            expected = case.model(**inputs)[0]
        assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["flux", "qwen_image", "ltx2_coords", "minimax"])
def test_blocks_that_are_compiled_one_by_one(name):
    """Their rope tables are inputs, which show the grid that nothing else in a block does."""
    case = FAMILIES[name].case(2, (3, 4, 7), layers=2)
    torch._dynamo.reset()
    sta = RewritingBackend({"sta": OPTIONS})
    blocks = [case.model.get_submodule(site.rpartition(".")[0]) for site in case.sites]
    for block in blocks:
        block.compile(backend=sta, fullgraph=True)
    found = case.model(**case.inputs)[0]
    turned = (
        with_positions_of(case, name, (3, 7, 4))
        if name != "qwen_image"
        else {**case.inputs, "img_shapes": [[(3, 7, 4)]] * 2}
    )
    other = case.model(**turned)[0]
    graphs = sta.reports["sta"]
    assert all(len(report.replaced) == 1 for report in graphs)
    assert all("hinted by values of input" in r.replaced[0].evidence for r in graphs)
    for block in blocks:
        block._compiled_call_impl = None
    site = graphs[0].replaced[0]
    assert site.grid == (3, 4, 7)
    mask = window_mask(site.grid, site.tiles, site.window)
    with Oracle(case.model, case.sites, mask, text_first=case.text_first):
        assert relative_error(found, case.model(**case.inputs)[0]) < TOLERANCE
    assert relative_error(other, case.model(**turned)[0]) < TOLERANCE


def test_blocks_that_are_nested_regions():
    """One check in the graph around them, whose answer every call of their body is given."""
    case, plain = (FAMILIES["ltx_coords"].case(2, (3, 4, 7), layers=3) for _ in range(2))
    block = type(case.model.transformer_blocks[0])
    region = type("Region", (block,), {"forward": nested_compile_region(block.forward)})
    for each in case.model.transformer_blocks:
        each.__class__ = region
    variant = compile_variants(case.model, case.inputs, {"sta": OPTIONS})["sta"]
    (site,) = variant.report.replaced
    assert comparisons(variant) == 3
    with Oracle(plain.model, plain.sites, window_mask(site.grid, site.tiles, site.window)):
        expected = plain.model(**case.inputs)[0]
    assert relative_error(variant.run(**case.inputs)[0], expected) < TOLERANCE
    turned = with_positions_of(plain, "ltx_coords", (3, 7, 4))
    assert relative_error(variant.run(**turned)[0], plain.model(**turned)[0]) < TOLERANCE


@pytest.mark.slow
def test_through_inductor():
    """The second grid has a graph of its own, since the values are guarded."""
    case = FAMILIES["ltx_coords"].case(1, (3, 4, 7), layers=1)
    options = {**OPTIONS, "min_tokens": 0, "dense_above": None}
    torch._dynamo.reset()
    compiled = torch.compile(case.model, backend="sta", fullgraph=True, options=options)
    for grid in ((3, 4, 7), (3, 7, 4)):
        inputs = with_positions_of(case, "ltx_coords", grid)
        found = compiled(**inputs)[0]
        (site,) = sta_compile.reports()[-1].replaced
        assert site.grid == grid
        with Oracle(case.model, case.sites, window_mask(grid, site.tiles, site.window)):
            assert relative_error(found, case.model(**inputs)[0]) < TOLERANCE
    assert len(sta_compile.reports()) == 2


def test_one_check_per_graph():
    """However many layers and attentions use it."""
    case = FAMILIES["flux"].case(1, (1, 6, 9), layers=3)
    variant = compile_variants(case.model, case.inputs, {"sta": OPTIONS})["sta"]
    calls = [n for n in variant.gm.graph.nodes if n.target is torch.ops.sta.attention.default]
    assert len(calls) == 6
    assert len({node.args[4] for node in calls}) == 1
    assert comparisons(variant) == 2  # rows and columns


def comparisons(variant: Variant) -> int:
    return [canonical_name(node) for node in variant.gm.graph.nodes].count("isclose")


@pytest.mark.parametrize(
    ("name", "grid", "numbers"),
    [
        ("flux", (1, 4, 5), (1,)),
        ("flux", (1, 6, 9), (1,)),  # a reference of the image's own size is no second frame
        ("flux2", (1, 6, 9), (10, 20)),
    ],
)
def test_references_after_the_image(name, grid, numbers):
    """FLUX Kontext, FLUX.2: the ids of references stand behind those of the image in one tensor, told by their number."""
    case, dim = FAMILIES[name].case(2, (1, 6, 9), layers=1), int(name == "flux2")
    turned = with_positions_of(case, name, (1, 9, 6))["img_ids"]
    axes = turned.shape[-1]
    pieces = [number * torch.eye(axes)[0] + with_zeros(places(grid), axes) for number in numbers]
    behind = torch.cat(pieces).unsqueeze(0) if dim else torch.cat(pieces)
    count = behind.shape[dim]
    inputs = {
        **case.inputs,
        "hidden_states": torch.cat([case.inputs["hidden_states"], torch.randn(2, count, 4)], 1),
        "img_ids": torch.cat([case.inputs["img_ids"], behind], dim),
    }
    variant = compile_variants(case.model, inputs, {"sta": OPTIONS})["sta"]
    site = variant.report.replaced[0]
    assert site.grid == (1, 6, 9)
    assert site.segments == (("context", 7), ("video", 54), ("context", count))
    mask = torch.ones(61 + count, 61 + count, dtype=torch.bool)
    mask[7:61, 7:61] = window_mask(site.grid, site.tiles, site.window)
    with Oracle(case.model, case.sites, mask):
        expected = case.model(**inputs)[0]
    assert relative_error(variant.run(**inputs)[0], expected) < TOLERANCE
    other = {**inputs, "img_ids": torch.cat([turned, behind], dim)}
    assert relative_error(variant.run(**other)[0], case.model(**other)[0]) < TOLERANCE


def with_zeros(ids: torch.Tensor, axes: int) -> torch.Tensor:
    return torch.nn.functional.pad(ids, (0, axes - ids.shape[-1]))


def test_a_declared_grid_needs_no_values():
    case = FAMILIES["ltx_coords"].case(1, (3, 4, 7), layers=1)
    wanted = {"sta": {**OPTIONS, "grid": (3, 4, 7)}}
    variant = compile_variants(case.model, case.inputs, wanted)["sta"]
    assert variant.report.replaced[0].evidence == "declared by option grid"
    assert comparisons(variant) == 0
    expected = masked(case, variant, case.inputs)
    assert relative_error(variant.run(**case.inputs)[0], expected) < TOLERANCE
