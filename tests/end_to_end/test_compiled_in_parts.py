"""How models are compiled and used in practice: in place, block by block, with new weights and other prompts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sta_compile
from sta_compile import _torch, backend
from tests.end_to_end.compiled import RewritingBackend, data_dependent_sizes, relative_error
from tests.end_to_end.models import FAMILIES, Case
from tests.end_to_end.oracle import Oracle, window_mask
from tests.end_to_end.tiny import CHANNELS, SPARSE, TinyVideo, valid

GRID = (3, 6, 8)
TILES, WINDOW = (3, 3, 4), (1, 3, 3)


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def masked(model: nn.Module, sites, **inputs) -> Tensor:
    with Oracle(model, sites, window_mask(GRID, TILES, WINDOW)):
        out = model(**inputs)
    return out if isinstance(out, Tensor) else out[0]


class TestInPlace:
    """peft 2957, diffusers 11408: `_orig_mod` in the names of weights, so that adapters are not found."""

    @pytest.fixture
    def case(self) -> Case:
        case = FAMILIES["wan"].case(1, GRID)
        self.names = list(case.model.state_dict())
        case.model.compile(backend=RewritingBackend({"sta": SPARSE}), fullgraph=True)
        return case

    def check(self, case: Case) -> None:
        # nn.Module._call_impl runs the compiled call; forward itself is eager.
        compiled = case.model(**case.inputs)[0]
        case.model._compiled_call_impl = None
        assert relative_error(compiled, masked(case.model, case.sites, **case.inputs)) < 1e-5

    def test_weights_keep_their_names(self, case, tmp_path):
        case.model(**case.inputs)
        assert list(case.model.state_dict()) == self.names
        case.model.save_pretrained(tmp_path)
        loaded = type(case.model).from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(**case.inputs)[0], case.model.forward(**case.inputs)[0])
        self.check(case)

    def test_adapters_that_are_added_later_take_effect(self, case):
        before = case.model(**case.inputs)[0]
        for block in case.model.blocks:
            block.attn1.to_q = WithAdapter(block.attn1.to_q)
        added = [name for name in case.model.state_dict() if "adapter" in name]
        assert added[0] == "blocks.0.attn1.to_q.adapter_down.weight"
        assert relative_error(case.model(**case.inputs)[0], before) > 1e-3
        self.check(case)

    def test_weights_that_are_changed_in_place_take_effect(self, case):
        before = case.model(**case.inputs)[0]
        case.model.blocks[0].attn1.to_k.weight.mul_(-1)
        assert relative_error(case.model(**case.inputs)[0], before) > 1e-3
        self.check(case)


class WithAdapter(nn.Module):
    """A linear layer and a low-rank change to it, as peft puts it in a layer's place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.adapter_down = nn.Linear(base.in_features, 2, bias=False)
        self.adapter_up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter_up(self.adapter_down(x))


