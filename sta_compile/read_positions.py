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
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .analysis.position_values import Positions, Rows, block_in, matches_grid

_READS = 4  # of tensors that were new, beyond one for each call that was spared

# tensor -> (version, what was read of it)
_known: Any = WeakIdKeyDictionary()
_reads: Counter[Positions | Rows] = Counter()  # less the calls that were spared
_lock = threading.Lock()


def has_positions(value: Any, positions: Positions) -> bool | None:
    """None where it is not known: for other values than a readable tensor, or if reading has not paid so far."""
    if not _may_be_read(value):
        return None
    alike = value.dim() > positions.dim and value.is_complex() == positions.is_complex
    if not alike or value.shape[positions.dim] < positions.offset + prod(positions.grid):
        return False
    return _answer(value, positions, lambda: bool(matches_grid(value.detach(), positions)))


def holds_grid(value: Any, rows: Rows) -> bool | None:
    """Is there any grid in some rows? None where it is not known, as for `has_positions`."""
    if not _may_be_read(value) or value.dim() <= rows.dim or value.shape[rows.dim] < rows.stop:
        return None
    return _answer(value, rows, lambda: block_in(value, rows) is not None)


def _may_be_read(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and not value.is_meta


def _answer(value: Tensor, asked: Positions | Rows, read: Callable[[], bool]) -> bool | None:
    """What is known of a tensor, or read now; None if reading has not paid so far."""
    with _lock:
        answers = _answers(value)
        if asked in answers:
            _reads[asked] = max(0, _reads[asked] - 1)
            return answers[asked]
        if _reads[asked] >= _READS or _captures(value):
            return None
        _reads[asked] += 1
        with torch.no_grad():
            answers[asked] = read()
        return answers[asked]


def others(value: Any) -> tuple[Positions, ...]:
    """Those that a tensor was found not to have."""
    with _lock:
        if not isinstance(value, Tensor) or value not in _known:
            return ()
        missing = (asked for asked, has in _answers(value).items() if not has)
        return tuple(asked for asked in missing if isinstance(asked, Positions))


def _answers(value: Tensor) -> dict[Positions | Rows, bool]:
    """What was read of a tensor as it is now; one that was written to since is another one, as far as that is counted."""
    version = None if value.is_inference() else value._version
    if value not in _known or _known[value][0] != version:
        _known[value] = version, {}
    answers: dict[Positions | Rows, bool] = _known[value][1]
    return answers


def forget() -> None:
    _reads.clear()
    _known.clear()


def _captures(value: Tensor) -> bool:
    """Nothing may wait while a CUDA graph is captured."""
    return value.is_cuda and torch.cuda.is_current_stream_capturing()
