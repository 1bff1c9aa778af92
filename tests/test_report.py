from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sta_compile import report as reporting
from sta_compile.report import NoiseReport, RefusedSite, ReplacedSite, Report, numbered
from sta_compile.settings import Settings

SITE = ReplacedSite(
    name="blocks.0.attn1",
    grid=(21, 45, 80),
    segments=(("video", 75600),),
    tiles=(4, 5, 11),
    tile=(6, 9, 8),
    window=(3, 5, 9),
    kept=0.424,
    kernel="triton",
    evidence="proved by conv3d patch embed",
)
KNOWN = NoiseReport("timestep", "0..1000", "first call: 999")


def wan(**changes):
    sites = [replace(SITE, name=f"blocks.{i}.attn1") for i in range(40)]
    cross = [RefusedSite(f"blocks.{i}.attn2", "cross-attention", "", False) for i in range(40)]
    report = Report("Wan", sites, cross, 3, KNOWN, {"infer grid": 0.1}, Settings().to_dict())
    return replace(report, **changes)


def test_the_summary_says_what_became_approximate():
    assert wan().summary() == (
        "sta: 40 of 40 self-attentions over 21x45x80 tokens keep 42 % of pairs; "
        'dense above noise 0.95; window="full" is exact'
    )


def test_the_summary_of_a_full_window_says_that_it_is_exact():
    exact = wan(replaced=[replace(SITE, window=(4, 5, 11), kept=1.0)])
    assert exact.summary().endswith("keep every pair: exact")


def test_an_unknown_noise_level_is_said_with_what_to_set():
    summary = wan(noise=NoiseReport("t", None, "no value, so every step stays dense: x")).summary()
    assert "; but no value, so every step stays dense: x; window" in summary
    summary = wan(noise=NoiseReport("t")).summary()
    assert "every step stays dense: pass options={" in summary
    assert "dense_above=None" in summary


def test_kernels_that_auto_chose_are_named():
    report = wan(replaced=[replace(SITE, kernel="auto"), SITE])
    report.name_kernels(())
    assert [site.kernel for site in report.replaced] == ["auto", "triton"]
    report.name_kernels(["cutlass forward sm90 a", "cutlass forward sm90 b"])
    assert [site.kernel for site in report.replaced] == ["cutlass", "triton"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (Settings(dense_above=None), "no dense steps"),
        (Settings(dense_above=0.9, dense_below=0.1), "dense above noise 0.9 and below 0.1"),
        (Settings(dense_above=None, dense_below=0.1), "dense below 0.1"),
    ],
)
def test_dense_limits(settings, text):
    assert f"; {text};" in wan(settings=settings.to_dict()).summary()


def test_a_partly_replaced_model_names_the_commonest_reason():
    refused = [RefusedSite("a", "mask over video tokens", "drop it"), RefusedSite("b", "x", "y")]
    summary = wan(refused=[*refused, refused[0]]).summary()
    assert "40 of 43 self-attentions" in summary
    assert summary.endswith("3 left as they were (mask over video tokens)")


def test_nothing_replaced_says_why_and_what_to_do():
    assert "no attention was found" in Report("ResNet").summary()
    target = Report("Wan", reason="HIP has no STA kernel", hint="use an NVIDIA GPU")
    assert (
        "nothing was replaced in Wan: HIP has no STA kernel; use an NVIDIA GPU" in target.summary()
    )
    short = Report("Wan", refused=[RefusedSite("b", "3,000 tokens", "lower min_tokens")] * 2)
    assert "3,000 tokens; lower min_tokens (2 of 2 attentions)" in short.summary()


def test_many_grids_and_shares():
    sites = [replace(SITE, grid=(1, 8, n), kept=n / 10) for n in (2, 3, 4)]
    summary = wan(replaced=sites).summary()
    assert "over 1x8x2 and 1x8x3 and 1 more tokens keep 20 % to 40 % of pairs" in summary
    unknown = replace(SITE, grid=None, tiles=None, tile=None, window=None, kept=None)
    assert "over token grids known at run time" in wan(replaced=[unknown]).summary()
    assert "at run time" in str(wan(replaced=[unknown]))


def test_to_dict_is_json():
    values = json.loads(json.dumps(wan(settings=Settings(noise=abs).to_dict()).to_dict()))
    assert values["replaced"][0]["grid"] == [21, 45, 80]
    assert values["settings"]["noise"] == "builtins.abs"
    assert values["seconds"] == {"infer grid": 0.1}
    assert values["summary"].startswith("sta: 40 of 40")


def test_the_table_groups_equal_sites():
    text = str(wan())
    assert "blocks.0-39.attn1" in text
    assert "blocks.0-39.attn2" in text
    assert "4x5x11 of 6x9x8" in text
    assert "0..1000 from input timestep" in text
    assert text.count("grid 21x45x80: proved by conv3d patch embed") == 1
    assert len(text.splitlines()) < 30


def test_a_region_stands_for_each_of_its_calls():
    text = RefusedSite("text.0.attn", "text is short", "nothing to do", calls=2)
    region = wan(replaced=[replace(SITE, calls=40)], refused=[text])
    assert region.summary().startswith("sta: 40 of 42 self-attentions (1 compiled) over 21x45x80")
    assert "2 left as they were" in region.summary()
    assert "blocks.0.attn1: one compiled region, called 40 times" in str(region)


def test_numbered_names():
    names = ["b.0.attn", "b.1.attn", "head", "b.4.attn", "c.0.d.3", "c.1.d.3", "c.1.d.4", "head"]
    assert list(numbered(names)) == [
        ("b.0-1,4.attn", [0, 1, 3]),
        ("head", [2]),
        ("c.0-1.d.3", [4, 5]),
        ("c.1.d.4", [6]),
        ("head", [7]),
    ]


def test_reports_are_bounded_and_forgotten_on_reset():
    reporting.reset_reports()
    for index in range(reporting.MAX_REPORTS + 3):
        reporting.record(Report(str(index)))
    kept = reporting.reports()
    assert len(kept) == reporting.MAX_REPORTS
    assert kept[0].name == "3"
    reporting.reset_reports()
    assert reporting.reports() == []
    assert len(kept) == reporting.MAX_REPORTS
