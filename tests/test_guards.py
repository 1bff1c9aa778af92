from __future__ import annotations

import pytest
import torch
from torch._dynamo.source import AttrSource, LocalSource

from sta_compile import config
from sta_compile._guards import guard_reused_regions, install_config_guard
from sta_compile.settings import OPTIONS, Settings


@pytest.fixture(autouse=True)
def _clean():
    torch._dynamo.reset()
    yield
    for name in OPTIONS:
        delattr(config, name)
    torch._dynamo.reset()


class Recorder:
    """A backend that notes the settings of each compile and runs the graph as it is."""

    def __init__(self):
        self.compiles = []

    def __call__(self, gm, example_inputs, *, options=None):
        settings, _ = Settings.resolve(options)
        assert install_config_guard(name for name in OPTIONS if name not in (options or {}))
        self.compiles.append(settings)
        return gm.forward


def compiled(**kwargs):
    backend = Recorder()
    return torch.compile(torch.nn.Linear(2, 2), backend=backend, **kwargs), backend.compiles


X = torch.ones(1, 2)


def test_a_changed_config_compiles_again_and_an_unchanged_one_does_not():
    model, compiles = compiled()
    model(X)
    model(X)
    assert [each.window for each in compiles] == ["auto"]
    config.window = (18, 24, 24)
    model(X)
    model(X)
    config.strict = True
    model(X)
    assert [(each.window, each.strict) for each in compiles] == [
        ("auto", False),
        ((18, 24, 24), False),
        ((18, 24, 24), True),
    ]


def test_a_config_seen_before_finds_its_code():
    model, compiles = compiled()
    for _ in range(3):
        for grid in ((1, 2, 3), (1, 3, 2)):
            with config.patch(grid=grid):
                model(X)
    assert [each.grid for each in compiles] == [(1, 2, 3), (1, 3, 2)]


def test_what_options_decide_is_not_guarded():
    model, compiles = compiled(options={"window": "full"})
    model(X)
    config.window = (18, 24, 24)
    model(X)
    assert len(compiles) == 1


def test_functions_are_compared_by_identity():
    model, compiles = compiled()
    first, second = (lambda t: t), (lambda t: 1 - t)
    for noise in (first, first, second):
        config.noise = noise
        model(X)
    assert [each.noise for each in compiles] == [first, second]


def test_in_place_compile_and_fullgraph():
    class Twice(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    backend, model = Recorder(), Twice()
    model.compile(backend=backend, fullgraph=True)
    model(X)
    config.kernel = "reference"
    model(X)
    assert len(backend.compiles) == 2


def test_outside_of_a_compile_there_is_nothing_to_guard():
    assert not install_config_guard(["window"])


def test_the_guard_can_be_stored():
    import pickle
    from functools import partial

    from sta_compile._guards import _equality_guard

    read = partial(config.snapshot, ("window",))
    guard = partial(_equality_guard, read=read, value=read(), text="the window is unchanged")
    stored = pickle.loads(pickle.dumps(guard)).keywords
    assert (stored["read"](), stored["value"]) == (read(), guard.keywords["value"])


def test_sources_are_moved_as_torch_moves_them():
    """`guard_reused_regions` has each cloned once, with all that it is made of."""
    guard_reused_regions()
    one, two = (AttrSource(LocalSource("self"), f"block_{i}") for i in range(2))
    weight = AttrSource(AttrSource(one, "attn"), "weight")

    def moved(source):
        return two if source == one else source

    expected = AttrSource(AttrSource(two, "attn"), "weight")
    assert weight.clone(moved) == weight.clone(moved) == expected
    assert weight.clone(lambda source: source) == weight
    assert weight.clone() == weight
