from __future__ import annotations

import threading

import pytest

import sta_compile
from sta_compile import config
from sta_compile.errors import InvalidOptionError, UnknownOptionError
from sta_compile.settings import OPTIONS, PROCESS_OPTIONS, Settings


@pytest.fixture(autouse=True)
def _clean():
    yield
    for name in OPTIONS:
        delattr(config, name)


def test_every_option_has_its_default():
    assert {name: getattr(config, name) for name in OPTIONS} == vars(Settings())
    assert set(OPTIONS) <= set(dir(config))


def test_an_assignment_is_checked_and_made_canonical():
    config.window = "18,24,24"
    assert config.window == (18, 24, 24)
    with pytest.raises(InvalidOptionError, match=r"from sta_compile.config.*pass"):
        config.window = (1, 2)
    assert config.window == (18, 24, 24)
    del config.window
    assert config.window == "auto"


def test_unknown_names():
    with pytest.raises(UnknownOptionError, match="did you mean 'window'"):
        config.windw = "full"
    with pytest.raises(UnknownOptionError, match="did you mean 'grid'"), config.patch(gridd=1):
        pass
    with pytest.raises(AttributeError, match="windw"):
        config.windw  # noqa: B018


def test_a_value_is_seen_in_other_threads():
    config.window = "full"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(Settings.resolve()[0].window))
    thread.start()
    thread.join()
    assert seen == ["full"]


def test_a_patch_ends_with_its_block_and_stays_in_its_thread():
    config.window = "full"
    with config.patch(window=(6, 8, 8), strict=True):
        seen = []
        thread = threading.Thread(target=lambda: seen.append((config.window, config.strict)))
        thread.start()
        thread.join()
        assert (config.window, config.strict) == ((6, 8, 8), True)
        with config.patch(window=(8, 8, 8)):
            assert (config.window, config.strict) == ((8, 8, 8), True)
    assert seen == [("full", False)]
    assert (config.window, config.strict) == ("full", False)


def test_a_patch_decorates_a_function_many_times():
    @config.patch(min_tokens=7)
    def read():
        return config.min_tokens

    assert [read(), read(), config.min_tokens] == [7, 7, 8192]


def test_token_grid_declares_the_grid():
    with sta_compile.token_grid(21, 45, 80):
        assert Settings.resolve()[0].grid == (21, 45, 80)
    assert config.grid is None


def test_the_environment_is_read_when_asked(monkeypatch):
    monkeypatch.setenv("STA_DENSE_ABOVE", "none")
    assert config.dense_above is None
    config.dense_above = 0.5
    assert config.dense_above == 0.5
    del config.dense_above
    assert config.dense_above is None
    for name in ("STA_DENSE_ABOVE", "STA_PRECISION"):  # empty is not set
        monkeypatch.setenv(name, "")
    assert (config.dense_above, config.precision) == (0.95, "native")


def test_snapshots_differ_when_the_named_options_do():
    before = config.snapshot(["window", "strict"])
    config.min_tokens = 1
    assert config.snapshot(["window", "strict"]) == before
    with config.patch(window="full"):
        assert config.snapshot(["window", "strict"]) != before
    config.window = "auto"
    assert config.snapshot(["window", "strict"]) != before


def test_options_of_the_process(monkeypatch, tmp_path):
    assert (config.cache_dir, config.compiler, config.target) == (None, "auto", "auto")
    monkeypatch.setenv("STA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("STA_TARGET", "9.0")
    assert (config.cache_dir, config.target) == (str(tmp_path), "sm_90")
    with config.patch(compiler="nvcc", target="sm_100a"):
        assert (config.compiler, config.target) == ("nvcc", "sm_100")
        assert Settings.resolve() == (Settings(), {})  # not a model's
        assert config.overrides() == {}
    config.cache_dir = tmp_path / "other"
    try:
        assert config.cache_dir == str(tmp_path / "other")
    finally:
        del config.cache_dir
    for name, value in (("compiler", "clang"), ("target", "hopper"), ("cache_dir", 3)):
        with pytest.raises(InvalidOptionError, match=name):
            setattr(config, name, value)
    with pytest.raises(InvalidOptionError, match="STA_TARGET"):
        Settings.resolve({"target": "sm_90"})


def test_where_options_of_the_process_are_listed():
    from sta_compile.option_docs import as_markdown

    assert all(f"| `{name}` |" in as_markdown() for name in PROCESS_OPTIONS)
    assert set(PROCESS_OPTIONS) <= set(dir(config))
