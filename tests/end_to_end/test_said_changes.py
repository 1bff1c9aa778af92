"""Plain `torch.compile(backend="sta")` stays correct where it can't replace attention, and its warning prints what works.

Each case is compiled, compared with eager, and its warning read. The code that stands in it is then executed as it stands,
with `model`, `sta_compile` and the numbers of the grid at hand, and the attention is replaced.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sta_compile
from tests.end_to_end.combinations.offloads import groups_of_leaves
from tests.end_to_end.compiled import relative_error
from tests.end_to_end.models import FAMILIES
from tests.end_to_end.tiny import CHANNELS, SPARSE, Block, TinyVideo

GRID = (3, 6, 8)
OPTIONS: dict[str, Any] = {**SPARSE, "min_tokens": 0, "noise": "0..1000"}
# Code in a hint: a call of sta_compile, options, or a method of the model.
CODE = re.compile(r"sta_compile\.compile\([^()]*\)|options=\{.*?\}|model\.\w+\([^()]*\)")
Inputs = dict[str, Any]
pytestmark = pytest.mark.usefixtures("stages_only")


def plain(model: nn.Module, options: dict[str, Any] = OPTIONS) -> None:
    model.compile(backend="sta", options=options)


def family(name: str) -> tuple[nn.Module, Inputs]:
    case = FAMILIES[name].case(1, GRID)
    return case.model, case.inputs


def a_break() -> tuple[nn.Module, Inputs]:
    """Mochi trims its text by the values of a mask, which is in no graph by default."""
    model, inputs = family("mochi")
    plain(model, {**OPTIONS, "noise": "reversed"})
    return model, inputs


def blocks_alone() -> tuple[nn.Module, Inputs]:
    model, inputs = family("cogvideox_2b")
    for block in model.transformer_blocks:  # type: ignore[union-attr]
        plain(block)
    return model, inputs


def a_mask_made_outside_of_blocks() -> tuple[nn.Module, Inputs]:
    model, inputs = family("hunyuan")
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):  # type: ignore[misc]
        plain(block)
    return model, inputs


def hooks_on_blocks() -> tuple[nn.Module, Inputs]:
    model, inputs = family("wan")
    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
    plain(model)
    return model, inputs


def hooks_on_layers() -> tuple[nn.Module, Inputs]:
    model, inputs = family("wan")
    groups_of_leaves(model)
    plain(model)
    return model, inputs


def an_unknown_noise() -> tuple[nn.Module, Inputs]:
    model, inputs = family("wan")
    plain(model, {**OPTIONS, "noise": "auto"})
    return model, {**inputs, "timestep": torch.tensor([500])}


def a_short_video() -> tuple[nn.Module, Inputs]:
    model, inputs = family("wan")
    plain(model, {**SPARSE, "noise": "0..1000"})
    return model, inputs


class Packed(nn.Module):
    """Tokens [batch, tokens, width] come in, and nothing says of which grid."""

    def __init__(self) -> None:
        super().__init__()
        self.block = TinyVideo().blocks[0]

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.block(tokens)
        return out


def no_grid() -> tuple[nn.Module, Inputs]:
    model = Packed()
    plain(model, {**OPTIONS, "dense_above": None})
    return model, {"tokens": torch.randn(1, 144, 16)}


def dropout() -> tuple[nn.Module, Inputs]:
    """A probability that is 0 once the model is in eval mode; so small that it drops nothing here."""
    model = TinyVideo()

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, 1e-9 if model.training else 0.0)

    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn.attend = attend
    model.train()
    plain(model, {**OPTIONS, "dense_above": None})
    return model, {"latent": torch.randn(1, CHANNELS, *GRID)}


CASES = [
    a_break, blocks_alone, a_mask_made_outside_of_blocks, hooks_on_blocks, hooks_on_layers, an_unknown_noise,
    a_short_video, no_grid, dropout,
]  # fmt: skip


def tensor_of(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else tensor_of(out[0])


def said(model: nn.Module, inputs: Inputs) -> tuple[str, Tensor]:
    """The warning of a call, and what the call returned."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = tensor_of(model(**inputs))
    texts = [str(w.message) for w in found]
    return next(text for text in texts if text.startswith("sta:")), out


def execute(code: str, model: nn.Module, options: dict[str, Any]) -> None:
    frames, rows, cols = GRID
    given = {
        "sta_compile": sta_compile,
        "model": model,
        "frames": frames,
        "rows": rows,
        "cols": cols,
    }
    if code.startswith("options="):
        named = eval(code.removeprefix("options="), given)
        model.compile(backend="sta", options={**options, **named})
    elif code.startswith("sta_compile.compile"):
        eval(code.replace(")", ", **OPTIONS)"), {**given, "OPTIONS": options})
    else:
        eval(code, given)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_what_is_said_works(make: Callable[[], tuple[nn.Module, Inputs]]) -> None:
    model, inputs = make()
    text, out = said(model, inputs)
    exact = tensor_of(model.forward(**inputs))
    assert relative_error(out, exact) < 1e-5, text
    code = CODE.search(text)
    assert code is not None, text
    torch._dynamo.reset()
    sta_compile.reset_reports()
    options = {key: value for key, value in OPTIONS.items() if key not in code.group()}
    if make is a_break:
        options["noise"] = "reversed"
    if make is an_unknown_noise:
        options["noise"] = eval(code.group().removeprefix("options="))["noise"]
    if make in (no_grid, dropout):
        options["dense_above"] = None
    execute(code.group(), model, options)
    found = tensor_of(model(**inputs))
    assert any(report.replaced for report in sta_compile.reports()), text
    assert relative_error(found, exact) > 1e-4
