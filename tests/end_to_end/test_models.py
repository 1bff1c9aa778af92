"""Every model computes what the definition says: its self-attention over the grid, and no other, is windowed."""

from __future__ import annotations

import pytest
import torch

from sta_compile.ir.attention_spec import AttentionSpec
from tests.end_to_end.compiled import Options, Variant, compile_variants, relative_error
from tests.end_to_end.models import FAMILIES, Case, Triple, randomize
from tests.end_to_end.oracle import Oracle, window_mask

TOLERANCE = 1e-4

# grid -> (tile, window in tokens), what that is in tiles: windows of one tile, of several, of an axis
GRIDS: dict[Triple, tuple[Triple, Triple, Triple, Triple]] = {
    (5, 9, 11): ((1, 2, 2), (3, 5, 5), (5, 5, 6), (3, 3, 3)),
    (7, 13, 17): ((2, 3, 4), (5, 3, 10), (4, 4, 4), (3, 1, 3)),
    (6, 8, 8): ((2, 4, 4), (5, 4, 4), (3, 2, 2), (3, 1, 1)),
    (4, 7, 7): ((4, 2, 2), (4, 6, 2), (1, 4, 4), (1, 3, 1)),
}
FIRST: Triple = (5, 9, 11)

every_model = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.fixture(autouse=True)
def _eager_is_right():
    with torch.no_grad():
        yield


def options(grid: Triple, **more: object) -> Options:
    tile, window, _, _ = GRIDS[grid]
    return {"tile": tile, "window": window, **more}


def masked(case: Case, variant: Variant, inputs: dict, dense=(False,)) -> torch.Tensor:
    """The eager model with the window of the variant's report."""
    site = variant.report.replaced[0]
    mask = window_mask(site.grid, site.tiles, site.window)
    how = {"text_first": case.text_first, "dense": dense}
    with Oracle(case.model, case.sites, mask, **how) as oracle:
        out = case.model(**inputs)[0]
    per_sample = isinstance(case.model, MOCHI)
    assert oracle.calls == len(case.sites) * (case.size.batch if per_sample else 1)
    return out


def check_sites(case: Case, variant: Variant) -> None:
    """Exactly the self-attentions over the grid are replaced, under the names of their modules."""
    found, sites = variant.report.replaced, list(case.sites)
    if isinstance(case.model, MOCHI):
        sites = [site for site in sites for _ in range(case.size.batch)]
    assert [site.name for site in found] == sites
    assert not variant.report.refused
    assert all(site.grid == case.size.grid for site in found)
    operators = [
        node
        for module in variant.gm.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.target is torch.ops.sta.attention.default
    ]
    assert len(operators) == len(sites)
    assert {AttentionSpec.parse(node.args[7]).tiles for node in operators} == {found[0].tiles}


MOCHI = type(FAMILIES["mochi"].case(1, (1, 2, 2), 2).model)  # attends sample by sample


@every_model
@pytest.mark.parametrize(
    ("batch", "grid"), [(1, FIRST), (2, (7, 13, 17)), (1, (6, 8, 8)), (2, (4, 7, 7))]
)
def test_windowed_attention(family, batch, grid):
    case = family.case(batch, grid)
    wanted = {
        "sparse": options(grid),
        "full": options(grid, window="full"),
        "auto": {"window": "auto"},
    }
    variants = compile_variants(case.model, case.inputs, wanted)
    sparse = variants["sparse"]
    check_sites(case, sparse)
    assert sparse.report.replaced[0].tiles == GRIDS[grid][2]
    assert sparse.report.replaced[0].window == GRIDS[grid][3]

    expected, exact = masked(case, sparse, case.inputs), case.model(**case.inputs)[0]
    assert relative_error(sparse.run(**case.inputs)[0], expected) < TOLERANCE
    assert relative_error(expected, exact) > 100 * TOLERANCE
    assert relative_error(variants["full"].run(**case.inputs)[0], exact) < TOLERANCE
    auto = variants["auto"]
    check_sites(case, auto)
    assert relative_error(auto.run(**case.inputs)[0], masked(case, auto, case.inputs)) < TOLERANCE


