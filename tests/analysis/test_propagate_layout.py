"""Where tokens are reordered: how often, what is free, and that operations which need raster order get it.

Every model is compared with its eager twin: under the definition's mask, or as it is where the window is full.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.analysis import small_dits
from tests.analysis.small_dits import (
    DIM,
    TEXT,
    VIDEO,
    H,
    Hook,
    Result,
    SmallDiT,
    T,
    W,
    compiled,
    conv2d_patchify,
    expected,
    heads,
    inputs,
    joined,
    no_rope,
    relative_error,
    rope_in_place,
)

FRAME = H * W


def run(
    text: tuple[int, int] = (0, 0), options: dict[str, Any] | None = None, **parts: Any
) -> Result:
    """Compiled, after a comparison with the masked eager model."""
    model, args = SmallDiT(text=text, **parts), inputs(2, sum(text))
    result = compiled(model, *args, **(options or {}))
    assert result.report.replaced, result.report.reason
    assert relative_error(result.output, expected(model, result, *args)) < 1e-5
    return result


@pytest.mark.parametrize("text", [(0, 0), (0, TEXT), (TEXT, 0)])
def test_conversions_do_not_depend_on_depth(text: tuple[int, int]) -> None:
    conversions = {layers: run(text, layers=layers).report.conversions for layers in (1, 2, 4)}
    assert conversions[1] == conversions[2] == conversions[4]
    # The tokens on the way in and out, and the table of the rope.
    assert conversions[2] == 3


def test_tokens_alone_are_converted_in_and_out() -> None:
    assert run(rope=no_rope, layers=3).report.conversions == 2
    assert run(rope=no_rope, layers=3, patchify=conv2d_patchify).report.conversions == 2


@pytest.mark.parametrize("text", [(0, 0), (2, 3)])
def test_rope_written_in_place(text: tuple[int, int]) -> None:
    one = run(text, rope=rope_in_place)
    three = run(text, rope=rope_in_place, layers=3)
    assert one.report.conversions == three.report.conversions <= 4


def test_the_layout_around_sites_is_four_conversions_each() -> None:
    for layers in (1, 3):
        result = run(layers=layers, options={"layout": "site"})
        assert result.report.conversions == 4 * layers


def test_text_beside_the_grid_is_free() -> None:
    """The text's own part of the work doesn't touch the tokens' order."""

    def own_text_layer(model: SmallDiT, y: Tensor) -> Tensor:
        video, text = y[:, :VIDEO], y[:, VIDEO:]
        text = text + text.flip(1) + text.cumsum(1)
        return torch.cat([video, text], 1)

    model = SmallDiT(text=(0, TEXT), rope=no_rope, layers=2)
    for layer in model.layers:
        layer.norm.register_forward_hook(lambda module, args, y: own_text_layer(model, y))
    args = inputs(2, TEXT)
    result = compiled(model, *args)
    assert relative_error(result.output, expected(model, result, *args)) < 1e-5
    assert result.report.conversions == 2


def test_sums_over_tokens_and_modulation_are_free() -> None:
    def modulate(model: SmallDiT, x: Tensor) -> Tensor:
        x = x - x.mean(1, keepdim=True)
        x = x / (x.std(1, keepdim=True) + 1)
        x = x + x.amax(1, keepdim=True) * model.weight[:1]
        x = F.layer_norm(x, (DIM,), model.weight[0], model.weight[1]) + torch.zeros_like(x)
        return x + (x.mT @ x).mean(1, keepdim=True) * 0.01 + x.softmax(1)

    assert run(rope=no_rope, after=modulate).report.conversions == 2


