"""Each rule on a small function: the axes of its output, and where elements are moved, against their numbering."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from tests.analysis.numbering import MultiIndex, assert_moved, multi_indices
from tests.analysis.traced import Traced, calls

Case = tuple[Callable[..., Any], str, str]  # function, inputs separated by commas, expected axes


def write(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


MOVES: list[Case] = [
    (lambda x: x.view(2, 12), "b2 h3 w4", "b h*w"),
    (lambda x: x.reshape(2, 3, -1, 2), "b2 h12", "b h0 h1 h2"),
    (lambda x: torch.flatten(x, 1).unflatten(1, (3, 4)), "b2 h3 w4", "b h w"),
    (lambda x: torch.ops.aten.view.default(x, [6]) * 1, "b2 h3", "b*h"),
    (lambda x: x.reshape(3, 2), "b2 h3", "?3 ?2"),
    (lambda x: x.permute(2, 0, 1) * 1, "b2 h3 w4", "w b h"),
    (lambda x: torch.permute(x, dims=(2, 0, 1)) * 1, "b2 h3 w4", "w b h"),
    (lambda x: x.transpose(-1, 0) * 1, "b2 h3 w4", "w h b"),
    (lambda x: torch.swapaxes(x, 0, 1) * 1, "b2 h3 w4", "h b w"),
    (lambda x: x.t() * 1, "b2 h3", "h b"),
    (lambda x: x.T * 1, "b2 h3", "h b"),
    (lambda x: x.mT * 1, "b2 h3 w4", "b w h"),
    (lambda x: x.movedim(1, -1) * 1, "b2 h3 w4", "b w h"),
    (lambda x: torch.moveaxis(x, (0, 1), (-1, 0)) * 1, "b2 h3 w4", "h w b"),
    (lambda x: x.expand(5, 2, 3), "b2 h3", "?5 b h"),
    (lambda x: x[:, None].expand(-1, 4, -1), "b2 h3", "b ?4 h"),
    (lambda x: x.repeat(2, 1, 2), "b2 h3", "?2 b ?2*h"),
    (lambda x: torch.tile(x, (2,)), "b2 h3", "b ?2*h"),
    (lambda x: x.repeat(4, 1), "b1 h3", "?4 h"),
    (lambda x: x.repeat_interleave(2, dim=1), "b2 h3", "b h*?2"),
    (lambda x: torch.repeat_interleave(x, 2, -1), "b2 h3", "b h*?2"),
    (lambda x: x.repeat_interleave(2), "h3", "h*?2"),
    (lambda x: x.unsqueeze(1).squeeze(1).unsqueeze(-1), "b2 h3", "b h 1"),
    (lambda x: x.squeeze() * 1, "b1 h3 w1", "h"),
    (lambda x, y: torch.cat([x, y], 1), "b2 h3, c2 w4", "b [h|w]"),
    (lambda x, y: torch.concat((x, y), dim=-1), "b2 h3, c2 w4", "b [h|w]"),
    (lambda x: torch.cat([x], 0).flatten(0, 1) * 1, "b1 h3", "h"),
    (lambda x, y: torch.stack([x, y], -1), "b2 h3, c2 w3", "b h ?2"),
    (lambda x: torch.stack([x], 1), "b2 h3", "b 1 h"),
    (lambda x: pad_sequence([x], True), "n3 d4", "1 n d"),
    (lambda x, y: pad_sequence([x, y]), "n3 d4, m3 e4", "n ?2 d"),
    (lambda x, y: pad_sequence([x, y], True, -1), "n3 d4, m5 e4", "?2 ?5 d"),
    (  # both begin with the same number of rows
        lambda x, y, z: pad_sequence([torch.cat([x, y]), torch.cat([x, z])], True, -1),
        "n3 d4, m5 d4, k2 d4",
        "?2 [n|?5] d",
    ),
    (lambda x: F.pad(x, (1, 2), value=-1), "b2 h3", "b [?1|h|?2]"),
    (lambda x: F.pad(x, (0, 0, 2, 0), value=-1), "b2 h3", "[?2|b] h"),
    (lambda x: x.split([1, 3], 1), "b2 h4", "b 1, b h[1:4]"),
    (lambda x: torch.split(x, 2, dim=-1), "b2 h4", "b h[0:2], b h[2:4]"),
    (lambda x: x.chunk(3, dim=1), "b2 h6", "b h[0:2], b h[2:4], b h[4:6]"),
    (lambda x: torch.tensor_split(x, 2, dim=1), "b2 h6", "b h[0:3], b h[3:6]"),
    (lambda x: x.unbind(1), "b2 h2 w3", "b w, b w"),
    (lambda x: x[:, 1:], "b2 h3", "b h[1:3]"),
    (lambda x: x[:, -2:], "b2 h4", "b h[2:4]"),
    (lambda x: x[..., :-1, None, 0], "b2 h4 w3", "b h[0:3] 1"),
    (lambda x: x[:, ::2], "b2 h4", "b ?2"),
    (lambda x: x[:, 0:99] * 1, "b2 h4", "b h"),
    (lambda x: x[0], "b2 h4", "h"),
    (lambda x: x.narrow(1, 1, 2), "b2 h4", "b h[1:3]"),
    (lambda x: x.select(1, 2), "b2 h4 w3", "b w"),
    (lambda x, y: torch.cat([x, y], 1)[:, 3:], "b2 h3, c2 w4", "b w"),
    (lambda x, y: torch.cat([x, y], 1)[:, 2:5], "b2 h3, c2 w4", "b [h|w][2:5]"),
    (lambda x: torch.cat([x[:, :4], x[:, 4:]], 1), "b2 h6", "b h"),
    (lambda x: torch.cat([x[:, 4:], x[:, :4]], 1), "b2 h6", "b [h[4:6]|h[0:4]]"),
    (lambda x: torch.einsum("nhwpqc->nchpwq", x), "n1 h2 w3 p2 q2 c5", "1 c h p w q"),
    (lambda x: torch.einsum("ii->i", x), "i3 j3", "i"),
    (lambda x: x.contiguous().clone().detach().transpose(0, 1) * 1, "b2 h3", "h b"),
    (lambda x, y: write(x, (slice(None), slice(0, 4)), y), "b2 h6, c2 d4", "b h"),
    (lambda x: F.pixel_unshuffle(x, 2), "b2 c3 h4 w6", "b c*h1*w1 h0 w0"),
    (lambda x: F.pixel_shuffle(x, upscale_factor=2), "c12 h2 w3", "c0 h*c1 w*c2"),
    (lambda x: F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2), "b2 c3 h4 w6", "b c h0*h1 w0*w1"),
    (lambda x: x.roll(1, 1), "b2 h6", "?2 ?6"),
    (lambda x: x.flip(1), "b2 h6", "?2 ?6"),
    (lambda x: torch.diagonal(x, dim1=1, dim2=2) * 1, "b2 h3 w3", "?2 ?3"),
]

COMPUTES: list[Case] = [
    (lambda x: x.view(torch.int32) * 1, "b2 h3", "b h"),
    (lambda x, y: x.view_as(y) + y, "b2 h12, c2 d3 e4", "b h0 h1"),
    (lambda x, y: x.expand_as(y) + 1, "b1 h3, c2 d3", "?2 h"),
    (lambda x: F.pad(x, (1, 0), mode="replicate"), "b2 h3", "?2 ?4"),
    (lambda x: x.repeat_interleave(2), "b2 h3", "?12"),
    (lambda x, i: x[:, (i * 0).long()], "b2 h4, i5", "b i"),
    (lambda x: x.sum(1), "b2 h4 w3", "b w"),
    (lambda x: torch.sum(x), "b2 h4", ""),
    (lambda x: x.mean(dim=(1, 2), keepdim=True), "b2 h4 w3", "b 1 1"),
    (lambda x: x.max(1), "b2 h4 w3", "b w, b w"),
    (lambda x, y: torch.max(x, y), "b2 h4, c2 d4", "b h"),
    (lambda x, y: torch.minimum(x, other=y), "b2 h4, d4", "b h"),
    (lambda x: x.amax(-1, True), "b2 h4", "b 1"),
    (lambda x: torch.linalg.vector_norm(x, dim=-1), "b2 h4 w3", "b h"),
    (lambda x: x.norm(2, -1, True), "b2 h4", "b 1"),
    (lambda x: x.std(dim=-1), "b2 h4", "b"),
    (lambda x: x.var(-1, keepdim=True), "b2 h4", "b 1"),
    (lambda x: x.logsumexp(-1), "b2 h4", "b"),
    (lambda x: x.argmax(1), "b2 h4 w3", "b w"),
    (lambda x: x.cumsum(1), "b2 h4", "?2 ?4"),
    (lambda x: x.softmax(-1), "b2 h4", "b h"),
    (lambda x: F.normalize(x, dim=-1), "b2 h4", "b h"),
    (lambda x, w: F.layer_norm(x, (4, 3), w), "b2 h4 c3, i4 j3", "b h c"),
    (lambda x, w: F.rms_norm(x, (3,), w), "b2 h4 c3, j3", "b h c"),
    (lambda x: F.group_norm(x, 2), "b2 c4 h3", "b ?4 h"),
    (lambda x, w: F.linear(x, w), "b2 h4 c3, o5 i3", "b h ?5"),
    (lambda x, w: x @ w, "b2 h4 c3, d2 e3 o5", "b h o"),
    (lambda x, w: torch.matmul(x, w), "b2 h4 c3, e3 o5", "b h o"),
    (lambda x, w: torch.bmm(x, w), "b2 h4 c3, d2 e3 o5", "b h o"),
    (lambda m, x, w: torch.baddbmm(m, x, w), "a2 y4 z5, b2 h4 c3, d2 e3 o5", "a y z"),
    (lambda m, x, w: torch.addmm(m, x, w), "z5, h4 c3, e3 o5", "h z"),
    (lambda x, w: x @ w, "b2 h4, c4", "?2"),
    (lambda x, w: torch.einsum("b i c, b j c -> b i j", x, w), "b2 h4 c3, d2 w5 e3", "b h w"),
    (lambda x, w: torch.einsum("ij,jk", x, w), "i3 j4, k4 l5", "?3 ?5"),
    (lambda x: torch.einsum("...ij->...ji", x) * 1, "b2 i3 j4", "b j i"),
    (lambda x, w: torch.einsum("...n,d->...nd", x, w), "b2 n3, d4", "b n d"),
    (lambda x, w: torch.einsum("...ij,...jk->...ik", x, w), "a1 i3 j4, b2 k4 l5", "b i l"),
    (lambda x, y: torch.outer(x, y), "i3, j4", "i j"),
    (lambda x, w: F.conv3d(x, w, stride=(1, 2, 2)), "b2 c3 t3 h8 w10, o5 i3 a1 k2 l2", "b ?5 t ?4 ?5"),
    (lambda x, w: F.conv2d(x, w, padding=1), "b2 c3 h8 w10, o5 i3 k3 l3", "b ?5 ?8 ?10"),
    (lambda x, w: F.conv1d(x, w, padding=1), "b2 c3 h8, o5 i3 k3", "b ?5 ?8"),
    (lambda x, y: torch.meshgrid(x, y, indexing="ij"), "i3, j4", "i j, i j"),
    (lambda x, y: torch.stack(torch.meshgrid([x, y], indexing="ij")), "i3, j4", "?2 i j"),
    (lambda x, y: torch.meshgrid(x, y, indexing="xy"), "i3, j4", "?4 ?3, ?4 ?3"),
    (lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), "b2 h4 r2", "b h ?2"),
    (lambda i, w: F.embedding(i.long() % 2, w), "b2 n3, v4 d5", "b n ?5"),
    (lambda x: torch.zeros_like(x), "b2 h4", "b h"),
    (lambda x: torch.arange(4) + x, "b2 h4", "b h"),
    (lambda x: x.new_zeros(2, 4) + x, "b2 h4", "b h"),
    (lambda x, y: x * y, "b2 h4, c4", "b h"),
    (lambda x, y: x[:, :, None] * y, "b2 h4, c2 e4 w3", "b h w"),
    (lambda x, y: x.type_as(y) + 1, "b2 h4, c3", "b h"),
    (lambda x, y: torch.where(x > 0, x, y), "b2 h4, c2 d4", "b h"),
    (lambda x, y: x.masked_fill(y > 0, 0.0), "b2 h4, c1 d4", "b h"),
    (lambda x, y: torch.addcmul(x, x, y), "b2 h4, c2 d4", "b h"),
    (lambda x: F.dropout(F.gelu(x), 0.5, training=False), "b2 h4", "b h"),
    (lambda x: write(x, (slice(None), 0), 1.0), "b2 h4", "b h"),
    (lambda x: x.index_select(1, torch.arange(2)), "b2 h4", "b ?2"),
    (lambda x, y: x[:, (y * 0).long()], "b2 h4 d8, i3", "b i d"),
    (lambda x, y: x[..., (y * 0).long(), :], "b2 h4 d8, i3 j5", "b i j d"),
    (lambda x, y: x.index_select(1, (y * 0).long()), "b2 h4 d8, i3", "b i d"),
    (lambda x, y: F.embedding((y * 0).long(), x), "h4 d8, i3 j5", "i j ?8"),
    (lambda x, y: x.gather(1, (y * 0).long()), "b2 h4 d8, c2 i3 e8", "b i d"),
    (lambda x, y: torch.take_along_dim(x, (y * 0).long(), 1), "b2 h4 d8, o1 i3 q1", "b i d"),
    (lambda x, y, z: x.index_copy(1, (y * 0).long(), z), "b2 h4 d8, i3, c2 j3 e8", "b h d"),
    (lambda x, y, z: x.scatter_add(1, (y * 0).long(), z), "b2 h4 d8, c2 i3 e8, f2 j3 g8", "b h d"),
]  # fmt: skip


def inputs(text: str) -> list[str]:
    return [spec.strip() for spec in text.split(",")]


@pytest.mark.parametrize("case", MOVES, ids=[f"{i}: {c[1]} -> {c[2]}" for i, c in enumerate(MOVES)])
def test_moved_elements(case: Case) -> None:
    function, specs, expected = case
    traced = Traced(function, *inputs(specs))
    assert traced.text() == expected
    sources: dict[int, MultiIndex] = {-1: Counter()}  # what is padded
    first = 0
    for i, x in enumerate(traced.inputs):
        indices = list(multi_indices(traced.dims(traced.placeholders[i])))
        sources.update(enumerate(indices, first))
        first += x.numel()
    for ids, node in zip(traced.numbered_outputs(), traced.outputs, strict=True):
        assert_moved(sources, ids, traced.dims(node))


@pytest.mark.parametrize(
    "case", COMPUTES, ids=[f"{i}: {c[1]} -> {c[2]}" for i, c in enumerate(COMPUTES)]
)
def test_computed_values(case: Case) -> None:
    function, specs, expected = case
    assert Traced(function, *inputs(specs)).text() == expected


def test_what_has_no_rule_is_opaque() -> None:
    traced = Traced(lambda x: x.roll(1, 1).sort(-1).values.relu(), "b2 h6")
    assert traced.opaque == {"roll", "sort"}
    assert Traced(lambda x: x.relu().sum(1), "b2 h6").opaque == set()


def test_axes_at_one_position_become_one() -> None:
    """A rope table meets the tokens of a 3x4 grid, whose structure it gets."""
    traced = Traced(lambda x, table: x.flatten(1, 2) * table, "b2 h3 w4 c5", "n12 d5")
    table = traced.placeholders[1]
    assert traced.text() == "b h*w c"
    assert traced.dims(table)[0] == sum(traced.dims(traced.placeholders[0])[1:3], ())


def test_attention_relates_keys_values_and_the_mask() -> None:
    traced = Traced(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        "b2 h3 n5 d8", "c2 g3 m7 e8", "a2 f3 l7 u6", "x1 y1 z1 s7",
    )  # fmt: skip
    assert traced.text() == "b h n u"
    keys, values, mask = (traced.dims(traced.placeholders[i]) for i in (1, 2, 3))
    assert keys[2] == values[2] == mask[3]


def test_norms_relate_their_weights() -> None:
    traced = Traced(lambda x, w, c: F.layer_norm(x, (4, 3), w, c), "b2 n4 c3", "i4 j3", "k4 l3")
    x, weight, bias = (traced.dims(traced.placeholders[i]) for i in range(3))
    assert x[1:] == weight == bias


def test_a_write_relates_the_value_and_the_slice() -> None:
    traced = Traced(lambda x, y: write(x, (slice(None), slice(0, 4)), y), "b2 h6", "c2 d4")
    x, y = traced.dims(traced.placeholders[0]), traced.dims(traced.placeholders[1])
    assert y[0] == x[0]
    assert traced.text().startswith("b h")
    (atom,) = y[1]
    assert atom.slice_of == (x[1], 0, 4)  # type: ignore[union-attr]


def test_a_convolution_proves_a_grid_only_as_a_patch_embed() -> None:
    def origins(function: Callable[..., Any], *specs: str) -> list[str]:
        traced = Traced(function, *specs)
        (output,) = traced.outputs
        return [axis[0].origin for axis in traced.dims(output)[2:]]  # type: ignore[union-attr]

    video, frame = "b2 c3 t3 h8 w10", "b2 c3 h8 w10"
    assert (
        origins(lambda x, w: F.conv3d(x, w, stride=(1, 2, 2)), video, "o5 i3 a1 k2 l2")
        == ["conv3d patch embed"] * 3
    )
    assert (
        origins(lambda x, w: F.conv2d(x, w, stride=2), frame, "o5 i3 k2 l2")
        == ["conv2d patch embed"] * 2
    )
    assert origins(lambda x, w: F.conv2d(x, w, stride=1), frame, "o5 i3 k2 l2") == [""] * 2
    assert origins(lambda x, w: F.conv2d(x, w, None, 2, 1), frame, "o5 i3 k2 l2") == [""] * 2


def test_axes_that_a_node_made_up_are_told() -> None:
    """Later they may turn out to have the positions of an input's axis; what went where is not known."""
    traced = Traced(lambda x: x + x.reshape(2, 4, 6).transpose(1, 2), "b2 n6 c4")
    (reshape,) = calls(traced.gm, "reshape")
    assert traced.text() == "b n c"
    assert len(traced.trace.invented[reshape]) == 2
    (transpose,) = calls(traced.gm, "transpose")
    assert not traced.trace.invented[transpose]