@every_model
def test_noisy_samples_are_exact(family):
    """Above the threshold a sample equals the eager model; another one beside it stays sparse."""
    case = family.case(2, FIRST)
    wanted = {"noise": options(FIRST, dense_above=0.95, noise=family.noise)}
    noise = compile_variants(case.model, case.inputs, wanted)["noise"]
    mixed_is_exact = family.name == "mochi"  # its calls belong to no sample that the graph names
    for steps in ("clean", "clean"), ("noisy", "noisy"), ("noisy", "clean"), ("clean", "noisy"):
        inputs = case.at(*(getattr(family, step) for step in steps))
        dense = [step == "noisy" for step in steps]
        if mixed_is_exact:
            dense = [any(dense)] * 2
        expected = masked(case, noise, inputs, dense)
        assert relative_error(noise.run(**inputs)[0], expected) < TOLERANCE, steps


@every_model
def test_conversions_around_each_site_give_the_same(family):
    case = family.case(2, FIRST)
    wanted = {"graph": options(FIRST), "site": options(FIRST, layout="site")}
    variants = compile_variants(case.model, case.inputs, wanted)
    check_sites(case, variants["site"])
    found = variants["site"].run(**case.inputs)[0]
    assert relative_error(found, variants["graph"].run(**case.inputs)[0]) < 1e-6
    assert variants["graph"].report.conversions < variants["site"].report.conversions


@every_model
def test_autocast_with_norms_in_fp32(family):
    """q and k leave their norms in fp32 beside v in bf16: all reach the attention as bf16, as eager's do."""
    case = family.case(2, FIRST)
    with torch.autocast("cpu", torch.bfloat16):
        sparse = compile_variants(case.model, case.inputs, {"sparse": options(FIRST)})["sparse"]
        found = sparse.run(**case.inputs)[0]
        expected = masked(case, sparse, case.inputs)
        exact = case.model(**case.inputs)[0]
    check_sites(case, sparse)
    assert found.dtype == expected.dtype
    precise = masked(case, sparse, case.inputs)
    rounding = relative_error(expected, precise)
    assert relative_error(found, precise) < 1.5 * rounding
    assert relative_error(exact, precise) > 2 * rounding


@pytest.mark.parametrize("name", ["wan", "hunyuan", "cogvideox_5b", "cosmos"])
def test_half_precision_weights(name):
    """No further from the fp32 model than the eager model in bf16 is."""
    case = FAMILIES[name].case(1, FIRST)
    mask = window_mask(FIRST, *GRIDS[FIRST][2:])
    with Oracle(case.model, case.sites, mask, text_first=case.text_first):
        precise = case.model(**case.inputs)[0]
    case.model.to(torch.bfloat16)
    inputs = {name: lowered(value) for name, value in case.inputs.items()}
    sparse = compile_variants(case.model, inputs, {"sparse": options(FIRST)})["sparse"]
    check_sites(case, sparse)
    found, expected = sparse.run(**inputs)[0], masked(case, sparse, inputs)
    assert found.dtype == expected.dtype
    assert relative_error(found, precise) < 1.5 * relative_error(expected, precise)


def lowered(value: object) -> object:
    """Floating point inputs of a model in bf16, as a pipeline passes them; rope tables and timesteps stay."""
    wide = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1
    return value.to(torch.bfloat16) if wide else value


@pytest.mark.parametrize("condition", ["token_replace", "latent_concat"])
def test_hunyuan_video_of_an_image(condition):
    """token_replace modulates the first frame by numbers of its own, in every layer."""
    case = FAMILIES["hunyuan"].case(2, FIRST)
    config = {**case.model.config, "image_condition_type": condition, "guidance_embeds": False}
    model = type(case.model).from_config(config).eval()
    randomize(model)
    inputs = {name: value for name, value in case.inputs.items() if name != "guidance"}
    case = Case(model, inputs, case.sites, case.size, case.text_first)
    variant = compile_variants(model, inputs, {"sta": options(FIRST)})["sta"]
    check_sites(case, variant)
    assert variant.report.conversions <= 5
    assert relative_error(variant.run(**inputs)[0], masked(case, variant, inputs)) < TOLERANCE
