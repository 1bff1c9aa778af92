"""Says aloud, once per model, what became approximate or why nothing did."""

from __future__ import annotations

import sys
import warnings
import weakref

import torch

from .report import Report

_said: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()  # replaced?
_apart_said: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
_functions_said: set[str] = set()


def say(
    report: Report, model: torch.nn.Module | None, silent: bool, *, apart: bool = False
) -> None:
    """Warns unless this model was spoken of already; that nothing was replaced may be followed by what was.

    silent: a graph without attention says nothing of its model, whose attention may be in the graphs that follow.
    apart: a graph has attention that graph breaks cut up, which is said even where others were replaced.
    """
    if silent and not report.replaced and not report.refused:
        return
    if apart and model is not None and _said.get(model) and model not in _apart_said:
        _apart_said[model] = True
        _warn(report.summary(part=True))
    if model is not None:
        if model in _said and (_said[model] or not report.replaced):
            return
        _said[model] = bool(report.replaced)
    else:
        text = report.summary()
        if text in _functions_said:
            return
        _functions_said.add(text)
    _warn(report.summary())


def say_for_another(report: Report, model: torch.nn.Module) -> None:
    """For a model that runs what was compiled for another of its class: the same is true of it."""
    if report.replaced and not _said.get(model):
        _said[model] = True
        _warn(report.summary())


def _warn(text: str) -> None:
    """A UserWarning at the user's call. Its registry is its own: Python shows a text only once per line of code by
    default, and a second model compiled by the same loop would stay silent."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, registry={})


def _is_library(module: str) -> bool:
    return module.split(".")[0] in (
        "torch",
        "sta_compile",
        "diffusers",
        "accelerate",
        "contextlib",
        "functools",
    )


def forget() -> None:
    """Every model is new again."""
    _said.clear()
    _apart_said.clear()
    _functions_said.clear()
