"""Which arguments are tables of sizes, and that a model which reads them is one graph for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sta_compile.size_tables import CallWithTables, call_of, small_constants, without_tables

GRIDS = torch.tensor([[3, 4, 5], [3, 4, 5]])


@pytest.mark.parametrize(
    ("value", "is_table"),
    [
        (GRIDS, True),
        (GRIDS[0].int(), True),
        (GRIDS.float(), False),
        (GRIDS - 3, False),  # sizes are no zeros
        (torch.full((2, 3), 999), False),  # steps of three frames: too many tokens
        (torch.ones(1, 30, 3, dtype=torch.int64), False),  # positions of thirty tokens
        (torch.ones(2, 3, dtype=torch.bool), False),
        (torch.ones(2, 4, dtype=torch.int64), False),
        (GRIDS.to("meta"), False),
        ([3, 4, 5], False),
    ],
)
def test_rows_of_three_sizes_are_a_table(value: Any, is_table: bool) -> None:
    args, kwargs, tables = without_tables((value,), {"grids": value})
    assert [key for key, *_ in tables] == ([0, "grids"] if is_table else [])
    assert (args[0] is None, kwargs["grids"] is None) == (is_table, is_table)


def test_a_timestep_is_no_table() -> None:
    steps = torch.full((2, 3), 20)
    assert without_tables((steps,), {}, apart_from=steps)[2] == ()


def by_tolist(x: Tensor, grids: Tensor) -> Tensor:
    """As models of the Wan family form their rope: sample by sample, from a list."""
    known = {(3, 4): 2.0}
    out = []
    for sample, (frames, rows, cols) in zip(x, grids.tolist(), strict=True):
        table = torch.arange(frames).view(frames, 1, 1).expand(frames, rows, cols).reshape(-1)
        out.append(sample[: frames * rows * cols] * table)
    return torch.stack(out) * known.get((grids[0][0].item(), grids[0, 1].item()), 1.0)


def test_each_table_has_one_graph() -> None:
    graphs = []

    def backend(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    call = torch.compile(CallWithTables(by_tolist).__call__, backend=backend, fullgraph=True)
    settings = torch._dynamo.config.patch(capture_scalar_outputs=True, specialize_int=True)
    x = torch.randn(2, 60)
    with settings, small_constants():
        for grids in (GRIDS, GRIDS.flip(1), GRIDS):
            args, kwargs, tables = without_tables((x, grids), {})
            assert torch.equal(call(tables, args, kwargs), by_tolist(x, grids))
    assert len(graphs) == 2


def test_a_model_without_tables_is_called_as_it_is() -> None:
    model = torch.nn.Identity()
    assert call_of(model, {"input": GRIDS.float()})[0] is model
    function, args, kwargs = call_of(model, {"input": GRIDS})
    assert torch.equal(function(*args, **kwargs), GRIDS)
