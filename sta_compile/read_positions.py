"""Has a tensor that a model is called with the positions of a grid? Asked on the host, before a compiled graph is chosen.

A graph whose grid was read from values checks them on the device, and is dense for any other grid of as many tokens. So that
such a call finds, or gets, a graph of its own, the values are guarded; but reading them waits for the device. Pipelines make
ids and coordinates once for a video and pass the same tensor in every step, so what was read is kept with the tensor:

    has_positions(img_ids, positions)     step 0: reads, waits        step 1, 2, ...: remembers

Where each call brings a new tensor, reading would make every step wait. It ends after a few: the answer is None then, and
the check on the device decides alone, as it does for tensors that can't be read.
"""

from __future__ import annotations

import threading
from collections import Counter
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .analysis.position_values import Positions, matches_grid

_READS = 4  # of tensors that were new, beyond one for each call that was spared

# tensor -> (version, what was read of it)
_known: Any = WeakIdKeyDictionary()
_reads: Counter[Positions] = Counter()  # less the calls that were spared
_lock = threading.Lock()


def has_positions(value: Any, positions: Positions) -> bool | None:
    """None where it is not known: for other values than a readable tensor, or if reading has not paid so far."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.is_meta:
        return None
    alike = value.dim() > positions.dim and value.is_complex() == positions.is_complex
    if not alike or value.shape[positions.dim] < positions.offset + prod(positions.grid):
        return False
    with _lock:
        answers = _answers(value)
        if positions in answers:
            _reads[positions] = max(0, _reads[positions] - 1)
            return answers[positions]
        if _reads[positions] >= _READS or _captures(value):
            return None
        _reads[positions] += 1
        with torch.no_grad():
            answers[positions] = bool(matches_grid(value.detach(), positions))
        return answers[positions]


def others(value: Any) -> tuple[Positions, ...]:
    """Those that a tensor was found not to have."""
    with _lock:
        if not isinstance(value, Tensor) or value not in _known:
            return ()
        return tuple(positions for positions, has in _answers(value).items() if not has)


def _answers(value: Tensor) -> dict[Positions, bool]:
    """What was read of a tensor as it is now; one that was written to since is another one, as far as that is counted."""
    version = None if value.is_inference() else value._version
    if value not in _known or _known[value][0] != version:
        _known[value] = version, {}
    answers: dict[Positions, bool] = _known[value][1]
    return answers


def forget() -> None:
    _reads.clear()
    _known.clear()


def _captures(value: Tensor) -> bool:
    """Nothing may wait while a CUDA graph is captured."""
    return value.is_cuda and torch.cuda.is_current_stream_capturing()
