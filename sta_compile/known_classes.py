"""`python -m sta_compile explain CLASS`: a class of diffusers by its name, with the inputs that it takes.

    WanTransformer3DModel      at its real config, on meta: `video_models` knows what a pipeline passes for a video
    SD3Transformer2DModel      at the small config of its row in the coverage table, which knows its inputs, at any grid

What is replaced, the tiles and the window depend on the grid and not on the width or the depth of a model.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from .errors import StaError
from .explanation import Explanation, explain
from .ir.attention_spec import Triple
from .video_models import (
    MODELS,
    build,
    first_timestep,
    latent_of,
    make_inputs,
    without_weights,
)

# Pixels of a token, where only the coverage table knows a class: an autoencoder of (4, 8, 8), and patches of (1, 2, 2).
_FRAMES, _PIXELS = 4, 16


def explain_class(
    name: str,
    size: Triple,
    *,
    batch: int = 1,
    mode: str = "",
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    timesteps: Sequence[float] | None = None,
) -> Explanation:
    """size: frames, height and width in pixels. mode: a part of the name of a row's mode.

    Raises StaError for unknown names, and for a size that the model does not take.
    """
    if name in MODELS and not mode:
        return _at_real_config(name, size, batch, config, options, timesteps)
    return _of_row(name, size, batch, mode, config, options, timesteps)


def _at_real_config(
    name: str,
    size: Triple,
    batch: int,
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    timesteps: Sequence[float] | None,
) -> Explanation:
    latent = latent_of(name, *size)
    with without_weights(name) as device:
        model = build(name, config, device=device)
        inputs = make_inputs(model, latent, batch=batch, device=device)
    with torch.no_grad():
        found = explain(model, options=options, timesteps=timesteps, fullgraph=True, device="meta")(
            **inputs
        )
    return found.knowing_noise(model, first_timestep(name))


def _of_row(
    name: str,
    size: Triple,
    batch: int,
    mode: str,
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    timesteps: Sequence[float] | None,
) -> Explanation:
    from .coverage.examine import explained
    from .coverage.row import Size
    from .coverage.zoo import IMAGE, ROWS

    rows = [row for row in ROWS if row.model == name]
    if not rows:
        raise _unknown(name, sorted({*MODELS, *(row.model for row in ROWS)}))
    modes = ", ".join(repr(row.mode) for row in rows)
    row = next((row for row in rows if mode.lower() in row.mode.lower()), None)
    if row is None:
        raise StaError(f"{name} has no mode {mode!r}; pass --mode as a part of one of {modes}")
    if config:
        raise StaError(
            f"{name} is explained at the config of the coverage table, which --config can't change; leave it out, or call "
            "sta_compile.explain(model)(**inputs) in Python"
        )
    frames, height, width = size
    grid = (
        1 if row in IMAGE else (frames - 1) // _FRAMES + 1,
        height // _PIXELS,
        width // _PIXELS,
    )
    if min(grid) < 1:
        raise StaError(
            f"{'x'.join(map(str, size))} is less than a token of {_PIXELS}x{_PIXELS} pixels; pass a larger --size"
        )
    try:
        with _quiet():
            built = row.at(Size(batch, grid, row.layers))
            found = explained(row, built, options=options, timesteps=timesteps, device="meta")
    except StaError:
        raise
    except Exception as error:  # a model that does not take this size, whatever it says
        reason = str(error).strip().partition("\n")[0]
        raise StaError(
            f"{row.name} can't be traced over {'x'.join(map(str, grid))} tokens ({type(error).__name__}: {reason}); "
            "pass another --size"
        ) from error
    frames_of = "" if row in IMAGE else f"{_FRAMES} frames of "
    note = (
        f"A small random model of {row.layers} layers, with the inputs of {row.name} in the coverage table; a token is "
        f"{frames_of}{_PIXELS}x{_PIXELS} pixels."
    )
    others = f" Other modes: {modes} (--mode)." if len(rows) > 1 else ""
    return replace(found, note=note + others)


def _quiet() -> AbstractContextManager[None]:
    from .coverage.run import quiet

    return quiet()


def _unknown(name: str, known: Sequence[str]) -> StaError:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return StaError(
        f"the inputs of {name!r} are not known here; {meant}docs/coverage.md lists the classes that are, and "
        "sta_compile.explain(model)(**inputs) takes any model in Python"
    )