def test_in_place_writes_between_readers() -> None:
    """A copy made for a reader before a write is not what a reader after it sees."""

    class Written(SmallDiT):
        def forward(self, latent: Tensor, text: Tensor) -> Tensor:
            x = self.embed3(latent).flatten(2).transpose(1, 2).contiguous()
            first, second = self.layers[0], self.layers[1]
            y = small_dits.attend(heads(first.q(x)), heads(first.k(x)), heads(first.v(x)))
            x.mul_(1.5)
            x[..., : DIM // 2] = x[..., DIM // 2 :] + 1
            z = small_dits.attend(heads(second.q(x)), heads(second.k(x)), heads(second.v(x)))
            x.add_(joined(y))
            out: Tensor = self.out(x + joined(z))
            return out

    for layout in ("graph", "site"):
        model, args = Written(layers=2), inputs()
        result = compiled(model, *args, layout=layout)
        assert len(result.report.replaced) == 2
        assert relative_error(result.output, expected(model, result, *args)) < 1e-5


def write(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


def attention(model: SmallDiT, x: Tensor, **extra: Any) -> Tensor:
    q, k, v = (heads(part) for part in model.qkv(x).chunk(3, -1))
    return x + joined(F.scaled_dot_product_attention(q, k, v, **extra))


def frame_mean(model: SmallDiT, x: Tensor) -> Tensor:
    means = x.unflatten(1, (T, FRAME)).mean(2, keepdim=True)
    return x + means.expand(-1, -1, FRAME, -1).flatten(1, 2)


ALL = slice(None)
NEEDS_PLACES: dict[str, Hook] = {
    "rows by index": lambda m, x: x + x[:, m.rows],
    "rows of a table": lambda m, x: x + m.weight[m.rows],
    "embedding of tokens": lambda m, x: x + F.embedding(m.rows, x[0]),
    "index_select": lambda m, x: x + x.index_select(1, m.rows),
    "take_along_dim": lambda m, x: x + torch.take_along_dim(x, m.rows[None, :, None], 1),
    "a number written to a frame": lambda m, x: write(x, (ALL, slice(0, FRAME)), 0.0),
    "a token written": lambda m, x: write(x, (ALL, 3), 0.0),
    "a frame written to a frame": lambda m, x: write(
        x, (ALL, slice(0, FRAME)), x[:, FRAME : 2 * FRAME]
    ),
    "rows written by index": lambda m, x: write(x, (ALL, m.rows[:5]), 0.0),
    "rows written by mask": lambda m, x: write(x, (ALL, torch.arange(VIDEO) < 9), 0.0),
    "a frame of zeros written": lambda m, x: x + write(
        torch.zeros_like(x), (ALL, slice(0, FRAME)), x[:, :FRAME]
    ),
    "index_fill_": lambda m, x: x.clone().index_fill_(1, m.rows[:5], 0.0),
    "a frame scaled in place": lambda m, x: (y := x.clone(), y[:, :FRAME].mul_(3), y)[2],
    "causal attention": lambda m, x: attention(m, x, is_causal=True),
    "masked attention": lambda m, x: attention(
        m, x, attn_mask=(torch.arange(VIDEO) % 3 > 0)[None, None, None]
    ),
    "weights for each token": lambda m, x: F.layer_norm(x, (VIDEO, DIM), m.weight, m.weight),
    "groups of tokens": lambda m, x: F.group_norm(x, 8, m.weight[:, 0], m.weight[:, 1]),
    "indices of the largest": lambda m, x: x + x.max(1).indices[:, None],
    "argmax": lambda m, x: x + x.argmax(1)[:, None],
    "roll": lambda m, x: x + x.roll(1, 1),
    "roll by cat": lambda m, x: x + torch.cat([x[:, 9:], x[:, :9]], 1),
    "flip": lambda m, x: x + x.flip(1),
    "cumsum": lambda m, x: x + x.cumsum(1),
    "shifted by padding": lambda m, x: x + F.pad(x, (0, 0, 8, 0))[:, :VIDEO],
    "padded and cropped": lambda m, x: x + F.pad(x, (0, 0, 0, 8))[:, :VIDEO],
    "differences": lambda m, x: x + F.pad(x[:, 1:] - x[:, :-1], (0, 0, 1, 0)),
    "convolved": lambda m, x: x + F.conv1d(x.mT, m.weight[:DIM, :, None].expand(-1, -1, 3), padding=1).mT,
    "reshaped across tokens": lambda m, x: x + x.reshape(x.shape[0], DIM, VIDEO).transpose(1, 2),
    "split otherwise": lambda m, x: x + x.unflatten(1, (T, W, H)).transpose(2, 3).flatten(1, 3),
    "linear over tokens": lambda m, x: x + F.linear(x.mT, m.weight @ m.weight.T).mT * 0.01,
    "matmul over tokens": lambda m, x: x + ((m.weight @ m.weight.T) @ x) * 0.01,
    "positions": lambda m, x: x + torch.arange(VIDEO)[:, None] / VIDEO,
    "where by position": lambda m, x: torch.where(
        (torch.arange(VIDEO) < FRAME)[:, None], x * 2, x
    ),
    "a first frame of its own": lambda m, x: torch.cat([x[:, :FRAME] * 2, x[:, FRAME:]], 1),
    "means of frames": frame_mean,
    "max of two": lambda m, x: torch.max(x, m.weight),
    "lower triangle": lambda m, x: x + ((x @ x.mT).tril() @ x) * 0.01,
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDS_PLACES)
def test_operations_that_ask_for_the_places_of_tokens(name: str) -> None:
    hook, args = NEEDS_PLACES[name], inputs()
    for parts in ({"before": hook, "after": hook}, {"after": hook}):
        model = SmallDiT(rope=no_rope, **parts)
        result = compiled(model, *args, window="full")
        assert relative_error(result.output, model(*args).detach()) < 1e-5
        if result.report.replaced:
            return
        # Unknown operations on both sides hide the grid, or the order of its tokens; some show that it is another one.
        reason = result.report.reason
        said = (
            "is not known",
            "shows no order of frames",
            "in another order than the video's",
            "shows them in the video's order",
        )
        assert any(text in reason for text in said), reason
    raise AssertionError("no attention was replaced")


def test_video_tokens_written_over_the_text() -> None:
    """They get the text's axis by the write, but are read by their place in the video."""
    model = SmallDiT(text=(0, TEXT), rope=no_rope, layers=2)
    hook = model.layers[1].norm.register_forward_hook
    hook(lambda module, args, y: write(y, (ALL, slice(VIDEO, None)), y[:, :TEXT]))
    args = inputs(2, TEXT)
    result = compiled(model, *args, window="full")
    assert len(result.report.replaced) == 2
    assert relative_error(result.output, model(*args).detach()) < 1e-5


def test_a_conflict_of_orders_is_refused() -> None:
    """In-place attention output into tokens that are written by place: one memory can't have both orders."""

    class Conflict(SmallDiT):
        def forward(self, latent: Tensor, text: Tensor) -> Tensor:
            x = self.embed3(latent).flatten(2).transpose(1, 2).contiguous()
            out = joined(attention_only(self, x))
            out[:, :FRAME] = 0.0
            y: Tensor = self.out(out)
            return y

    model, args = Conflict(), inputs()
    result = compiled(model, *args, window="full")
    assert relative_error(result.output, model(*args).detach()) < 1e-5


def attention_only(model: SmallDiT, x: Tensor) -> Tensor:
    q, k, v = (heads(part) for part in model.qkv(x).chunk(3, -1))
    return small_dits.attend(q, k, v)


class MatmulAttention(SmallDiT):
    """Rope and modulation of each token between the patch embed and an attention of three steps."""

    def forward(self, latent: Tensor, text: Tensor) -> Tensor:
        x = self.embed3(latent).flatten(2).transpose(1, 2)
        y = x * (1 + self.weight)
        q, k, v = (heads(part) for part in self.qkv(y).chunk(3, -1))
        q, k = rope_in_place(self, 3 * q), rope_in_place(self, 3 * k)
        y = small_dits.attend(q, k, v) if self.by_definition else attend_in_three_steps(q, k, v)
        out: Tensor = self.out(x + self.weight * joined(y))
        return out

    by_definition = False


def attend_in_three_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def test_operands_of_an_attention_of_several_nodes_are_converted() -> None:
    """Nothing but the replaced products reads q and k, and yet they are not dead."""
    model, args = MatmulAttention(), inputs()
    result = compiled(model, *args)
    assert len(result.report.replaced) == 1
    model.by_definition = True
    assert relative_error(result.output, expected(model, result, *args)) < 1e-5
