"""Which attention is over a token grid, what proves the grid, and where text stands beside it.

What is replaced is compared with the eager model under the definition's mask, so that a grid with swapped axes is seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sta_compile.analysis.axes import same_size
from sta_compile.analysis.find_attention import find_attention
from sta_compile.analysis.graph_view import GraphView
from sta_compile.analysis.grid_proofs import RESHAPE
from sta_compile.analysis.infer_grid import GridInference, Refusal, VideoAttention
from sta_compile.analysis.trace_dims import trace_dims
from tests.analysis import small_dits
from tests.analysis.small_dits import (
    DIM,
    GRID,
    VIDEO,
    H,
    SmallDiT,
    T,
    W,
    compiled,
    conv2d_patchify,
    conv3d_patchify,
    expected,
    heads,
    inputs,
    joined,
    leave_tokens,
    no_rope,
    plain,
    relative_error,
    reshape_patchify,
    rope,
    unpatchify,
)
from tests.analysis.traced import capture

Answer = VideoAttention | Refusal | None


def classify(
    model: nn.Module, *args: Any, grid: tuple[int, int, int] | None = None
) -> list[Answer]:
    view = GraphView(capture(model, *args))
    inference = GridInference(trace_dims(view), grid)
    return [inference.classify(site) for site in find_attention(view)]


def only(answers: list[Answer]) -> VideoAttention:
    (answer,) = answers
    assert isinstance(answer, VideoAttention), answer
    return answer


@pytest.mark.parametrize(
    ("patchify", "leave", "turn", "evidence"),
    [
        (conv3d_patchify, leave_tokens, no_rope, "conv3d patch embed"),
        (conv2d_patchify, leave_tokens, no_rope, "conv2d patch embed"),
        (reshape_patchify, leave_tokens, no_rope, "reshape patchify"),
        (conv3d_patchify, unpatchify, rope, "conv3d patch embed"),
        (reshape_patchify, unpatchify, rope, "reshape patchify"),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_grids_are_proved(patchify: Any, leave: Any, turn: Any, evidence: str, batch: int) -> None:
    model = SmallDiT(patchify=patchify, unpatchify=leave, rope=turn)
    found = only(classify(model, *inputs(batch)))
    assert found.grid.shape == GRID
    assert found.grid.evidence == evidence
    assert found.tokens.segments == (("video", VIDEO),)
    result = compiled(model, *inputs(batch))
    assert relative_error(result.output, expected(model, result, *inputs(batch))) < 1e-5


def test_an_unpatchify_alone_proves_a_grid() -> None:
    class Packed(SmallDiT):
        """Tokens come in packed, as for LTX, and leave as a latent."""

        def forward(self, tokens: Tensor, latent: Tensor) -> Tensor:
            x = self.layers[0](self, self.embed(tokens))
            return unpatchify(self, x, latent)

    latent = torch.randn(2, 4, T, 2 * H, 2 * W)
    found = only(classify(Packed(rope=no_rope), torch.randn(2, VIDEO, 16), latent))
    assert found.grid.evidence == "unpatchify"
    assert found.grid.shape == GRID


def test_positions_of_three_axes_prove_a_grid() -> None:
    class Positions(SmallDiT):
        def forward(self, tokens: Tensor) -> Tensor:
            axes = torch.meshgrid(*(torch.arange(n) for n in GRID), indexing="ij")
            table = torch.stack(axes, -1).flatten(0, 2).float().repeat(1, 6)[:, :16]
            q, k, v = (heads(self.layers[0].q(tokens)) for _ in range(3))
            return joined(small_dits.attend(q * table.cos(), k * table.cos(), v))

    found = only(classify(Positions(), torch.randn(2, VIDEO, DIM)))
    assert found.grid.evidence == "positions of the rope tables"
    assert found.grid.shape == GRID


def meshed(*grid: int) -> Tensor:
    axes = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    return torch.stack(axes, -1).flatten(0, -2).float().sum(-1, keepdim=True)


def spread(frames: int, rows: int, cols: int) -> Tensor:
    """As in Qwen-Image: rows and columns count from the middle, so their axes are made of two parts each."""
    around = [
        torch.cat([torch.arange(-(n // 2), 0), torch.arange(n - n // 2)]) for n in (rows, cols)
    ]
    pieces = [
        torch.arange(frames).view(-1, 1, 1, 1),
        around[0].view(1, -1, 1, 1),
        around[1].view(1, 1, -1, 1),
    ]
    return torch.cat([p.expand(frames, rows, cols, 1) for p in pieces], -1).reshape(-1, 3).float()


def test_a_reshape_is_no_table_of_positions() -> None:
    class Reshaped(SmallDiT):
        def forward(self, tokens: Tensor) -> Tensor:
            x = (tokens.unflatten(1, GRID) + 1).flatten(1, 3)
            q, k, v = (heads(self.layers[0].q(x)) for _ in range(3))
            return joined(small_dits.attend(q, k, v))

    assert only(classify(Reshaped(), torch.randn(2, VIDEO, DIM))).grid.evidence == RESHAPE


@pytest.mark.parametrize(
    ("positions", "grid"),
    [
        (lambda: meshed(*GRID), GRID),
        (lambda: meshed(1, 9, 8), (1, 9, 8)),
        (lambda: meshed(9, 8), (1, 9, 8)),
        (lambda: spread(*GRID), GRID),
        (lambda: spread(1, 9, 8), (1, 9, 8)),
    ],
)
def test_positions_that_a_graph_makes(positions: Any, grid: tuple[int, int, int]) -> None:
    class Positions(SmallDiT):
        def forward(self, tokens: Tensor) -> Tensor:
            table = positions().sum(-1, True).cos()
            q, k, v = (heads(self.layers[0].q(tokens)) for _ in range(3))
            return joined(small_dits.attend(q * table, k * table, v))

    found = only(classify(Positions(), torch.randn(2, VIDEO, DIM)))
    assert found.grid.shape == grid
    assert found.grid.evidence == "positions of the rope tables"


def test_frames_and_positions_in_a_frame_are_no_grid() -> None:
    class Frames(SmallDiT):
        """Only (frames, rows * cols) is told apart: where rows end nobody says."""

        def forward(self, tokens: Tensor) -> Tensor:
            x = tokens.flatten(1, 2)
            return self.layers[0](self, x).unflatten(1, (T, H * W))

    model, tokens = Frames(rope=no_rope), torch.randn(2, T, H * W, DIM)
    (answer,) = classify(model, tokens)
    assert isinstance(answer, Refusal)
    assert not answer.over_grid
    assert f"token grid of {VIDEO} tokens is not known" in answer.reason
    assert "'grid': (frames, rows, cols)" in answer.hint


def test_images_have_one_frame() -> None:
    class Image(SmallDiT):
        def forward(self, image: Tensor) -> Tensor:
            x = self.embed2(image).flatten(2).transpose(1, 2)
            return self.layers[0](self, x)

    found = only(classify(Image(rope=no_rope), torch.randn(2, 4, 2 * H, 2 * W)))
    assert found.grid.shape == (1, H, W)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_declared_grid(batch: int) -> None:
    class Tokens(SmallDiT):
        def forward(self, x: Tensor, text: Tensor) -> Tensor:
            return self.layers[0](self, x)

    model, tokens = Tokens(rope=no_rope), torch.randn(batch, VIDEO, DIM)
    (refused,) = classify(model, tokens, torch.zeros(batch, 0, DIM))
    assert isinstance(refused, Refusal)
    found = only(classify(model, tokens, torch.zeros(batch, 0, DIM), grid=GRID))
    assert (found.grid.shape, found.grid.basis) == (GRID, "declared by option grid")
    args = tokens, torch.zeros(batch, 0, DIM)
    result = compiled(model, *args, grid=GRID)
    assert result.report.replaced[0].grid == GRID
    assert relative_error(result.output, expected(model, result, *args)) < 1e-5
    (answer,) = classify(model, *args, grid=(T, H, W + 1))
    assert isinstance(answer, Refusal)


def test_a_proved_grid_beats_a_declared_one_and_says_so() -> None:
    model = SmallDiT(rope=no_rope)
    for declared, basis in (
        (GRID, "proved by conv3d patch embed"),
        ((1, 2, 3), "proved by conv3d patch embed"),  # of other tokens
        ((T, W, H), "proved by conv3d patch embed, so (3, 6, 4) of option grid is not used"),
    ):
        found = only(classify(model, *inputs(), grid=declared))
        assert (found.grid.shape, found.grid.basis) == (GRID, basis)
    result = compiled(model, *inputs(), grid=(T, W, H))
    assert result.report.replaced[0].evidence == basis
    assert f"grid 3x4x6: {basis}" in str(result.report)


@pytest.mark.parametrize("grid", [(5, 1, 6), (5, 6, 1), (1, 5, 6)])
def test_an_axis_of_one_position_is_told_by_the_convolution(grid: tuple[int, int, int]) -> None:
    class Thin(SmallDiT):
        def forward(self, latent: Tensor) -> Tensor:
            return self.layers[0](self, conv3d_patchify(self, latent))

    t, h, w = grid
    found = only(classify(Thin(rope=no_rope), torch.randn(2, 4, t, 2 * h, 2 * w)))
    assert found.grid.shape == grid


@pytest.mark.parametrize("text", [(0, 5), (5, 0), (2, 3), (1, 4), (1, 0), (0, 1)])
@pytest.mark.parametrize("turn", [rope, no_rope])
def test_text_beside_the_video(text: tuple[int, int], turn: Any) -> None:
    model = SmallDiT(text=text, rope=turn, layers=2)
    before, after = text
    args = inputs(2, before + after)
    result = compiled(model, *args)
    segments = [("context", before)] * bool(before) + [("video", VIDEO)]
    segments += [("context", after)] * bool(after)
    assert [site.segments for site in result.report.replaced] == [tuple(segments)] * 2
    assert relative_error(result.output, expected(model, result, *args)) < 1e-5


def test_text_as_long_as_the_video_is_told_by_its_source() -> None:
    model = SmallDiT(text=(0, VIDEO), layers=2)
    args = inputs(2, VIDEO)
    result = compiled(model, *args)
    assert result.report.replaced[0].segments == (("video", VIDEO), ("context", VIDEO))
    assert relative_error(result.output, expected(model, result, *args)) < 1e-5


class CrossAttention(SmallDiT):
    """Queries over the video; keys from another tensor of as many tokens."""

    def forward(self, latent: Tensor, other: Tensor) -> Tensor:
        x = conv3d_patchify(self, latent)
        layer = self.layers[0]
        q, k, v = heads(layer.q(x)), heads(layer.k(other)), heads(layer.v(other))
        x = x + layer.o(joined(small_dits.attend(q, k, v)))
        return unpatchify(self, x, latent)


def test_cross_attention_to_as_many_tokens_is_not_self_attention() -> None:
    latent, _ = inputs()
    other = torch.randn(2, VIDEO, DIM)
    assert classify(CrossAttention(), latent, other) == [None]
    result = compiled(CrossAttention(), latent, other)
    assert result.report.replaced == []
    torch.testing.assert_close(result.output, CrossAttention()(latent, other))


def test_a_second_stream_on_the_same_grid_is_not_self_attention() -> None:
    class Control(CrossAttention):
        def forward(self, latent: Tensor, other: Tensor) -> Tensor:
            return super().forward(latent, self.embed3(other).flatten(2).transpose(1, 2))

    latent, _ = inputs()
    assert classify(Control(), latent, latent.flip(0)) == [None]


def test_keys_of_a_changed_stream_are_not_the_queries_stream() -> None:
    """q from the tokens, k and v from tokens that a linear layer has changed."""
    model = SmallDiT(keys=lambda model, y: model.qkv(y)[..., :DIM])
    assert classify(model, *inputs()) == [None]
    result = compiled(model, *inputs())
    torch.testing.assert_close(result.output, model(*inputs()))


def test_casts_and_norms_keep_the_stream() -> None:
    class Normed(SmallDiT):
        def forward(self, latent: Tensor, text: Tensor) -> Tensor:
            x = conv3d_patchify(self, latent)
            layer = self.layers[0]
            q = F.rms_norm(heads(layer.q(x)), (16,)).double().float()
            k = F.layer_norm(heads(layer.k(x.double().float())), (16,)).contiguous()
            v = heads(layer.v(x.clone()))
            return unpatchify(self, x + layer.o(joined(small_dits.attend(q, k, v))), latent)

    assert only(classify(Normed(), *inputs())).grid.shape == GRID


class Factorised(SmallDiT):
    temporal = False

    def forward(self, latent: Tensor, text: Tensor) -> Tensor:
        x = conv3d_patchify(self, latent).unflatten(1, (T, H * W))
        x = x.transpose(1, 2).flatten(0, 1) if self.temporal else x.flatten(0, 1)
        q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
        x = self.out(x + joined(small_dits.attend(q, k, v)))
        return x.unflatten(0, (latent.shape[0], -1))


@pytest.mark.parametrize("temporal", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_factorised_attention_is_refused(temporal: bool, batch: int) -> None:
    model = Factorised()
    model.temporal = temporal
    (answer,) = classify(model, *inputs(batch))
    assert isinstance(answer, Refusal)
    assert "factorised attention" in answer.reason
    result = compiled(model, *inputs(batch))
    torch.testing.assert_close(result.output, model(*inputs(batch)))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"is_causal": True}, "causal"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"attn_mask": torch.ones(VIDEO, VIDEO, dtype=torch.bool).tril()}, "its mask may hide"),
        ({"attn_mask": torch.zeros(1, 1, 1, VIDEO)}, "its mask may hide"),
    ],
)
def test_what_a_site_may_not_have(extra: dict[str, Any], reason: str) -> None:
    (answer,) = classify(SmallDiT(extra=extra), *inputs())
    assert isinstance(answer, Refusal)
    assert reason in answer.reason


def test_head_dims_that_no_kernel_takes() -> None:
    class Narrow(SmallDiT):
        def forward(self, latent: Tensor, text: Tensor) -> Tensor:
            q, k, v = heads(self.qkv(conv3d_patchify(self, latent))[..., :24]).chunk(3, -1)
            return joined(small_dits.attend(q, k, v))

    (answer,) = classify(Narrow(), *inputs())
    assert isinstance(answer, Refusal)
    assert answer.reason.startswith("head dim 4")


def test_symbolic_grids() -> None:
    model = SmallDiT(rope=no_rope)
    view = GraphView(capture(model, *inputs(), dynamic=True))
    inference = GridInference(trace_dims(view))
    (site,) = find_attention(view)
    found = inference.classify(site)
    assert isinstance(found, VideoAttention)
    t, h, w = found.grid.shape
    assert same_size(found.tokens.segments[0][1], t * h * w)


def test_the_model_without_changes_is_a_control() -> None:
    """The oracle differs from plain eager attention, so agreeing with it says something."""
    model = SmallDiT(before=plain)
    result = compiled(model, *inputs())
    assert relative_error(result.output, model(*inputs()).detach()) > 1e-2
