"""Training through the backend: gradients of every parameter and of the latent are those of the masked eager model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from tests.end_to_end.compiled import Variant, compile_variants
from tests.end_to_end.models import FAMILIES, Case, Inputs
from tests.end_to_end.oracle import Oracle, window_mask

GRID = (5, 9, 11)
OPTIONS = {"tile": (1, 2, 2), "window": (3, 5, 5), "dense_above": 0.95, "noise": "0..1000"}
TOLERANCE = 1e-3


def gradients(case: Case, run, inputs: Inputs) -> dict[str, Tensor]:
    """By name, of a loss in which every output has a weight of its own."""
    latent = inputs["hidden_states"].clone().requires_grad_()
    case.model.zero_grad()
    out = run(**{**inputs, "hidden_states": latent})[0]
    torch.manual_seed(2)
    (out * torch.randn_like(out)).sum().backward()
    found = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
    return {"hidden_states": latent.grad, **found}


def expected_gradients(case: Case, variant: Variant, inputs: Inputs, dense) -> dict[str, Tensor]:
    site = variant.report.replaced[0]
    mask = window_mask(site.grid, site.tiles, site.window)
    # Recomputation would leave the oracle, which holds during the forward only.
    case.model.disable_gradient_checkpointing()
    with Oracle(case.model, case.sites, mask, text_first=case.text_first, dense=dense):
        return gradients(case, case.model, inputs)


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Each within the tolerance of its own size; what cancels to nothing (a bias of all keys) within fp32 of the others."""
    assert found.keys() == expected.keys()
    rounding = 1e-6 * max(float(grad.norm()) for grad in expected.values())
    wrong = {
        name: float((found[name] - grad).norm() / grad.norm())
        for name, grad in expected.items()
        if (found[name] - grad).norm() > TOLERANCE * grad.norm() + rounding
    }
    assert not wrong


def attention_calls(gm: torch.fx.GraphModule) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """Attention operators of the root graph, and of its bodies."""
    root, inside = [], []
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            calls = [n for n in module.graph.nodes if n.target is torch.ops.sta.attention.default]
            (root if module is gm else inside).extend(calls)
    return root, inside


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ["wan", "wan_ti2v", "hunyuan", "cogvideox_5b"])
def test_gradients(name, checkpointing):
    """One sample is dense and one sparse; the text of each has a length of its own."""
    case = FAMILIES[name].case(2, GRID)
    case.model.train()
    if checkpointing:
        case.model.enable_gradient_checkpointing()
    inputs = case.at(FAMILIES[name].noisy, FAMILIES[name].clean)
    variant = compile_variants(case.model, inputs, {"sta": OPTIONS}, finish=aot_eager)["sta"]
    root, inside = attention_calls(variant.gm)
    assert len(inside if checkpointing else root) == len(case.sites)
    assert not (root if checkpointing else inside)
    found = gradients(case, variant.run, inputs)
    check(found, expected_gradients(case, variant, inputs, (True, False)))


def test_lengths_and_flags_reach_the_bodies_of_checkpoints():
    case = FAMILIES["hunyuan"].case(2, GRID)
    case.model.train()
    case.model.enable_gradient_checkpointing()
    variant = compile_variants(case.model, case.inputs, {"sta": OPTIONS}, finish=aot_eager)["sta"]
    _, inside = attention_calls(variant.gm)
    assert len(inside) == len(case.sites)
    for call in inside:
        lengths, dense = call.args[3:5]
        assert lengths.meta["example_value"].shape == (2, 1)
        assert dense.meta["example_value"].shape == (2,)


def test_the_window_changes_the_gradients():
    """So that the test above is one of sparse attention."""
    case = FAMILIES["wan"].case(2, GRID)
    variant = compile_variants(case.model, case.inputs, {"sta": OPTIONS})["sta"]
    sparse = expected_gradients(case, variant, case.inputs, (False, False))
    exact = expected_gradients(case, variant, case.inputs, (True, True))
    changed = (sparse["hidden_states"] - exact["hidden_states"]).norm()
    assert changed > 20 * TOLERANCE * exact["hidden_states"].norm()
