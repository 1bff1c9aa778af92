"""Text of as many tokens as the video: where only the number of tokens tells what is video, nothing is windowed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sta_compile
from sta_compile.analysis.operator_limits import SEVERAL_VIDEOS
from tests.end_to_end.compiled import DEFAULTS, compile_variants, relative_error
from tests.end_to_end.middle import GRID, Middle, N, latent
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import SPARSE, Block, sdpa

OPTIONS = {**SPARSE, **DEFAULTS}
SEVERAL = f"the model has several sequences of {N} tokens, and only the number of tokens tells"


class TextAndVideo(Middle):
    """Text goes through a block of the same class before the video does; `apart` stands between blocks."""

    def __init__(self, make_text, apart=lambda: None) -> None:
        super().__init__()
        self.text_block = Block(16, heads=2, head_dim=8, kv_heads=2, attend=sdpa)
        self.make_text, self.apart = make_text, apart

    def forward(self, latent: Tensor, text: Tensor) -> Tensor:
        x = self.patchify(latent).flatten(2).transpose(1, 2)
        text = self.make_text(text)
        self.apart()
        text = self.text_block(text)
        for block in self.blocks:
            self.apart()
            x = block(x) + text.mean(1, keepdim=True)
        self.apart()
        return self.out(x).unflatten(1, GRID).permute(0, 4, 1, 2, 3)


def given(text: Tensor) -> Tensor:
    return text


def joined(text: Tensor) -> Tensor:
    return torch.cat([text, text[:, : N - text.shape[1]]], 1)


@pytest.mark.usefixtures("stages_only")
@pytest.mark.parametrize("declared", [{}, {"grid": GRID}])
@pytest.mark.parametrize(("make_text", "length"), [(given, N), (joined, 100), (given, N - 1)])
def test_blocks_that_are_compiled_alone(make_text, length, declared):
    torch.manual_seed(1)
    model = TextAndVideo(make_text, apart=torch._dynamo.graph_break)
    inputs = {"latent": latent(), "text": torch.randn(2, length, 16)}
    expected = model(**inputs)
    sta_compile.reset_reports()
    sta_compile.compile(model, **OPTIONS, **declared)
    model(**inputs)
    found = model(**inputs)
    sites = [site for report in sta_compile.reports() for site in report.replaced]
    sta_compile.restore(model)
    if make_text(inputs["text"]).shape[1] != N:
        with Oracle(model, model.sites, window_mask(GRID, sites[0].tiles, sites[0].window)):
            assert relative_error(found, model(**inputs)) < 1e-5
        return
    reasons = {site.reason for report in sta_compile.reports() for site in report.refused}
    assert not sites
    assert all(reason.startswith(SEVERAL) for reason in reasons)
    assert reasons
    assert torch.equal(found, expected)


@pytest.mark.parametrize("length", [N, N - 1])
def test_a_declared_grid_in_a_graph_with_text(length):
    """Packed tokens of which nothing shows the grid, and text that attends to itself."""

    class Packed(TextAndVideo):
        def forward(self, x: Tensor, text: Tensor) -> Tensor:
            text = self.text_block(text)
            for block in self.blocks:
                x = block(x) + text.mean(1, keepdim=True)
            return self.out(x)

    model = Packed(given)
    inputs = {"x": torch.randn(2, N, 16), "text": torch.randn(2, length, 16)}
    report = compile_variants(model, inputs, {"sta": {**OPTIONS, "grid": GRID}})["sta"].report
    if length != N:
        assert [site.name for site in report.replaced] == model.sites
        return
    assert not report.replaced
    assert {site.name for site in report.refused} == {"text_block.attn", *model.sites}
    assert report.reason.startswith(SEVERAL)


def test_text_beside_a_proved_video_is_not_the_declared_grid():
    model = TextAndVideo(given)
    inputs = {"latent": latent(), "text": torch.randn(2, N, 16)}
    report = compile_variants(model, inputs, {"sta": {**OPTIONS, "grid": GRID}})["sta"].report
    assert [site.name for site in report.replaced] == model.sites


def test_tokens_in_an_order_that_nothing_shows_are_no_rival():
    """A declared grid is for tokens of which the graph loses track, too; not for those that it sees move."""

    def mixed(model, x):
        return model.blocks[1](torch.fft.fft(model.blocks[0](x), dim=1).real)

    model = Middle(mixed)
    report = compile_variants(model, {"latent": latent()}, {"sta": {**OPTIONS, "grid": GRID}})
    assert [site.name for site in report["sta"].report.replaced] == model.sites

    def by_size(model, x):
        return model.blocks[1](model.blocks[0](x).sort(1).values)

    model = Middle(by_size)
    report = compile_variants(model, {"latent": latent()}, {"sta": {**OPTIONS, "grid": GRID}})
    assert [site.name for site in report["sta"].report.replaced] == model.sites[:1]


@torch.no_grad()
def test_attention_over_as_many_tokens_as_the_video_is_in_the_report():
    """Of a video whose tokens are picked by a table before the second block nothing says that they are text."""
    order = torch.randperm(N, generator=torch.manual_seed(1))

    def picked(model, x):
        x = model.blocks[1](model.blocks[0](x)[:, model.order])
        return x[:, model.order.argsort()]

    model = Middle(picked)
    model.register_buffer("order", order)
    report = compile_variants(model, {"latent": latent()}, {"sta": SPARSE})["sta"].report
    assert [site.name for site in report.replaced] == ["blocks.0.attn"]
    assert [site.name for site in report.refused] == ["blocks.1.attn"]
    assert report.self_attentions == 2
    assert not report.lacks_grid


class ReferenceAndVideo(Middle):
    """Two videos of one size in one sequence; the second is returned."""

    def __init__(self, apart=lambda: None) -> None:
        super().__init__()
        self.apart = apart

    def forward(self, latent: Tensor, reference: Tensor) -> Tensor:
        both = [self.patchify(each).flatten(2).transpose(1, 2) for each in (reference, latent)]
        x = torch.cat(both, 1)
        for block in self.blocks:
            self.apart()
            x = block(x)
        self.apart()
        return self.out(x[:, N:]).unflatten(1, GRID).permute(0, 4, 1, 2, 3)


@pytest.mark.usefixtures("stages_only")
def test_which_of_two_videos_is_returned_is_for_the_graph_to_show():
    model = ReferenceAndVideo(torch._dynamo.graph_break)
    inputs = {"latent": latent(), "reference": latent() + 1}
    expected = model(**inputs)
    sta_compile.reset_reports()
    sta_compile.compile(model, **OPTIONS)
    for _ in range(2):
        assert torch.equal(model(**inputs), expected)
    reasons = {site.reason for report in sta_compile.reports() for site in report.refused}
    assert reasons == {SEVERAL_VIDEOS.reason}
    sta_compile.restore(model).apart = lambda: None
    sta_compile.reset_reports()
    sta_compile.compile(model, **OPTIONS)
    model(**inputs)
    (site, *_) = [site for report in sta_compile.reports() for site in report.replaced]
    assert [kind for kind, _ in site.segments] == ["context", "video"]