def test_writes_inside_vmap_are_opaque_and_harm_no_other_value() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: write(row.clone(), (slice(0, 2),), row[2:4]))(x) * 1

    traced = Traced(function, "b2 h4")
    assert [node for node in traced.trace.opaque if node.target is operator.setitem]
    assert torch.zeros(3)[torch.tensor([1])].shape == (1,)


def test_rows_that_a_mask_picks_are_written_where_sizes_of_data_are_not_captured() -> None:
    """How many there are depends on data: without capturing it a fake tensor can't tell."""
    traced = Traced(lambda x, y: write(x.clone(), (x[:, :, 0] > 0,), y) * 1, "b2 n5 c4", "d4")
    assert traced.text() == "b n c"
    assert [node for node in traced.trace.opaque if node.target is operator.setitem]


def test_a_body_has_the_axes_of_its_arguments() -> None:
    block = nn.Linear(4, 4)

    def function(x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(
                lambda y: block(y).flatten(1, 2).unflatten(1, (3, 5)), x, use_reentrant=False
            )
        return x

    assert Traced(function, "b2 h3 w5 c4").text() == "b h w ?4"


@pytest.mark.parametrize(
    ("function", "specs", "expected"),
    [
        (lambda x: x.flatten(2).transpose(1, 2) * 1, "b2 c3 t5 h7", "b t*h c"),
        (lambda x: x.flatten(1).unflatten(1, (x.shape[1], x.shape[2])), "b2 h5 w7", "b h w"),
        (lambda x, y: torch.cat([x, y], 1)[:, x.shape[1] :], "b2 h5 c3, d2 w7 e3", "b w c"),
        (lambda x, y: torch.cat([x, y], 1)[:, : x.shape[1]], "b2 h5 c3, d2 w7 e3", "b h c"),
        (lambda x, y: torch.cat([x, y], 1)[:, -y.shape[1] :], "b2 h5 c3, d2 w7 e3", "b w c"),
        (
            lambda x, y: torch.cat([x, y], 1).split([x.shape[1], y.shape[1]], 1),
            "b2 h5 c3, d2 w7 e3",
            "b h c, b w c",
        ),
        (lambda x, w: F.conv2d(x, w, stride=2), "b2 c3 h8 w10, o5 i3 k2 l2", "b ?5 ?h ?w"),
    ],
)
def test_symbolic_shapes(function: Callable[..., Any], specs: str, expected: str) -> None:
    traced = Traced(function, *inputs(specs), dynamic=True)
    assert not traced.opaque
    if "?h" not in expected:
        assert traced.text() == expected
    else:
        (output,) = traced.outputs
        assert [len(axis) for axis in traced.dims(output)] == [1] * 4
