from __future__ import annotations

import json
import sys

import pytest

from sta_compile.__main__ import main
from sta_compile.settings import OPTIONS

SMALL = ["num_layers=2", "num_attention_heads=2", "ffn_dim=64", "text_dim=16"]


def explain(*arguments):
    return main(["explain", "WanTransformer3DModel", "--config", *SMALL, *arguments])


def test_explain_prints_a_table(capsys):
    assert explain("--size", "81x480x832", "--timesteps", "999,960,500") == 0
    out = capsys.readouterr().out
    assert "2 of 2 self-attentions over 21x30x52 tokens" in out
    assert "blocks.0-1.attn1" in out
    assert "dense steps: 2 of 3 (0-1)" in out


def test_explain_prints_json(capsys):
    assert explain("--size", "81x480x832", "--option", "window=full", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [site["grid"] for site in found["replaced"]] == [[21, 30, 52]] * 2
    assert found["settings"]["window"] == "full"
    assert found["name"] == "WanTransformer3DModel"


@pytest.mark.parametrize(("target", "kernel"), [("sm_90", "cutlass"), ("sm_80", "triton")])
def test_explain_names_the_kernel_of_a_gpu_that_is_not_there(capsys, monkeypatch, target, kernel):
    monkeypatch.setenv("STA_TARGET", target)
    assert explain("--size", "81x480x832") == 0
    out = capsys.readouterr().out
    assert f"kernels: those that {target} would run" in out
    (row,) = (line for line in out.splitlines() if "blocks.0-1.attn1" in line)
    assert row.split()[-2] == kernel


def test_nothing_replaced_is_an_exit_code_of_one(capsys):
    assert explain("--size", "5x64x64") == 1
    assert "min_tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--size", "720x1280"], "--size 720x1280 is not a video in pixels: FRAMESxHEIGHTxWIDTH"),
        (["--size", "0x8x8"], "is not a video in pixels"),
        (["--batch", "0"], "a whole number from 1 on"),
        (["--option", "windw=full"], "did you mean 'window'"),
        (["--option", "window"], "is not KEY=VALUE"),
        (["--timesteps", "a,b"], "--timesteps a,b is not numbers between commas"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, hint):
    assert explain(*arguments) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", [["explain", "WanTransformer3DModel"], ["coverage"]])
def test_without_diffusers(capsys, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert main(command) == 2
    said = capsys.readouterr().err.strip()
    assert said == "sta_compile: this needs diffusers; run pip install diffusers"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["WanTransforme3DModel"], "did you mean WanTransformer3DModel"),
        (["FluxTransformer2DModel", "--mode", "tile"], "a part of one of '', 'Kontext'"),
        (["FluxTransformer2DModel", "--size", "1x8x8"], "less than a token"),
        (["FluxTransformer2DModel", "--config", "num_layers=1"], "--config can't change"),
        (["SD3Transformer2DModel", "--size", "1x4096x4096"], "pass another --size"),
    ],
)
def test_mistakes_in_a_class(capsys, arguments, hint):
    assert main(["explain", *arguments]) == 2
    assert hint in capsys.readouterr().err


def test_explain_takes_the_classes_of_the_coverage_table(capsys, monkeypatch):
    monkeypatch.setenv("STA_TARGET", "sm_90")
    arguments = ["FluxTransformer2DModel", "--size", "1x2048x1600", "--json"]
    assert main(["explain", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [site["grid"] for site in found["replaced"]] == [[1, 128, 100]] * 4
    assert "Kontext" in found["note"]
    monkeypatch.setenv("STA_TARGET", "sm_75")
    assert main(["explain", *arguments]) == 1
    assert "older than 8.0" in json.loads(capsys.readouterr().out)["reason"]


def test_a_table_that_can_not_be_written(capsys):
    assert main(["coverage", "--only", "Latte", "--json", "no/such/folder.json"]) == 2
    assert "there is no folder no/such" in capsys.readouterr().err


def test_doctor_names_what_is_installed_and_what_runs(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"]
    assert found["entry_point"] == "sta_compile.backend:sta"
    assert found["devices"][0]["name"] == "cpu"
    assert found["compiler"]
    assert found["cache"].endswith("sta_kernels")
    assert main(["doctor"]) == 0
    assert "triton" in capsys.readouterr().out


def test_doctor_examines_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setenv("STA_TARGET", "sm_90")
    assert main(["doctor", "--json"]) == 0
    device = json.loads(capsys.readouterr().out)["devices"][-1]
    assert device["facts"].startswith("sm_90, 227 KiB shared memory")
    assert "wgmma" in device["facts"]
    assert list(device["kernels"]) == [
        "cutlass (tma, fp8)",
        "cutlass (tma, tiered)",
        "triton (tma, nvfp4)",
        "cutlass (tma)",
        "triton (tma)",
        "triton (pointer)",
        "reference",
    ]
    assert device["kernels"]["triton (tma)"] in ("", "the package triton is not installed")


def test_options_lists_every_option(capsys):
    assert main(["options"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in OPTIONS)
