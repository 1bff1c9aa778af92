"""Of images of one size whose positions follow each other: which are the frames of a video?

The others are an image and its references, that every query has to see. How they are numbered tells them apart, since
references are counted by whole numbers, whatever the rows and columns are measured in:

    0 1 2 3, or 7 8 9 10        a video: its frames are counted as places are
    0, 0.04, 0.36, 0.68         a video: seconds (LTX, MiniMax-H3)
    0 1                         an image and a reference (FLUX Kontext)
    0 10 20                     an image and references, among rows and columns that are counted by one (FLUX.2)
    0 1 2 3 10, or -1 0 1 2 3   a video, and a reference after or before it
    0 1 9 17                    a causal video, among rows and columns in pixels
    0 8 16, or 0 10 20          a video or references, among rows and columns in pixels
"""

from __future__ import annotations

import torch
from torch import Tensor


def frames_of_video(cells: Tensor) -> range | None:
    """Which of the images in [images, rows, columns, features] the video has: the first one alone of an image and its
    references. None: their numbers may be either's.

    Features are ids, coordinates, or cosines and sines, which don't show the numbers: of these two images are no video.
    """
    images = cells.shape[0]
    numbers = _moving(cells[:, 0, 0])
    if images < 2 or bool(cells.abs().max() <= 1 + 1e-3):
        return range(images if images > 2 else 1)
    if numbers.shape[1] == 0:  # the same positions again and again
        return range(images)
    steps = numbers[1:] - numbers[:-1]
    if not bool((numbers == numbers.round()).all()):
        forward = (steps.sign() == steps[0].sign()).all(1)
        return range(_leading(forward) + 1)
    counted = _leading((steps == 1).all(1)) + 1
    if counted > 2:
        return _from_zero(numbers[:counted])
    if images == 2 or (_are_counted(cells[0, :, 0]) and _are_counted(cells[0, 0])):
        return range(1)
    causal = bool((steps[0] == 1).all() and (steps[1:] == steps[1]).all() and (steps[1] > 1).all())
    return range(images) if causal else None


def _from_zero(numbers: Tensor) -> range:
    """Images before zero stand before a video that begins there, unless zero is the middle of one."""
    first, last = float(numbers[0].min()), float(numbers[-1].max())
    before = 0 if -1 <= first + last <= 0 else max(0, min(-int(first), len(numbers) - 1))
    return range(before, len(numbers))


def _leading(true: Tensor) -> int:
    """How many of a line of flags are set before the first that is not."""
    ends = (~true).nonzero()
    return int(ends[0]) if len(ends) else len(true)


def _are_counted(line: Tensor) -> bool:
    """Do positions go on by one?"""
    moving = _moving(line)
    return bool((moving[1:] - moving[:-1] == 1).all())


def _moving(line: Tensor) -> Tensor:
    """[positions, those columns that change] of [positions, columns]"""
    return line[:, torch.any(line != line[:1], 0)]
