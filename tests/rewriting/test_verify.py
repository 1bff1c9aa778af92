"""Verification of edited graphs: captured Wan models, and small functions with one trap each."""

from __future__ import annotations

import gc
import operator
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.fx import Graph, GraphModule, Node

from sta_compile.ir.attention_spec import AttentionSpec
from sta_compile.rewriting.fake_values import VALUE, add_call
from sta_compile.rewriting.repair_calls import repair_calls
from sta_compile.rewriting.repair_views import repair_views
from sta_compile.rewriting.tile_order import emit_tile
from sta_compile.rewriting.verify import Violation, record, verify

SPEC = AttentionSpec(("video",), tiles=(1, 2, 2), window="full").text()


def capture(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> Captured:
    """The graph that a backend gets, with its inputs; `function` has to be one graph."""
    captured: list[Captured] = []

    def backend(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        captured.append((module, inputs))
        return module.forward

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    ((module, inputs),) = captured
    return module, inputs


Captured = tuple[GraphModule, list[Any]]


def run_graph(captured: Captured) -> list[torch.Tensor]:
    module, inputs = captured
    for body in bodies(module):
        body.recompile()
    return list(module(*inputs))


def bodies(module: GraphModule) -> Iterator[GraphModule]:
    return (m for m in module.modules() if isinstance(m, GraphModule))


def find(module: GraphModule, target: Any) -> Node:
    """The first node that calls `target`."""
    nodes = (n for m in bodies(module) for n in m.graph.nodes)
    return next(n for n in nodes if n.op.startswith("call") and n.target == target)


def insert_after(node: Node, target: str, *args: Any) -> Node:
    """Let all users of `node` read node.target(*args)."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        new = add_call(node.graph, "call_method", target, (node, *args), like=node)
    for user in users:
        user.replace_input_with(node, new)
    return new


def insert_pair(node: Node, grid: tuple[int, int, int]) -> None:
    """Let all users of `node` [batch, tokens, features] read it tiled and untiled."""
    users = list(node.users)
    with node.graph.inserting_before(node.next):
        tiled = emit_tile(node.graph, node, 1, 0, grid, SPEC, True, like=node)
        raster = emit_tile(node.graph, tiled, 1, 0, grid, SPEC, False, like=node)
    for user in users:
        user.replace_input_with(node, raster)


def wan(checkpointing: bool = False) -> torch.nn.Module:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model: torch.nn.Module = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    if checkpointing:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    return model.train(checkpointing)


def capture_wan(checkpointing: bool = False, dynamic: bool = False) -> Captured:
    model = wan(checkpointing)
    latent, time_, text = torch.randn(1, 4, 2, 8, 8), torch.tensor([3]), torch.randn(1, 7, 16)

    def call(latent: torch.Tensor, time_: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return model(latent, time_, text, return_dict=False)[0]

    return capture(call, latent, time_, text, dynamic=dynamic)


WAN_GRID = (2, 4, 4)


@pytest.fixture
def grad(request: pytest.FixtureRequest) -> Iterator[bool]:
    with torch.set_grad_enabled(request.param):
        yield request.param


@pytest.mark.parametrize("grad", [False, True], indirect=True, ids=["inference", "checkpointed"])
def test_wan_with_pairs_everywhere(grad: bool) -> None:
    captured = capture_wan(checkpointing=grad)
    module = captured[0]
    expected = run_graph(captured)
    before = record(module)
    values = {n: n.meta.get(VALUE) for m in bodies(module) for n in m.graph.nodes}
    assert verify(module, before) == []
    assert all(n.meta.get(VALUE) is value for n, value in values.items()), "nothing ran again"

    inserted = 0
    for node, value in values.items():
        is_call = node.op.startswith("call") and isinstance(value, torch.Tensor)
        if is_call and value.dim() == 3 and value.shape[1] == 32:
            insert_pair(node, WAN_GRID)
            inserted += 1
    assert inserted > 100
    assert verify(module, before) == []
    for got, want in zip(run_graph(captured), expected, strict=True):
        assert torch.equal(got, want)
    for body in bodies(module):  # the values are those of the edited graph
        for node in body.graph.nodes:
            if isinstance(value := node.meta.get(VALUE), torch.Tensor):
                assert value.shape == node.meta[VALUE].shape


def test_wan_with_symbolic_shapes() -> None:
    with torch.no_grad():
        module, _ = capture_wan(dynamic=True)
        before = record(module)
        assert verify(module, before) == []
        norm = find(module, torch.nn.functional.layer_norm)
        insert_after(norm, "mul", 2)
        assert verify(module, before) == []
        insert_after(norm, "unsqueeze", 0)
        assert "shape" in {v.kind for v in verify(module, before)}


def test_embedding_loses_its_transposed_strides() -> None:
    """The tokens of a conv are channels first in memory; a converted copy is not."""
    with torch.no_grad():
        module, _ = capture_wan()
    before = record(module)
    tokens = find(module, "transpose")
    assert not tokens.meta[VALUE].is_contiguous()
    insert_pair(tokens, WAN_GRID)
    assert verify(module, before) == []
    (reader, *_) = (n for n in module.graph.nodes if n.target == "float" and n in before.entries)
    assert reader.meta[VALUE].is_contiguous()


def test_wrong_edits_are_reported_by_name() -> None:
    def reported(target: str, *args: Any) -> list[Violation]:
        module, _ = capture(lambda x: (x.sin().cos() + 1,), torch.randn(2, 48, 8))
        before = record(module)
        insert_after(find(module, "sin"), target, *args)
        return verify(module, before)

    assert reported("neg") == []
    shape, *_, output = reported("narrow", 1, 0, 47)
    assert (shape.kind, output.kind) == ("shape", "shape")
    assert shape.node is not None
    assert shape.node.name == "cos"
    assert "`cos`" in shape.message
    assert "(2, 48, 8) -> (2, 47, 8)" in shape.message
    dtype, *_ = reported("double")
    assert dtype.kind == "dtype"
    assert "torch.float32 -> torch.float64" in dtype.message
    fails, *_ = reported("tolist")
    assert fails.kind == "fails"


def test_strides_of_outputs_are_checked() -> None:
    module, _ = capture(lambda x: (x.sin(), x.cos() + 1), torch.randn(2, 48, 8))
    before = record(module)
    cos = find(module, "cos")
    transposed = insert_after(cos, "transpose", 1, 2)
    back = insert_after(insert_after(transposed, "contiguous"), "transpose", 1, 2)
    (violation,) = verify(module, before)
    assert (violation.kind, violation.node) == ("strides", next(iter(back.users)))
    assert "graph output 1" in violation.message
    assert "(384, 8, 1) -> (384, 1, 48)" in violation.message


def test_malformed_graph_is_reported() -> None:
    module, _ = capture(lambda x: x.sin().cos(), torch.randn(4))
    before = record(module)
    sin, cos = find(module, "sin"), find(module, "cos")
    cos.append(sin)
    (violation,) = verify(module, before)
    assert violation.kind == "lint"


def flattening(x: torch.Tensor) -> torch.Tensor:
    tokens = x.flatten(2).transpose(1, 2)  # [batch, tokens, channels], channels first in memory
    return (tokens * 2).transpose(1, 2).view(x.shape[0], -1).sin()


def test_views_are_repaired() -> None:
    captured = capture(flattening, torch.randn(2, 6, 3, 4, 4))
    module, _ = captured
    expected = run_graph(captured)
    before = record(module)
    insert_pair(find(module, "transpose"), (3, 4, 4))
    violations = verify(module, before)
    assert [v.kind for v in violations] == ["view"]
    assert repair_views(violations, before) == []
    assert verify(module, before) == []
    assert torch.equal(run_graph(captured)[0], expected[0])


def test_edits_can_be_taken_back() -> None:
    module, _ = capture(flattening, torch.randn(2, 6, 3, 4, 4))
    before = record(module)
    tokens, product = find(module, "transpose"), find(module, operator.mul)
    strides = product.meta[VALUE].stride()
    insert_pair(tokens, (3, 4, 4))
    assert verify(module, before) != []
    assert product.meta[VALUE].stride() != strides
    product.replace_input_with(product.all_input_nodes[0], tokens)
    module.graph.eliminate_dead_code()
    assert verify(module, before) == []
    assert product.meta[VALUE].stride() == strides


def test_views_that_are_written_stay() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        doubled = x.flatten(2).transpose(1, 2) * 2
        flat = doubled.transpose(1, 2).view(x.shape[0], -1)
        flat[:, 0] = 7.0
        return doubled.sum()

    module, _ = capture(function, torch.randn(2, 6, 3, 4, 4))
    before = record(module)
    insert_pair(find(module, "transpose"), (3, 4, 4))
    violations = verify(module, before)
    assert [v.kind for v in violations] == ["view"]
    assert repair_views(violations, before) == violations


def test_as_strided_of_changed_strides_is_reported() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(1, 2) * 2).as_strided((2, 48), (384, 1)) + 1

    module, _ = capture(function, torch.randn(2, 8, 48))
    before = record(module)
    insert_pair(find(module, "transpose"), (3, 4, 4))
    (violation,) = verify(module, before)
    assert violation.kind == "fails"
    assert "as_strided" in violation.message


def rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    x = x.transpose(1, 2) * 1
    out = torch.empty_like(x)
    even, odd = x[..., 0::2], x[..., 1::2]
    out[..., 0::2] = even * table - odd
    out[..., 1::2] = odd * table + even
    half = out[..., :4]
    half.addcmul_(even, odd, value=0.5)
    return out.type_as(x) + 1


@pytest.mark.parametrize("grad", [False, True], indirect=True)
def test_writes_are_propagated(grad: bool) -> None:
    captured = capture(rotated, torch.randn(2, 8, 48, requires_grad=grad), torch.randn(48, 4))
    module, _ = captured
    expected = run_graph(captured)
    before = record(module)
    unchanged = {n: n.meta[VALUE] for n in module.graph.nodes if n.op == "placeholder"}
    shapes = {n: v.stride() for n, v in unchanged.items()}
    insert_pair(find(module, "transpose"), (3, 4, 4))
    (violation,) = verify(module, before)
    assert violation.kind == "strides"  # the sum was channels first
    assert {n: n.meta[VALUE].stride() for n in unchanged} == shapes
    empty = find(module, torch.empty_like)
    assert empty.meta[VALUE].is_contiguous()
    assert torch.equal(run_graph(captured)[0], expected[0])


def test_autocast_regions_are_entered() -> None:
    weight = torch.randn(5, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        tokens = x.transpose(1, 2)
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.linear(tokens, weight).contiguous()

    module, _ = capture(function, torch.randn(2, 8, 48))
    before = record(module)
    insert_pair(find(module, "transpose"), (3, 4, 4))
    assert verify(module, before) == []
    assert not torch.is_autocast_enabled("cpu")
    assert find(module, torch._C._nn.linear).meta[VALUE].dtype == torch.bfloat16


def test_unbacked_sizes_keep_their_symbols() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        tokens = x.transpose(1, 2) * 1
        return torch.nonzero(tokens[0, :, 0]).float() * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        module, _ = capture(function, torch.randn(2, 8, 48))
    before = record(module)
    insert_pair(find(module, "transpose"), (3, 4, 4))
    assert verify(module, before) == []


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, (8,)) + 1


def nested_regions(x: torch.Tensor) -> torch.Tensor:
    return region(region(x).sin()).sin()


def test_shared_bodies() -> None:
    captured = capture(nested_regions, torch.randn(2, 48, 8))
    module, _ = captured
    expected = run_graph(captured)
    before = record(module)
    assert sum(1 for _ in bodies(module)) == 2, "one body for both calls"
    insert_pair(find(module, torch.nn.functional.layer_norm), (3, 4, 4))
    insert_pair(find(module, "sin"), (3, 4, 4))
    assert verify(module, before) == []
    assert torch.allclose(run_graph(captured)[0], expected[0], atol=1e-6)


@pytest.mark.parametrize("batch", [1, 2])
def test_call_sites_of_a_body_have_to_agree(batch: int) -> None:
    captured = capture(nested_regions, torch.randn(batch, 48, 8))
    module, _ = captured
    expected = run_graph(captured)
    before = record(module)
    columns = insert_after(find(module, "sin"), "transpose", 1, 2)
    insert_after(insert_after(columns, "contiguous"), "transpose", 1, 2)
    violations = verify(module, before)
    assert "call sites" in {v.kind for v in violations}
    assert "call sites" not in {v.kind for v in repair_calls(violations, before)}
    assert "call sites" not in {v.kind for v in verify(module, before)}
    assert torch.equal(run_graph(captured)[0], expected[0])


def test_large_graphs_are_fast() -> None:
    module, _ = capture(lambda x: x.transpose(1, 2) * 2, torch.randn(2, 8, 48))
    product = next(n for n in module.graph.nodes if n.op == "output").all_input_nodes[0]
    graph: Graph = module.graph
    for _ in range(5000):
        users = list(product.users)
        with graph.inserting_after(product):
            node = graph.call_method("sin", (product,))
        node.meta[VALUE] = product.meta[VALUE]
        for user in users:
            user.replace_input_with(product, node)
    before = record(module)
    insert_pair(product, (3, 4, 4))
    gc.collect()  # what other tests have left is not timed
    start = time.process_time()
    verify(module, before)
    assert time.process_time() - start < 1.5  # all 5,000 ran, as the strides changed for good

    module.graph.lint()
    before = record(module)
    insert_pair(list(module.graph.nodes)[2500], (3, 4, 4))
    start = time.process_time()
    assert verify(module, before) == []
    assert time.process_time() - start < 0.3
