from __future__ import annotations

from pathlib import Path

import pytest

from sta_compile.errors import InvalidOptionError, StaError, UnknownOptionError
from sta_compile.option_values import noise_range
from sta_compile.settings import OPTIONS, Settings, env_name, split_options

NAMES = [
    "window",
    "tile",
    "grid",
    "always_keep",
    "dense_above",
    "dense_below",
    "timestep",
    "noise",
    "min_tokens",
    "kernel",
    "precision",
    "price",
    "speedup",
    "max_error",
    "layout",
    "strict",
]


def test_the_table_names_every_option():
    assert list(OPTIONS) == NAMES


def test_no_option_has_a_name_that_inductor_knows():
    from torch._inductor import config

    assert not set(OPTIONS) & set(config.get_config_copy())


def test_defaults_are_valid_and_canonical():
    settings, patches = Settings.resolve()
    assert settings == Settings()
    assert patches == {}
    assert (settings.window, settings.dense_above, settings.min_tokens) == ("auto", 0.95, 8192)


@pytest.mark.parametrize(
    ("name", "written", "read"),
    [
        ("window", [18, 24, 24], (18, 24, 24)),
        ("window", "18,24,24", (18, 24, 24)),
        ("window", "Full", "full"),
        ("tile", "auto", None),
        ("grid", "21x45x80", (21, 45, 80)),
        ("grid", "(21, 45, 80)", (21, 45, 80)),
        ("dense_above", None, None),
        ("dense_above", "none", None),
        ("dense_above", 1, 1.0),
        ("noise", "1000..0", "1000..0"),
        ("noise", "0.0..1e3", "0..1000"),
        ("noise", "-2..2", "-2..2"),
        ("min_tokens", "0", 0),
        ("strict", "1", True),
        ("strict", "off", False),
        ("kernel", "Reference", "reference"),
        ("always_keep", {"frames": [0]}, (0,)),
        ("always_keep", {"frames": [-1, 1, 0]}, (0, 1, -1)),
        ("always_keep", "frames=0,-1", (0, -1)),
        ("always_keep", {"frames": []}, None),
        ("always_keep", "none", None),
    ],
)
def test_values_are_read_from_python_and_from_text(name, written, read):
    settings, _ = Settings.resolve({name: written})
    assert getattr(settings, name) == read


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", (18, 24)),
        ("always_keep", {"frames": [1]}),
        ("always_keep", {"frames": [0, -2]}),
        ("always_keep", {"tokens": [0]}),
        ("always_keep", {}),
        ("always_keep", 0),
        ("always_keep", "first"),
        ("window", (18, 24, 0)),
        ("window", (18.5, 24, 24)),
        ("window", "half"),
        ("window", None),
        ("tile", 8),
        ("grid", "21x45"),
        ("dense_above", 95),
        ("dense_above", True),
        ("dense_above", float("nan")),
        ("dense_below", None),
        ("timestep", ""),
        ("noise", "5..5"),
        ("noise", "sigma"),
        ("noise", 1000),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("min_tokens", True),
        ("kernel", "flash"),
        ("layout", None),
        ("strict", 1),
        ("strict", "maybe"),
    ],
)
def test_a_bad_value_says_what_the_option_takes(name, value):
    with pytest.raises(InvalidOptionError, match=f"{name}.*pass ") as error:
        Settings.resolve({name: value})
    assert OPTIONS[name].metadata["takes"] in str(error.value)
    assert isinstance(error.value, StaError)


def test_dense_limits_that_leave_no_sparse_step_are_refused():
    with pytest.raises(InvalidOptionError, match=r"lower dense_below"):
        Settings(dense_below=0.97)


@pytest.mark.parametrize(
    ("wrote", "meant"),
    [("windw", "window"), ("dense_abov", "dense_above"), ("max_autotun", "max_autotune")],
)
def test_an_unknown_name_gets_the_nearest_of_ours_and_inductors(wrote, meant):
    with pytest.raises(UnknownOptionError, match=f"{wrote}.*did you mean '{meant}'"):
        Settings.resolve({wrote: 1})


def test_an_unknown_name_far_from_all_others_points_to_the_list():
    with pytest.raises(UnknownOptionError, match="sta_compile options"):
        Settings.resolve({"qqqqzzzz": 1})


def test_inductors_options_stand_in_the_same_dict():
    ours, patches = split_options({"window": "full", "triton.cudagraphs": True, "max-autotune": 1})
    assert ours == {"window": "full"}
    assert patches == {"triton.cudagraphs": True, "max_autotune": 1}


def test_options_beat_config_beats_environment(monkeypatch):
    from sta_compile import config

    monkeypatch.setenv("STA_WINDOW", "6,8,8")
    monkeypatch.setenv("STA_MIN_TOKENS", "5")
    monkeypatch.setenv("STA_STRICT", "1")
    with config.patch(window=(12, 16, 16), min_tokens=6):
        settings, _ = Settings.resolve({"window": (18, 24, 24)})
    assert settings == Settings(window=(18, 24, 24), min_tokens=6, strict=True)


def test_a_bad_variable_is_named_when_it_is_used(monkeypatch):
    monkeypatch.setenv("STA_WINDOW", "18 24 24")
    with pytest.raises(InvalidOptionError, match=r"STA_WINDOW=18 24 24.*for example 18,24,24"):
        Settings.resolve()
    assert Settings.resolve({"window": "full"})[0].window == "full"


def test_a_range_gives_the_timestep_at_both_ends():
    assert noise_range("1000..0") == (1000.0, 0.0)
    assert noise_range("log_sigma") is None


def test_fingerprints_differ_when_settings_do():
    settings = [
        Settings(),
        Settings(window="full"),
        Settings(noise=lambda t: t / 1000),
        Settings(noise=lambda t: t / 500),
        *(Settings(noise=_scaled(by)) for by in (2, 3)),
    ]
    assert len({each.fingerprint() for each in settings}) == len(settings)
    assert Settings(noise=_scaled(2)).fingerprint() == Settings(noise=_scaled(2)).fingerprint()


def _scaled(by):
    return lambda timestep: timestep / by


def test_the_options_page_is_what_the_table_says():
    from sta_compile.option_docs import as_markdown

    page = Path(__file__).parents[1] / "docs" / "options.md"
    assert page.read_text() == as_markdown(), (
        "run python -m sta_compile options --markdown > docs/options.md"
    )
    assert all(env_name(name) in as_markdown() for name in OPTIONS)