class TestOtherPrompts:
    """diffusers 10932, ParaAttention 22: every length of the text is a compile, up to the limit, and beyond it the video is
    corrupted."""

    def compiles(self, model, steps, backend) -> int:
        """How often the backend is asked while the model runs all steps."""
        torch._dynamo.reset()
        graphs = 0

        def count(gm, example_inputs):
            nonlocal graphs
            graphs += 1
            return backend(gm, example_inputs)

        compiled = torch.compile(model, backend=count, fullgraph=True)
        self.outputs = [compiled(**inputs) for inputs in steps]
        return graphs

    def test_many_layers_and_steps(self):
        model = TinyVideo(layers=20, width=8)
        steps = [
            {
                "latent": torch.randn(2, CHANNELS, *GRID),
                "text": torch.randn(2, length, 8),
                "valid": valid(length, length - 2, of=length),
            }
            for length in (5, 9, 14)
            for _ in range(3)
        ]
        plain = self.compiles(model, steps, lambda gm, _: gm.forward)
        sta = RewritingBackend({"sta": SPARSE})
        assert self.compiles(model, steps, sta) <= min(plain, 3)
        assert all(len(report.replaced) == 20 for report in sta.reports["sta"])
        for step in (0, 4, 8):
            expected = masked(model, model.sites, **steps[step])
            assert relative_error(self.outputs[step], expected) < 1e-4

    def test_hunyuan_video(self):
        family = FAMILIES["hunyuan"]
        cases = [family.case(2, GRID, text=length) for length in (7, 12, 20)]
        model = cases[0].model
        steps = [
            case.at(level, level - 20.0) for case in cases for level in (999.0, 960.0, 600.0, 50.0)
        ]
        options = {**SPARSE, "dense_above": 0.95, "noise": "0..1000"}
        plain = self.compiles(model, steps, lambda gm, _: gm.forward)
        assert self.compiles(model, steps, RewritingBackend({"sta": options})) <= min(plain, 3)
        for step, (out,) in zip(steps, self.outputs, strict=True):
            mask = window_mask(GRID, TILES, WINDOW)
            dense = (step["timestep"] > 950).tolist()
            with Oracle(model, cases[0].sites, mask, dense=dense):
                assert relative_error(out, model(**step)[0]) < 1e-4

    def test_mochi_by_the_values_of_its_mask(self):
        """The number of valid tokens depends on data: no other prompt compiles again."""
        case = FAMILIES["mochi"].case(2, GRID)
        steps = []
        for lengths in ((5, 3), (7, 1), (2, 6)):
            steps.append({**case.inputs, "encoder_attention_mask": valid(*lengths, of=7)})
        with data_dependent_sizes():
            assert self.compiles(case.model, steps, RewritingBackend({"sta": SPARSE})) == 1
        for step, (out,) in zip(steps, self.outputs, strict=True):
            assert relative_error(out, masked(case.model, case.sites, **step)) < 1e-4


@pytest.mark.slow
def test_blocks_compiled_one_by_one_keep_their_first_output():
    """PyTorch 152887, 160281, diffusers 7420: with CUDA graphs the second run overwrites the first one's output."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TinyVideo(layers=2).to(device)
    first, second = (torch.randn(1, CHANNELS, *GRID, device=device) for _ in range(2))
    exact = model(first)
    options = {**SPARSE, "grid": GRID, "min_tokens": 0, "dense_above": None}
    for block in model.blocks:
        block.compile(backend="sta", options={**options, "triton.cudagraphs": True})
    kept = model(first)
    copy = kept.clone()
    model(second)
    assert torch.equal(kept, copy)
    assert {len(report.replaced) for report in sta_compile.reports()} == {1}
    for block in model.blocks:
        block._compiled_call_impl = None
    assert relative_error(kept.cpu(), masked(model.cpu(), model.sites, latent=first.cpu())) < 1e-4
    assert relative_error(kept, exact) > 1e-3


def test_a_block_alone_says_what_it_needs():
    model = TinyVideo()
    sta = RewritingBackend({"sta": SPARSE})
    model.blocks[0].compile(backend=sta)
    latent = torch.randn(1, CHANNELS, *GRID)
    found = model(latent)
    (report,) = sta.reports["sta"]
    assert "options={'grid': (frames, rows, cols)}" in report.summary()
    model.blocks[0]._compiled_call_impl = None
    assert relative_error(found, model(latent)) < 1e-6


@pytest.mark.parametrize("capability", [(9, 5), (9, 4), (12, 0)])
def test_amd_gpus_run_plain_inductor(capability, monkeypatch):
    """torchtitan 4778: an AMD GPU that reports capability 9.5 gets a kernel for NVIDIA's 9.0."""
    from sta_compile.runtime.target import _detect

    given = []
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(backend, "device_of", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(
        _torch, "compile_with_inductor", lambda gm, *_, **__: given.append(gm) or gm.forward
    )
    _detect.cache_clear()
    model, latent = TinyVideo(), torch.randn(1, CHANNELS, *GRID)
    with pytest.warns(UserWarning, match=r"sta: nothing was replaced in TinyVideo: AMD GPUs"):
        found = torch.compile(model, backend="sta", options={**SPARSE, "min_tokens": 0})(latent)
    _detect.cache_clear()
    assert torch.equal(found, model(latent))
    assert not any("sta" in str(node.target) for node in given[0].graph.nodes)
