"""Which parts of a diffusion pipeline are denoisers?

    Wan 2.2   transformer, transformer_2        both
    a UNet    unet                              none, with a word: it has no tokens of video in its attention
    others    text_encoder, vae, ...            never

A pipeline is any object with a `components` mapping, as diffusers has it, or with modules as attributes. A part counts by
its name, which in diffusers is its role; a part of another name is compiled if the user gives it options of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .errors import StaError

_DENOISER = re.compile(r"(transformer|dit|denoiser)(_?\d+)?$")
_UNET = re.compile(r"unet(_?\d+)?$")
_NEVER = re.compile(
    r"(^|_)(text_encoder|image_encoder|vae|tokenizer|vocoder|safety_checker)(_|\d|$)"
)


def modules_of(pipe: Any) -> dict[str, torch.nn.Module]:
    """The neural networks of a pipeline by name; empty for what is no pipeline."""
    parts = getattr(pipe, "components", None)
    if not isinstance(parts, Mapping):
        parts = getattr(pipe, "__dict__", {})
    return {str(name): part for name, part in parts.items() if isinstance(part, torch.nn.Module)}


def parts_of(pipe: Any) -> dict[str, torch.nn.Module]:
    """As `modules_of`; raises StaError for what holds none and so is no pipeline."""
    found = {} if isinstance(pipe, type) else modules_of(pipe)
    if not found:
        what = f"the class {pipe.__name__}" if isinstance(pipe, type) else repr(pipe)[:80]
        raise StaError(
            f"{what} is no model and no pipeline; pass a torch.nn.Module, or an object that holds some, as pipelines of "
            "diffusers do"
        )
    return found


def denoisers_of(pipe: Any, named: Iterable[str] = ()) -> dict[str, torch.nn.Module]:
    """The denoisers of a pipeline, and the parts that the user named. Raises StaError if there is none."""
    modules, named = modules_of(pipe), set(named)
    for name in named:
        if _NEVER.search(name):
            raise StaError(
                f"{name} is no denoiser: it runs once for a whole video, and sparse attention would only change its "
                f"result; leave {name}=... out"
            )
    found = {n: part for n, part in modules.items() if n in named or _DENOISER.match(n)}
    if not found:
        kinds = ", ".join(f"{n} ({type(part).__name__})" for n, part in modules.items()) or "none"
        raise StaError(
            f"{type(pipe).__name__} has no part that is called transformer, dit or denoiser (its modules: {kinds}); "
            "pass the model itself to sta_compile.compile, or name the part with options of its own, for example "
            "my_model={}"
        )
    return found


def unets_of(pipe: Any) -> list[str]:
    """Names of parts that denoise without tokens of video."""
    return [name for name in modules_of(pipe) if _UNET.match(name)]
