"""Models that Dynamo compiles block by block: the grid and the dense flags come from the call around the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import sta_compile
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES, Case
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import SPARSE

GRID = (3, 6, 8)
OPTIONS = {**SPARSE, "min_tokens": 0}
pytestmark = pytest.mark.usefixtures("stages_only")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    parts = dict(model.named_modules())
    return [part for name, part in parts.items() if name.endswith(("blocks.0", "blocks.1"))]


def break_between_blocks(model: nn.Module) -> None:
    """As hooks of offloading do: a call that Dynamo may not trace before each block."""
    for block in blocks_of(model):
        block.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))


def check(
    case: Case, levels: list[float], noisy: float, hides: Sequence[bool] = (False, False)
) -> None:
    """What the compiled model computes is what the definition says for these steps.

    hides: samples of which a mask hides keys of the video, which are dense.
    """
    site = next(r for r in reversed(sta_compile.reports()) if r.replaced).replaced[0]
    inputs = case.at(*levels)
    found = case.model(**inputs)[0]
    compiled, case.model._compiled_call_impl = case.model._compiled_call_impl, None
    mask = window_mask(site.grid, site.tiles, site.window)
    dense = [level == noisy or hidden for level, hidden in zip(levels, hides, strict=False)]
    with Oracle(case.model, case.sites, mask, text_first=case.text_first, dense=dense):
        assert relative_error(found, case.model(**inputs)[0]) < 1e-5
    case.model._compiled_call_impl = compiled


OF_CALL = "proved by another graph of this call"
OF_MASK = "its mask is checked on the device to leave all video keys"


@pytest.mark.parametrize("name", ["wan_ti2v", "cogvideox_5b", "ltx", "hunyuan"])
def test_breaks_between_blocks(name):
    family = FAMILIES[name]
    case = family.case(2, GRID)
    break_between_blocks(case.model)
    names = list(case.model.state_dict())
    sta_compile.compile(case.model, noise=family.noise, **OPTIONS)
    case.model(**case.inputs)
    replaced = [site for report in sta_compile.reports() for site in report.replaced]
    evidence = f"{OF_CALL}, {OF_MASK}" if name == "hunyuan" else OF_CALL
    assert {(site.grid, site.evidence) for site in replaced} == {(GRID, evidence)}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for levels in ([family.clean] * 2, [family.noisy] * 2, [family.clean, family.noisy]):
            check(case, levels, family.noisy)
    assert list(case.model.state_dict()) == names


def test_a_mask_that_hides_video_from_blocks_later():
    """A block gets HunyuanVideo's mask as an input; what it says of the video is asked of the device in each call."""
    family = FAMILIES["hunyuan"]
    case = family.case(2, GRID)
    hidden = torch.zeros(0, dtype=torch.long)

    @torch.compiler.disable
    def hide(_, args):
        return tuple(without(arg) if is_mask(arg) else arg for arg in args)

    def is_mask(arg) -> bool:
        return isinstance(arg, torch.Tensor) and arg.dtype == torch.bool and arg.shape[-1] > 144

    def without(mask):
        mask = mask.clone()
        mask[0, ..., hidden] = False
        return mask

    for block in blocks_of(case.model):
        block.register_forward_pre_hook(hide)
    sta_compile.compile(case.model, noise=family.noise, **OPTIONS)
    case.model(**case.inputs)
    graphs = len(sta_compile.reports())
    for positions, dense in (([], False), ([5, 77], True), (range(144), True), ([], False)):
        hidden = torch.tensor(positions, dtype=torch.long)
        with torch._dynamo.config.patch(error_on_recompile=True):
            check(case, [family.clean] * 2, family.noisy, hides=[dense, False])
    assert len(sta_compile.reports()) == graphs


def test_portrait_after_landscape():
    """As many tokens, another grid: no shape of a block differs."""
    family = FAMILIES["wan"]
    case = family.case(1, (3, 6, 8))
    turned = replace(family.case(1, (3, 8, 6)), model=case.model)
    break_between_blocks(case.model)
    sta_compile.compile(case.model, **OPTIONS)
    for shape in (case, turned):
        shape.model(**shape.at(999.0))
        check(shape, [family.clean], family.noisy)
    grids = [r.replaced[0].grid for r in sta_compile.reports() if r.replaced]
    assert grids == [(3, 6, 8), (3, 8, 6)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in (case, turned, case):
            for level in (family.clean, family.noisy):
                shape_inputs = shape.at(level)
                shape.model(**shape_inputs)


def test_a_forward_that_dynamo_may_not_trace():
    family = FAMILIES["wan"]
    case = family.case(1, GRID)
    case.model.forward = torch.compiler.disable(case.model.forward)
    for block in case.model.blocks:
        block.compile(backend="sta", options={**OPTIONS, "noise": family.noise})
    sta_compile.compile(case.model, noise=family.noise, **OPTIONS)
    case.model(**case.inputs)
    assert sta_compile.reports()[-1].replaced
    check(case, [family.clean], family.noisy)


def test_two_models_of_one_class_keep_their_own_grids_and_noise():
    """Their blocks share code; what the code depends on is of the call."""
    falling, rising = (FAMILIES["wan"].case(1, GRID) for _ in range(2))
    for case in (falling, rising):
        break_between_blocks(case.model)
    sta_compile.compile(falling.model, noise="0..1000", **OPTIONS)
    sta_compile.compile(rising.model, noise="1000..0", **OPTIONS)
    for case, dense in ((falling, 980.0), (rising, 20.0)):
        case.model(**case.inputs)
        for level in (dense, 500.0):
            check(case, [level], dense)


def test_blocks_outside_of_a_call_are_exact():
    """Code that was compiled inside a call is not for a block that is called alone."""
    case = FAMILIES["wan"].case(1, GRID)
    break_between_blocks(case.model)
    sta_compile.compile(case.model, **OPTIONS)
    case.model(**case.at(500.0))
    block, kept = case.model.blocks[0], []
    block.register_forward_pre_hook(lambda _, args: kept.append(args))
    case.model(**case.at(500.0))
    block.compile(backend="sta", options=OPTIONS)
    alone = block(*kept[0])
    block._compiled_call_impl = None
    assert relative_error(alone, block(*kept[0])) < 1e-6
